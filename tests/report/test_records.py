"""Token records against full logits, and what of them reaches the disk."""

import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.references import B, make_batch
from tests.helpers.trainers import make_trainer, run, trainer_gradients
from tests.report.runs import SCHEDULE, THRESHOLD, write_page
from trl_pdm import PDMGRPOConfig
from trl_pdm.report.records import FOLDER, TokenRecords, record_files, token_texts, write_settings
from trl_pdm.report.runs import load_run


def test_records_are_what_full_logits_say(trained):
    _, folder, expected = trained
    files = record_files(folder)
    assert list(files) == [2, 4, 6, 8]
    tables = {step: pd.read_parquet(file) for step, file in files.items()}
    for step, table in tables.items():
        assert (table.pop("step") == step).all()
        pd.testing.assert_frame_equal(
            table, expected[step][table.columns], rtol=1e-3, atol=1e-6, check_dtype=False, check_column_type=False
        )
    tokens = pd.concat(tables)
    assert 0 < (~tokens["keep"]).sum() < tokens["outside"].sum() < len(tokens), "all three states, or a test of little"
    assert tokens["reward"].nunique() > 2
    assert tables[8].attrs["divergence_threshold"] == THRESHOLD


def test_recording_changes_nothing(trained, tmp_path):
    trainer, *_ = trained
    without = make_trainer(tmp_path, **SCHEDULE)
    run(without)
    for expected, actual in zip(without.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(actual, expected)
    assert not (tmp_path / FOLDER).exists(), "records are opt-in"


def test_settings_are_left_without_secrets(trained, tmp_path):
    trainer, folder, _ = trained
    settings = json.loads((folder / "run_settings.json").read_text())
    expected = {"divergence_threshold": THRESHOLD, "direction": "predictive", "learning_rate": 2e-3, "processes": 1}
    assert expected.items() <= settings.items() and settings["reward_funcs"] == ["count_ones"]
    assert load_run(folder, "run").settings == settings
    write_settings(PDMGRPOConfig(tmp_path, use_cpu=True, hub_token="hf_secret", divergence="tv"), model="m")
    written = (tmp_path / "run_settings.json").read_text()
    assert "hf_secret" not in written and json.loads(written)["divergence_threshold"] == 0.27, "what was in effect"


def recorded(trainer, batch):
    trainer.state.global_step = 3
    trainer_gradients(trainer, batch)
    trainer.log({})
    return pd.read_parquet(Path(trainer.args.output_dir) / FOLDER / "step_000003.parquet")


def test_tokens_of_tools_and_without_logprob_are_told_apart(tmp_path):
    trainer = make_trainer(tmp_path, log_token_assessments=B + 1, divergence_threshold=0.05)
    batch, _ = make_batch(trainer.model)  # a tool's token in the first completion, the third
    batch["behavior_topk_logps"][1, 0] = math.nan
    table = recorded(trainer, batch).set_index(["completion", "position"])
    assert table.index.tolist() == list(map(tuple, batch["completion_mask"].nonzero().tolist()))
    assert table.index[~table["trained_on"]].tolist() == [(0, 2)]
    assert table.index[table["behavior_logprob"].isna()].tolist() == [(1, 0)] and table.loc[(1, 0), "keep"]
    page = write_page(tmp_path)
    assert page.count('class="token untrained"') == 1 and page.count("sampled without a logprob") == 1
    assert ">not trained on</li>" in re.sub(r"</span> ", ">", page)


def test_evaluation_and_other_processes_record_nothing(tmp_path):
    trainer = make_trainer(tmp_path, log_token_assessments=1)
    batch, _ = make_batch(trainer.model)
    trainer.model.eval()
    trainer.compute_loss(trainer.model, batch)
    trainer.log({})
    trainer.model.train()
    trainer.log({})
    trainer._token_records = TokenRecords(trainer.args, writes=False)
    trainer_gradients(trainer, batch)
    trainer.log({})
    assert not (tmp_path / FOLDER).exists()


def test_a_crash_while_writing_leaves_no_record(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, log_token_assessments=1)
    batch, _ = make_batch(trainer.model)

    def dies(self, path, **kwargs):
        Path(path).write_bytes(b"PAR1 and no more")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pd.DataFrame, "to_parquet", dies)
        with pytest.raises(KeyboardInterrupt):
            recorded(trainer, batch)
    assert list((tmp_path / FOLDER).iterdir()) and not record_files(tmp_path)
    assert len(recorded(trainer, batch)) == batch["completion_mask"][0].sum()
    assert list(record_files(tmp_path)) == [3]


def as_pretrained(tokenizer):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_tokenizer():
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return as_pretrained(tokenizer)


def word_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({"\u2581so": 0, "\u2581it": 1, "\u2581goes": 2}, unk_token="\u2581so"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return as_pretrained(tokenizer)


@pytest.mark.parametrize(
    "tokenizer, text, expected",
    [
        (byte_tokenizer, "a \u00e9\u20ac!", ["a", " ", "", "\u00e9", "", "", "\u20ac", "!"]),
        (byte_tokenizer, "\U0001f600", ["", "", "", "\U0001f600"]),
        (word_tokenizer, "so it goes so", ["so", " it", " goes", " so"]),
    ],
)
def test_token_texts_make_up_the_text(tokenizer, text, expected):
    tokenizer = tokenizer()
    assert token_texts(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == expected


def test_bytes_that_are_no_character_are_shown_soon():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("\u20ac")[1:2] * 6 + tokenizer.encode("ab")
    texts = token_texts(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids) and "\ufffd" in "".join(texts[:4]) and texts[-1] == "b"


def test_rewards_are_weighted_and_of_the_own_process():
    records = TokenRecords(PDMGRPOConfig(use_cpu=True, log_token_assessments=1), writes=True)
    batch = {"completion_ids": torch.zeros(3, 5, dtype=torch.long)}
    of_all_processes = {"a": [1.0, math.nan, 3.0, 7.0, 7.0, 7.0], "b": [10.0, math.nan, math.nan, 7.0, 7.0, 7.0]}
    records.tag("train", batch, of_all_processes, torch.tensor([1.0, 0.5]))
    assert batch["reward"].tolist() == pytest.approx([6.0, math.nan, 3.0], nan_ok=True)


def test_rewards_of_functions_that_trl_takes_for_one_are_left_out():
    records = TokenRecords(PDMGRPOConfig(use_cpu=True, log_token_assessments=1), writes=True)
    batch = {"completion_ids": torch.zeros(2, 5, dtype=torch.long)}
    records.tag("train", batch, {"partial": [1.0, 2.0, 3.0, 4.0]}, torch.tensor([1.0, 1.0]))
    assert "reward" not in batch


@pytest.mark.parametrize("value", [-1, 1.5, None])
def test_the_field_refuses_what_is_no_number_of_completions(value):
    with pytest.raises(ValueError, match="`log_token_assessments` must be a number of completions, or 0 for none"):
        PDMGRPOConfig(use_cpu=True, log_token_assessments=value)
