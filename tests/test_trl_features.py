"""TRL's documented features on our trainer: each does here what it does in stock, with the mask in the loss.

Where stock can be the reference, our mask is GRPO's: two optimizer steps a rollout, the second of them clipped, and the
weights that come out are the same. Tools and environments are in `rollout/test_tools.py`, rollout functions in
`rollout/`, quantized bases in `weight_sync/`, checkpoints in `test_trainer_run.py`.
"""

import asyncio
import copy
import math

import pandas as pd
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen3ForSequenceClassification,
    StaticCache,
)
from trl import GRPOTrainer

from tests.helpers import tiny
from tests.helpers.references import sampled_logps
from tests.helpers.trainers import TWO_STEPS, make_trainer, run, weights
from trl_pdm import PDMGRPOConfig, PDMGRPOTrainer


pytestmark = pytest.mark.slow  # a hundred trainings
EOS = 1
PER_STEP = 8
GROUP = 4
GRPO = dict(proximity="ratio", direction="ratio", importance_ratio_max=None)
EVERYTHING_KEPT = dict(divergence_threshold=1e9, importance_ratio_max=None)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("features") / "model", seed=8, num_hidden_layers=1)


def make(path, cls=PDMGRPOTrainer, *, masks=GRPO, model=None, **options):
    schedule = dict(
        per_device_train_batch_size=PER_STEP,
        per_device_eval_batch_size=PER_STEP,
        num_generations=GROUP,
        max_completion_length=10,
        temperature=1.0,
        max_steps=3,  # the third is on a second rollout
        optim="sgd",  # equal gradients are equal weights
        learning_rate=0.02,
        max_grad_norm=1e6,  # clipping would hide how a loss is scaled
        lr_scheduler_type="constant",
        epsilon=0.02,
        **TWO_STEPS,
    )
    masks = masks if cls is PDMGRPOTrainer else {}
    return make_trainer(f"{path}-trained", cls, model=model() if model else path, **schedule | masks | options)


def outcome(*args, **kwargs):
    """Weights and logs of a training run."""
    trainer = make(*args, **kwargs)
    logs = run(trainer)
    return weights(trainer), logs


def comparable(log):
    """Without times, and without what tells clipping from a mask."""
    apart = ("loss", "policy_loss", "clip_ratio", "step_time", "train_", "eval_loss", "eval_clip_ratio")
    apart += ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second")
    apart += ("vespo/phi_seq_mean",)  # of sequences in stock, of tokens with token-level advantages
    return {name: value for name, value in log.items() if not name.startswith(apart)}


def assert_trained_alike(ours, stock):
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=1e-6)
    for log, stock_log in zip(ours[1], stock[1], strict=True):
        expected = comparable(stock_log)
        assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)


def values(logs, name):
    return [log[name] for log in logs if name in log]


def assert_masked_as_clipped(ours, stock):
    masked = values(ours[1], "trust_region/masked")
    assert masked == pytest.approx(values(stock[1], "clip_ratio/region_mean"), abs=1e-6)
    assert max(masked) > 0, "the mask must act"


def rollouts(trainer):
    """The batches that the trainer makes of its rollouts, from now on."""
    batches, score = [], trainer._generate_and_score_completions

    def spy(inputs):
        batches.append(score(inputs))
        return batches[-1]

    trainer._generate_and_score_completions = spy
    return batches


# ---- Options of the config


def brevity(completions, **kwargs):
    return [1 / (1 + len(completion)) for completion in completions]


REWARDS = dict(reward_funcs=[tiny.count_ones, brevity])
LORA = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

# What is set, and what is set with and without it.
OPTIONS = {
    "scale_rewards by the batch": (dict(scale_rewards="batch"), {}),
    "scale_rewards off": (dict(scale_rewards=False), {}),
    "reward_weights": (dict(reward_weights=[0.3, 40.0]), REWARDS),
    "multi_objective_aggregation": (dict(multi_objective_aggregation="normalize_then_sum"), REWARDS),
    "mask_truncated_completions": (dict(mask_truncated_completions=True), {}),
    "top_entropy_quantile": (dict(top_entropy_quantile=0.3), {}),
    "off_policy_mask_threshold": (dict(off_policy_mask_threshold=0.001), {}),
    "beta": (dict(beta=0.3), {}),
    "use_bias_correction_kl": (dict(use_bias_correction_kl=False), dict(beta=0.3)),
    "sync_ref_model": (dict(sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.9), dict(beta=3.0)),
    "entropy_coef": (dict(entropy_coef=0.3), {}),
    "use_adaptive_entropy": (
        dict(use_adaptive_entropy=True, entropy_target=10, entropy_coef_delta=0.2, entropy_coef_max=0.3),
        dict(entropy_coef=0.1),
    ),
    "temperature": (dict(temperature=0.6), {}),
    "top_p": (dict(top_p=0.5), {}),
    "top_k": (dict(top_k=3), {}),
    "min_p": (dict(min_p=0.2), {}),
    "repetition_penalty": (dict(repetition_penalty=3.0), {}),
    "generation_kwargs": (dict(generation_kwargs={"min_new_tokens": 10}), {}),
    "num_generations": (dict(num_generations=2), {}),
    "num_iterations": (dict(num_iterations=2), {}),
    "generation_batch_size": (dict(steps_per_generation=None, generation_batch_size=4 * PER_STEP), {}),
    "shuffle_dataset": (dict(shuffle_dataset=False), {}),
    "cast_lm_head_to_fp32": (dict(cast_lm_head_to_fp32=True), dict(model_init_kwargs={"dtype": "bfloat16"})),
    "model_init_kwargs": (dict(model_init_kwargs={"dtype": "bfloat16"}), {}),
    "loss_type grpo": (dict(loss_type="grpo"), {}),
    "loss_type bnpo": (dict(loss_type="bnpo"), {}),
    "loss_type dr_grpo": (dict(loss_type="dr_grpo"), {}),
    "epsilon_high": (dict(epsilon_high=2.0), {}),
    "disable_dropout": (dict(disable_dropout=True), dict(peft_config=LoraConfig(lora_dropout=0.5, **LORA))),
}
# These losses shape the ratio themselves: they are stock's where everything is inside the trust region.
SHAPING = {
    "delta": (dict(delta=1.1), dict(loss_type="grpo", epsilon=0.5)),
    "importance_sampling_level": (dict(importance_sampling_level="sequence"), dict(loss_type="grpo", delta=10.0)),
    "sapo temperatures": (dict(sapo_temperature_neg=4.0, sapo_temperature_pos=3.0), dict(loss_type="sapo")),
    "vespo": (
        dict(vespo_k_pos=1.0, vespo_k_neg=1.5, vespo_lambda_pos=0.4, vespo_lambda_neg=0.3),
        dict(loss_type="vespo"),
    ),
    "luspo": (dict(loss_type="luspo"), dict(loss_type="grpo", importance_sampling_level="sequence")),
}


@pytest.fixture(scope="module")
def without_option(path):
    """Weights of training without an option: many have the same alternative."""
    known = {}

    def train(masks, common):
        key = repr((masks, common))
        if key not in known:
            known[key], _ = outcome(path, masks=masks, **common)
        return known[key]

    return train


@pytest.mark.parametrize("option", [*OPTIONS, *SHAPING])
def test_options_act_as_in_stock(path, without_option, option):
    fields, common = (OPTIONS | SHAPING)[option]
    masks = GRPO if option in OPTIONS else EVERYTHING_KEPT
    ours = outcome(path, masks=masks, **common | fields)
    stock = outcome(path, GRPOTrainer, **common | fields)
    assert_trained_alike(ours, stock)
    change = (without_option(masks, common) - ours[0]).norm()
    assert change > 1e-4 * ours[0].norm(), "the option must change what is trained"
    if masks is GRPO:
        assert_masked_as_clipped(ours, stock)


def test_truncated_completions_leave_the_weights_alone(path):
    endless = dict(generation_kwargs={"suppress_tokens": [0, EOS]}, masks={})
    start = weights(make(path))
    for mask_truncated in (True, False):
        end, logs = outcome(path, mask_truncated_completions=mask_truncated, **endless)
        assert torch.equal(start, end) == mask_truncated
        assert set(values(logs, "completions/clipped_ratio")) == {1.0}
        assert (max(values(logs, "grad_norm")) == 0) == mask_truncated


@pytest.mark.parametrize("kwargs", [{"use_reentrant": False}, {"use_reentrant": True}], ids=repr)
def test_gradient_checkpointing_changes_nothing(path, kwargs):
    trainer = make(path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    logs = run(trainer)
    assert trainer.model.is_gradient_checkpointing
    assert_trained_alike((weights(trainer), logs), outcome(path))


def test_compiling_changes_nothing_and_is_done_once(path, monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    torch._dynamo.reset()
    same = dict(pad_to_multiple_of=16, max_steps=2 * torch._dynamo.config.recompile_limit)
    assert_trained_alike(
        outcome(path, torch_compile=True, torch_compile_backend="eager", **same), outcome(path, **same)
    )


def test_noise_that_looks_like_divergence_is_warned_of(path, caplog):
    dropout = dict(peft_config=LoraConfig(lora_dropout=0.5, **LORA))
    for fields, warned in [
        ({}, 0),
        (dropout, 1),
        (dropout | {"disable_dropout": True}, 0),
        ({"neftune_noise_alpha": 5}, 1),
    ]:
        caplog.clear()
        make(path, **fields)
        assert sum("takes that for divergence" in line for line in caplog.messages) == warned, fields


def test_padding_changes_nothing_but_shapes(path):
    trainer = make(path, pad_to_multiple_of=16)
    batches = rollouts(trainer)
    logs = run(trainer)
    for batch in batches:
        assert batch["prompt_ids"].shape[1] == batch["completion_ids"].shape[1] == 16
        assert batch["behavior_topk_ids"].shape[:2] == batch["completion_ids"].shape
    assert_trained_alike((weights(trainer), logs), outcome(path))


def test_cache_implementation(path, monkeypatch):
    made, initialise = [], StaticCache.__init__
    monkeypatch.setattr(StaticCache, "__init__", lambda self, *a, **k: made.append(self) or initialise(self, *a, **k))
    ours = outcome(path, cache_implementation="static")
    assert len(made) > 0
    assert_trained_alike(ours, outcome(path, GRPOTrainer, cache_implementation="static"))


def test_continuous_batching(path, monkeypatch):
    few = {"num_blocks": 16, "block_size": 32, "max_batch_tokens": 64}  # a small cache is made quickly
    trainer = make(path, use_transformers_continuous_batching=True, transformers_continuous_batching_config=few)
    calls, generate = [], trainer.model.generate_batch
    monkeypatch.setattr(trainer.model, "generate_batch", lambda *a, **k: calls.append(a) or generate(*a, **k))
    batches = rollouts(trainer)
    logs = run(trainer)
    assert len(calls) == len(batches) == 2
    assert values(logs, "trust_region/divergence_max")[0] < 1e-5, "scored by the policy that sampled"
    assert max(values(logs, "trust_region/masked")) > 0


def test_the_former_name_of_continuous_batching(tmp_path):
    with pytest.warns(FutureWarning, match="use_transformers_paged"):
        config = PDMGRPOConfig(str(tmp_path), use_transformers_paged=True, use_cpu=True, bf16=False)
    assert config.use_transformers_continuous_batching


def test_liger_kernels_that_bypass_the_head_are_refused(path):
    with pytest.raises(ValueError, match="fused_linear_cross_entropy.* is not supported"), pytest.warns(FutureWarning):
        make(path, use_liger_kernel=True, liger_kernel_config={"fused_linear_cross_entropy": True})


# ---- Rewards


def test_reward_functions(path):
    """Synchronous and not, with columns, `None`, the trainer's state, and logs of their own: all as counted by hand."""
    seen = []

    def hits(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
        seen.append((trainer_state.global_step, answer, completions))
        log_extra("answer", answer)
        log_metric("answers", len(set(answer)))
        assert tiny.tokenizer().batch_decode(completion_ids, skip_special_tokens=True) == completions
        return [float(completion.count(a)) for completion, a in zip(completions, answer, strict=True)]

    async def length(completions, answer, **kwargs):
        await asyncio.sleep(0)
        return [None if a == "1" else len(c) / 10 for c, a in zip(completions, answer, strict=True)]

    answers = ["1", "2", "3", "1"] * 16
    trainer = make(
        path,
        masks={},
        train_dataset=tiny.prompts().add_column("answer", answers),
        reward_funcs=[hits, length],
        reward_weights=[2.0, -0.5],
        scale_rewards="none",
    )
    batches = rollouts(trainer)
    logs = run(trainer)
    assert [step for step, _, _ in seen] == [0, 2]
    of_rollouts = [log for log in logs if "reward" in log]
    for (_, answer, completions), log, batch in zip(seen, of_rollouts, batches, strict=True):
        by_hand = [
            2.0 * completion.count(a) - (0 if a == "1" else 0.05 * len(completion))
            for completion, a in zip(completions, answer, strict=True)
        ]
        assert log["reward"] == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5, abs=1e-6)
        assert log["answers"] == len(set(answer))
        groups = torch.tensor(by_hand).view(-1, GROUP)
        expected = (groups - groups.mean(1, keepdim=True)).flatten()
        torch.testing.assert_close(batch["advantages"], expected)
        assert expected.abs().max() > 0.1
    assert list(trainer._logs["extra"]["answer"]) == seen[-1][1]


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "by instance"])
def test_reward_models(path, tmp_path, by_name):
    config = AutoModelForCausalLM.from_pretrained(path).config
    config.num_labels = 1
    torch.manual_seed(1)
    judge = Qwen3ForSequenceClassification(config)
    tokenizer = tiny.tokenizer()
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    texts = []

    def nothing(prompts, completions, **kwargs):
        texts.append([p + c for p, c in zip(prompts, completions, strict=True)])
        return [0.0] * len(prompts)

    given = [str(tmp_path / "judge")] if by_name else [copy.deepcopy(judge)]
    trainer = make(
        path,
        reward_funcs=[*given, nothing],
        reward_processing_classes=None if by_name else [tokenizer, None],
        max_steps=2,
    )
    name = trainer.reward_func_names[0]
    logs = run(trainer)
    judge.eval()
    with torch.no_grad():
        scores = [
            judge(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits.item()
            for text in texts[0]
        ]
    assert len(set(scores)) > 4
    assert logs[0]["reward"] == logs[0][f"rewards/{name}/mean"]
    assert logs[0]["reward"] == pytest.approx(sum(scores) / len(scores), rel=1e-4, abs=1e-5)


# ---- Datasets and what is logged


def test_conversations_and_chat_template_kwargs(path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ ending }}"
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions, strict=True))
        return tiny.count_ones([completion[0]["content"] for completion in completions])

    questions = [[{"role": "user", "content": f"say {i}"}] for i in range(64)]
    arguments = dict(
        train_dataset=Dataset.from_dict({"prompt": questions}),
        reward_funcs=reward,
        processing_class=tokenizer,
        chat_template_kwargs={"ending": "ok"},
    )
    trainer = make(path, **arguments)
    batches = rollouts(trainer)
    ours = run(trainer)
    assert [completion[0]["role"] for _, completion in seen] == ["assistant"] * len(seen)
    rendered = tokenizer.batch_decode(batches[0]["prompt_ids"], skip_special_tokens=True)
    assert rendered == [prompt[0]["content"] + "ok" for prompt, _ in seen[: len(rendered)]]
    assert_trained_alike((weights(trainer), ours), outcome(path, GRPOTrainer, **arguments))


def test_iterable_datasets_train_and_evaluate_as_others(path):
    options = dict(shuffle_dataset=False, eval_strategy="steps", eval_steps=2)
    data = {"train_dataset": tiny.prompts(), "eval_dataset": tiny.prompts(4)}
    streams = {name: dataset.to_iterable_dataset() for name, dataset in data.items()}
    from_streams = outcome(path, **options, **streams)
    assert_trained_alike(from_streams, outcome(path, GRPOTrainer, **options, **streams))
    torch.testing.assert_close(from_streams[0], outcome(path, **options, **data)[0])
    assert len(values(from_streams[1], "eval_reward")) == 2


def test_number_of_generations_in_evaluation(path):
    prompts_seen = []

    def reward(prompts, completions, trainer_state, **kwargs):
        prompts_seen.append(prompts)
        return tiny.count_ones(completions)

    trainer = make(path, reward_funcs=reward, num_generations_eval=2, eval_dataset=tiny.prompts(8))
    logs = trainer.evaluate()
    assert all(prompts.count(prompt) == 2 for prompts in prompts_seen for prompt in prompts)
    assert sum(map(len, prompts_seen)) == 16
    assert logs["eval_trust_region/outside"] == 0 and math.isfinite(logs["eval_loss"])


def test_completions_are_logged(path, tmp_path, capsys):
    def reward(completions, log_extra, **kwargs):
        log_extra("length", [len(completion) for completion in completions])
        return tiny.count_ones(completions)

    trainer = make(
        path,
        reward_funcs=reward,
        log_completions=True,
        num_completions_to_print=2,
        output_dir=str(tmp_path),
        max_steps=1,
    )
    (batches, _) = rollouts(trainer), run(trainer)
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 2 * PER_STEP and set(table["step"]) == {1}
    assert table["completion"].tolist() == tiny.tokenizer().batch_decode(
        batches[0]["completion_ids"], skip_special_tokens=True
    )
    assert table["reward"].tolist() == pytest.approx(tiny.count_ones(table["completion"]))
    assert table["length"].tolist() == table["completion"].map(len).tolist()
    assert table["advantage"].tolist() == pytest.approx(batches[0]["advantages"].tolist())
    printed = capsys.readouterr().out
    assert "Step 1" in printed and sum(prompt in printed for prompt in set(table["prompt"])) in (1, 2)


# ---- Adapters and images


def test_new_adapters_train_as_in_stock(path):
    adapter = dict(peft_config=LoraConfig(**LORA), beta=0.3, learning_rate=0.1)
    ours, stock = outcome(path, **adapter), outcome(path, GRPOTrainer, **adapter)
    assert_trained_alike(ours, stock)
    assert_masked_as_clipped(ours, stock)


def test_trained_adapters_are_their_own_reference(path):
    def adapted():
        torch.manual_seed(3)
        return get_peft_model(AutoModelForCausalLM.from_pretrained(path), LoraConfig(**LORA))

    options = dict(model=adapted, beta=0.3, learning_rate=0.1)
    trainer = make(path, **options)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    logs = run(trainer)
    kl = values(logs, "kl")
    assert abs(kl[0]) < 1e-6, "the adapter as it came, and not the base, is the reference"
    assert kl[1] > 1e-4
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and all(".default." in name for name in moved)
    assert_trained_alike((weights(trainer), logs), outcome(path, GRPOTrainer, **options))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A vision-language model, which needs no torchvision, and its processor."""
    side, patch = 16, 8
    # Before transformers 5 the only one was this one
    image_processor = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.image_token = "<image>"
    image_token_id = tokenizer.convert_tokens_to_ids("<image>")
    template = (
        "{% for m in messages %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    processor = LlavaProcessor(
        image_processor=image_processor(size={"height": side, "width": side}, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=side,
        patch_size=patch,
    )
    text = tiny.model(len(tokenizer), num_hidden_layers=1).config
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=image_token_id,
            image_seq_length=(side // patch) ** 2,
            vision_feature_layer=-1,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    path = str(tmp_path_factory.mktemp("llava") / "model")
    model.save_pretrained(path)
    return path, processor


def test_images_train_as_in_stock(llava):
    path, processor = llava
    colours = [Image.new("RGB", (16, 16), (8 * i, 255 - 8 * i, 40)) for i in range(32)]
    questions = [[{"role": "user", "content": f"say {i}"}] for i in range(32)]
    arguments = dict(
        train_dataset=Dataset.from_dict({"prompt": questions, "image": colours}),
        reward_funcs=lambda completions, **kwargs: tiny.count_ones([c[0]["content"] for c in completions]),
        processing_class=processor,
        beta=0.1,
    )
    trainer = make(path, **arguments)
    batches = rollouts(trainer)
    ours = run(trainer)
    ours = weights(trainer), ours
    stock = outcome(path, GRPOTrainer, **arguments)
    assert_trained_alike(ours, stock)
    assert_masked_as_clipped(ours, stock)

    # The behaviour policy saw the images
    batch, model = batches[0], AutoModelForImageTextToText.from_pretrained(path)
    for pixels in (batch["pixel_values"], torch.zeros_like(batch["pixel_values"])):
        with torch.no_grad():
            expected = sampled_logps(model, batch, temperature=1.0, pixel_values=pixels)
        kept = batch["completion_mask"].bool()
        error = (batch["behavior_topk_logps"][..., 0] - expected)[kept].abs().max()
        assert (error < 1e-4) == (pixels is batch["pixel_values"])
