"""Canaries: each place that reaches into TRL fails with a sentence when TRL has moved."""

import inspect
import math
import os
import re
import threading
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import trl
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer import utils as trl_utils

from tests.helpers import tiny
from tests.helpers.references import K, T, assert_same, full_logps, make_batch
from tests.helpers.trainers import TWO_STEPS, make_trainer, run, trainer_gradients
from trl_pdm import PDMGRPOTrainer
from trl_pdm._hooks import SUPPORTED_TRL, TRLCompatibilityError, substituted
from trl_pdm.config import LOSSES_WITHOUT_SHAPING
from trl_pdm.rollout import TopKVLLMGeneration
from trl_pdm.rollout import trainer as rollout_trainer
from trl_pdm.topk_head import topk_head


WHERE = re.escape(f"TRL {trl.__version__} is installed, trl{SUPPORTED_TRL} is supported")


def test_supported_range_is_the_packages_own():
    """`SUPPORTED_TRL` is what `pyproject.toml` says."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert f"trl{SUPPORTED_TRL}" in project["dependencies"]


def test_substitution_is_undone_and_needs_the_name():
    """A name is substituted for a while, and only where it exists."""
    original = grpo_trainer.VLLMGeneration
    with pytest.raises(RuntimeError, match="inside"), substituted(grpo_trainer, VLLMGeneration=lambda: "ours"):
        assert grpo_trainer.VLLMGeneration() == "ours"
        raise RuntimeError("inside")
    assert grpo_trainer.VLLMGeneration is original
    with pytest.raises(TRLCompatibilityError, match=WHERE), substituted(grpo_trainer, VLLMBackend=lambda: None):
        pass


def test_substitutions_in_threads_do_not_mix(monkeypatch):
    """Each thread sees its own, one that substitutes nothing sees the original, and all of them are undone."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", lambda: "stock")
    original, seen, others = grpo_trainer.VLLMGeneration, [], []

    def construct(number):
        for attempt in range(20):
            try:
                with substituted(grpo_trainer, VLLMGeneration=lambda: number):
                    time.sleep(1e-3)
                    seen.append(grpo_trainer.VLLMGeneration() == number)
                    if attempt % 3 == number % 3:
                        raise ValueError("a constructor that fails")
            except ValueError:
                pass

    threads = [threading.Thread(target=construct, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        others.append(grpo_trainer.VLLMGeneration())
        time.sleep(1e-4)
    assert len(seen) == 80 and all(seen)
    assert set(others) == {"stock"}
    assert grpo_trainer.VLLMGeneration is original


@pytest.mark.parametrize("name", ["VLLMGeneration", "GRPOConfig"])
def test_names_looked_up_at_construction(tmp_path, monkeypatch, name):
    """Without one of its names, `GRPOTrainer.__init__` is refused."""
    monkeypatch.delattr(grpo_trainer, name)
    with pytest.raises(TRLCompatibilityError, match=f"no longer has `{name}`.*{WHERE}"):
        make_trainer(tmp_path)


def test_generate_returns_other_values(tmp_path, monkeypatch):
    """More or fewer values from `GRPOTrainer._generate` are refused."""
    generate = GRPOTrainer._generate
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda self, prompts: (*generate(self, prompts), None))
    trainer = make_trainer(tmp_path, max_steps=1)
    with pytest.raises(TRLCompatibilityError, match=f"`GRPOTrainer._generate`.*{WHERE}"):
        trainer.train()


@pytest.mark.parametrize("steps_per_generation", [2, 4], ids=["aligned", "several"])
def test_generation_by_another_name(tmp_path, steps_per_generation):
    """A rollout that does not come through `_generate` is refused, however many steps use it."""
    trainer = make_trainer(tmp_path, max_steps=1, steps_per_generation=steps_per_generation)
    trainer._generate = lambda prompts: GRPOTrainer._generate(trainer, prompts)  # as if ours were never called
    with pytest.raises(TRLCompatibilityError, match=f"no longer generates by `_generate`.*{WHERE}"):
        trainer.train()


def test_scoring_phase_scores_no_policy(tmp_path, monkeypatch):
    """A rollout whose policy TRL does not score, where it should, is refused."""
    trainer = make_trainer(tmp_path, max_steps=1, steps_per_generation=4)
    # TRL skips its scoring when it believes that steps are aligned
    original = GRPOTrainer._generate_and_score_completions

    def aligned(self, inputs):
        self.args.steps_per_generation = 2
        return original(self, inputs)

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", aligned)
    with pytest.raises(TRLCompatibilityError, match=f"scores a rollout's policy first.*{WHERE}"):
        trainer.train()


def test_advantages_read_before_scoring(tmp_path, monkeypatch):
    """A `_compute_loss` that reads the advantages before scoring is refused."""
    trainer = make_trainer(tmp_path)
    batch, _ = make_batch(trainer.model)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: inputs["advantages"].sum())
    with pytest.raises(TRLCompatibilityError, match=f"reads the advantages before scoring.*{WHERE}"):
        trainer.compute_loss(trainer.model, batch)


def test_advantages_read_too_early_by_a_subclass_of_the_user(tmp_path):
    """The user's method is named, and where the advantages are, instead of blaming TRL."""

    class MyTrainer(PDMGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return inputs["advantages"].sum()

    trainer = make_trainer(tmp_path, MyTrainer)
    batch, _ = make_batch(trainer.model)
    with pytest.raises(
        RuntimeError, match=r"`MyTrainer._compute_loss` reads `inputs\['advantages'\]` before the forward"
    ):
        trainer.compute_loss(trainer.model, batch)


def test_a_subclass_of_the_user_that_copies_the_batch(tmp_path):
    """The masked advantages come to the dictionary that `compute_loss` hands over, and to no copy of it."""

    class MyTrainer(PDMGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, {**inputs})

    trainer = make_trainer(tmp_path, MyTrainer)
    batch, _ = make_batch(trainer.model)
    with pytest.raises(RuntimeError, match=r"`MyTrainer._compute_loss` hands on a copy of `inputs`"):
        trainer.compute_loss(trainer.model, batch)


def test_loss_that_never_scores(tmp_path, monkeypatch):
    """A `_compute_loss` that does not score is refused."""
    trainer = make_trainer(tmp_path)
    batch, _ = make_batch(trainer.model)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: inputs.get("advantages", 0))
    with pytest.raises(TRLCompatibilityError, match=WHERE):
        trainer.compute_loss(trainer.model, batch)


def test_behaviour_logprobs_ignored(tmp_path, monkeypatch):
    """TRL reads `old_per_token_logps` with `.get`: were it to stop, the loss would have no ratio."""
    trainer = make_trainer(tmp_path)
    batch, _ = make_batch(trainer.model)
    read = set()

    class Watched(dict):
        def get(self, name, default=None):
            read.add(name)
            return super().get(name, default)

        def __getitem__(self, name):
            read.add(name)
            return super().__getitem__(name)

    loss = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: loss(self, model, _watch(inputs)))

    def _watch(inputs):
        trainer._loss.given = watched = Watched(inputs)
        return watched

    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, batch)
    assert {"advantages", "old_per_token_logps"} <= read


# ---- What is there to hook into: these fail where TRL has moved, `canary.py` prints what they say


@dataclass
class Flat:
    """vLLM's flat logprobs, and a position at a time as TRL reads them."""

    token_ids: list[int]
    logprobs: list[float]
    width: int

    def __iter__(self):
        for start in range(0, len(self.token_ids), self.width):
            entries = zip(self.token_ids[start:][: self.width], self.logprobs[start:][: self.width], strict=True)
            yield {token: SimpleNamespace(rank=rank, logprob=logprob) for rank, (token, logprob) in enumerate(entries)}


class Engine:
    """Stands in for `vllm.LLM`: samples from weights that only a sync brings."""

    def __init__(self, **kwargs):
        self.kwargs, self.requests, self.loads = kwargs, [], 0
        self.model = tiny.model(len(tiny.tokenizer()), seed=99)
        self.llm_engine, self.model_config = self, SimpleNamespace(dtype=torch.float32, quantization=None)

    def apply_model(self, function):
        return [{}]

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.model.load_state_dict(dict(kwargs["weights_iterator"]))
        self.loads += 1

    def reset_prefix_cache(self):
        pass

    @torch.no_grad()
    def generate(self, prompts, sampling_params, **kwargs):
        self.requests.append(sampling_params)
        return [self._complete(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    def _complete(self, prompt, parameters):
        ids, flat_ids, flat_logprobs = list(prompt), [], []
        for _ in range(parameters.max_tokens):
            logits = self.model(torch.tensor([ids])).logits[0, -1] / parameters.temperature
            logprobs = logits.log_softmax(-1)
            token = torch.multinomial(logprobs.exp(), 1)
            candidates = torch.cat([token, logprobs.topk(parameters.logprobs).indices])
            flat_ids += candidates.tolist()
            flat_logprobs += logprobs[candidates].tolist()
            ids.append(token.item())
        completion = ids[len(prompt) :]
        flat = Flat(flat_ids, flat_logprobs, parameters.logprobs + 1)
        answer = SimpleNamespace(token_ids=completion, logprobs=flat)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[answer])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trainer after three steps on two rollouts of that engine, with the batches and logs of these."""
    batches, score = [], PDMGRPOTrainer._generate_and_score_completions

    def spy(self, inputs):
        batches.append(score(self, inputs))
        return batches[-1]

    # TRL sets variables of the distributed setup for vLLM
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):
        for name, value in {"LLM": Engine, "SamplingParams": SimpleNamespace}.items():
            patch.setattr(vllm_generation, name, value, raising=False)
        patch.setattr(vllm_generation, "is_vllm_available", lambda *args, **kwargs: True)
        patch.setattr(PDMGRPOTrainer, "_generate_and_score_completions", spy)
        trainer = make_trainer(
            tmp_path_factory.mktemp("hooks"),
            use_vllm=True,
            beta=0.1,
            max_steps=3,
            learning_rate=1e-2,
            sync_check_steps=1,
            **TWO_STEPS,
        )
        logs = run(trainer)
    return SimpleNamespace(trainer=trainer, batches=batches, logs=logs)


def test_construction_of_the_engine(trained):
    """`GRPOTrainer.__init__` builds `VLLMGeneration`, and that builds `LLM`, by their names in their modules."""
    assert isinstance(trained.trainer.vllm_generation, TopKVLLMGeneration)
    engine = trained.trainer.vllm_generation.llm
    assert engine.kwargs["max_logprobs"] >= K and engine.kwargs["logprobs_mode"] == "processed_logprobs"


def test_construction_of_the_config(tmp_path, monkeypatch):
    """`GRPOTrainer.__init__` builds the config that it was not given as `GRPOConfig`."""
    monkeypatch.chdir(tmp_path)
    made = []

    class Stop(Exception):
        pass

    def config(*args, **kwargs):
        made.append(args)
        raise Stop

    monkeypatch.setattr(rollout_trainer, "PDMGRPOConfig", mock.Mock(side_effect=config, from_grpo=lambda args: args))
    with pytest.raises(Stop):
        PDMGRPOTrainer(tiny.save(tmp_path / "model"), reward_funcs=tiny.count_ones, train_dataset=tiny.prompts())
    assert made


def test_request_to_the_engine(trained):
    """`VLLMGeneration.generate` asks the engine for `logprobs` and passes `generation_kwargs` on."""
    for parameters in trained.trainer.vllm_generation.llm.requests:
        assert (parameters.logprobs, parameters.flat_logprobs, parameters.detokenize) == (K, True, False)


def test_logprobs_keep_their_candidates(trained):
    """A token's first logprob goes from `VLLMGeneration.generate` through `_generate` into the batch as it is."""
    for batch in trained.batches:
        kept = batch["completion_mask"].bool()
        assert torch.equal(batch["behavior_topk_ids"][..., 0][kept], batch["completion_ids"][kept].int())
        assert torch.equal(batch["behavior_topk_logps"][..., 0][kept], batch["sampling_per_token_logps"][kept])
        assert ((batch["behavior_topk_ids"] >= 0).sum(-1)[kept] >= K).all()


def test_weights_reach_the_engine(trained):
    """`GRPOTrainer` calls `sync_weights` before each rollout, and that asks `_iter_named_params` for the weights."""
    assert trained.trainer.vllm_generation.llm.loads == len(trained.batches) == 2
    apart = [
        log["weight_sync/logp_difference_max"] for log in trained.logs if "weight_sync/logp_difference_max" in log
    ]
    assert len(apart) == 2 and max(apart) < 1e-4, "the engine sampled from other weights than the trainer's"


def test_scores_of_a_rollout(trained):
    """`_generate_and_score_completions` scores the policy first, then the reference, and no policy without a need."""
    for batch in trained.batches:
        assert "ref_per_token_logps" in batch and "old_per_token_logps" not in batch


def test_keys_of_the_batch(trained):
    """A batch holds `prompt_ids`, `prompt_mask`, `completion_ids`, `completion_mask` and one advantage a sequence."""
    for batch in trained.batches:
        shapes = {name: tuple(batch[name].shape) for name in ("prompt_ids", "completion_ids", "advantages")}
        assert shapes["prompt_ids"] == tuple(batch["prompt_mask"].shape)
        assert shapes["completion_ids"] == tuple(batch["completion_mask"].shape)
        assert shapes["advantages"] == shapes["completion_ids"][:1]


def test_metrics_are_logged(trained):
    """`GRPOTrainer.log` averages `_metrics` of the mode into the logs."""
    for log in trained.logs[:3]:
        assert log["trust_region/divergence_max"] >= 0
    assert "weight_sync/bytes" in trained.logs[0] and "reward" in trained.logs[0]
    assert not trained.trainer._metrics["train"]


def test_scoring_takes_what_the_batch_holds():
    """`_compute_loss` passes `inputs` on to `_get_per_token_logps_and_entropies` under their own names."""
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert parameters[:6] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size"]
    call = (
        inspect.getsource(GRPOTrainer._compute_loss).split("_get_per_token_logps_and_entropies(")[1].split("\n\n")[0]
    )
    passed_on = re.findall(r'(\w+)=inputs\.get\("(\w+)"\)', call)
    assert len(passed_on) >= 10
    assert [(name, name) for name, _ in passed_on] == passed_on and {name for name, _ in passed_on} <= set(parameters)


def test_signatures_of_overridden_methods():
    """The methods that are overridden take and order their arguments as before."""
    expected = {
        (GRPOTrainer, "__init__"): ["self", "model", "reward_funcs", "args"],
        (GRPOTrainer, "_generate"): ["self", "prompts"],
        (GRPOTrainer, "_generate_and_score_completions"): ["self", "inputs"],
        (GRPOTrainer, "compute_loss"): ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
        (GRPOTrainer, "_compute_loss"): ["self", "model", "inputs"],
        (GRPOTrainer, "log"): ["self", "logs", "start_time"],
        (VLLMGeneration, "_init_vllm"): ["self"],
        (VLLMGeneration, "_iter_named_params"): ["self"],
        (VLLMGeneration, "sync_weights"): ["self"],
        (VLLMGeneration, "generate"): ["self", "prompts", "images", "num_generations", "profiler"],
    }
    actual = {
        (owner, name): list(inspect.signature(getattr(owner, name)).parameters)[: len(arguments)]
        for (owner, name), arguments in expected.items()
    }
    assert actual == expected


def test_token_level_advantages(tmp_path):
    """`_compute_loss` takes advantages of shape `(B, T)`, and a zero is a token without gradient."""
    trainer = make_trainer(tmp_path, GRPOTrainer, loss_type="grpo", epsilon=1e6)
    batch, _ = make_batch(trainer.model)
    _, by_sequence = trainer_gradients(trainer, batch, pdm=False)
    advantages = batch["advantages"][:, None].expand(-1, batch["completion_ids"].shape[1])
    keep = torch.arange(advantages.shape[1]) % 2 == 0
    parts = [
        trainer_gradients(trainer, {**batch, "advantages": advantages * part}, pdm=False)[1] for part in (keep, ~keep)
    ]
    assert_same(parts[0] + parts[1], by_sequence, 1e-5)
    assert parts[0].norm() > 0 and not torch.allclose(parts[0], by_sequence)


@pytest.mark.parametrize("loss_type", LOSSES_WITHOUT_SHAPING)
def test_infinite_bounds_switch_clipping_off(tmp_path, loss_type):
    """With `epsilon_low` and `epsilon_high` at infinity, the losses do not clip and their gradients stay finite."""
    stock = make_trainer(tmp_path, GRPOTrainer, loss_type=loss_type)
    batch, _ = make_batch(stock.model)
    gradients = {}
    for bound in (1e6, math.inf, 0.01):
        stock.epsilon_low = stock.epsilon_high = bound
        gradients[bound] = trainer_gradients(stock, batch, pdm=False)[1]
    assert_same(gradients[math.inf], gradients[1e6], 1e-6)
    assert not torch.allclose(gradients[0.01], gradients[1e6]), "`epsilon_low` and `epsilon_high` must be what clips"


def test_losses_are_known():
    """The losses that TRL offers are the ones that this package knows how to mask."""
    text = GRPOConfig.__dataclass_fields__["loss_type"].metadata["help"]
    offered = set(re.findall(r"'(\w+)'", text.split(".")[0] + text.split("Supported values are")[1].split(". ")[0]))
    assert offered == {*LOSSES_WITHOUT_SHAPING, "cispo", "sapo", "luspo", "vespo"}


def test_attributes_of_the_trainer(trained):
    """What is read from the trainer, its config and its vLLM backend is still there."""
    trainer = trained.trainer
    read = [
        (trainer, "args model state accelerator loss_type importance_sampling_level beta epsilon_low epsilon_high"),
        (
            trainer,
            "use_vllm top_p top_k min_p rollout_func vllm_generation num_iterations _metrics _logs reward_weights "
            "eos_token_ids _last_loaded_step _step _buffered_inputs",
        ),
        (
            trainer.args,
            "delta epsilon epsilon_high beta vllm_importance_sampling_correction gradient_accumulation_steps",
        ),
        (trainer.args, "steps_per_generation per_device_train_batch_size per_device_eval_batch_size"),
        (trainer.args, "gradient_checkpointing_kwargs"),
        (trainer.vllm_generation, "mode model accelerator generation_kwargs repetition_penalty enable_sleep_mode"),
        (trainer.vllm_generation, "structured_outputs_regex"),
        (trainer.vllm_generation._dist, "is_zero3 is_fsdp"),
        (grpo_trainer, "disable_gradient_checkpointing VLLMGeneration GRPOConfig"),
        (vllm_generation, "extract_logprobs VLLMGeneration"),
        (trl_utils, "_ChunkedLogProbFunction maybe_gather_lm_head_ctx"),
    ]
    gone = [(owner, name) for owner, names in read for name in names.split() if not hasattr(owner, name)]
    assert not [name for _, name in gone]


def test_fields_of_the_config(tmp_path):
    """`vllm_importance_sampling_correction` is what switches TRL's own correction on, and `beta` its reference."""
    assert GRPOConfig.__dataclass_fields__["vllm_importance_sampling_correction"].default is True
    source = inspect.getsource(GRPOTrainer)
    assert "self.use_vllm and self.vllm_importance_sampling_correction" in source and "self.beta != 0.0" in source


def test_fused_head(tmp_path):
    """The model's forward calls `_ChunkedLogProbFunction`, whose third output is the log of the sum of squares."""
    trainer = make_trainer(tmp_path)
    batch, _ = make_batch(trainer.model)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad(), topk_head(mask, T, ids=batch["behavior_topk_ids"], with_sum_sq=True) as scores:
        GRPOTrainer._get_per_token_logps_and_entropies(trainer, trainer.model, ids, mask, T)
    with torch.no_grad():
        expected = full_logps(trainer.model, batch)
    kept = batch["completion_mask"].bool()
    torch.testing.assert_close(scores.sum_sq[kept], expected.exp().square().sum(-1)[kept], rtol=1e-4, atol=1e-6)
    top = expected.gather(-1, batch["behavior_topk_ids"].long().clamp(min=0))
    known = kept[..., None] & (batch["behavior_topk_ids"] >= 0)
    torch.testing.assert_close(scores.logps[known], top[known], rtol=1e-4, atol=1e-5)
