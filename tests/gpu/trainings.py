"""Small trainings, one for each thing that TRL's GPU path could do otherwise, and what comes of them.

On a GPU TRL's fused LM head scores the labelled positions only, laid out compactly, with a Triton kernel; elsewhere it
scores every position, in torch. Triton's interpreter runs the real kernel on a CPU, in a process of its own:

    python -m tests.gpu.trainings FOLDER

runs all trainings that way, and leaves what came of each in `FOLDER/{name}.pt`.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import pytest
import torch
import transformers
from peft import LoraConfig
from trl.generation import vllm_generation
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from tests.helpers import tiny
from tests.helpers.trainers import make_trainer, run, weights
from trl_pdm import PDMGRPOTrainer


VOCAB = len(tiny.tokenizer())
B, T, K = 4, 9, 6
TEMPERATURE = 0.8
LENGTHS = (9, 4, 6, 2, 9, 7, 9, 3)  # of the completions, again and again; those of 9 are truncated
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
# The config, and the spread of the head's weights that makes its distributions peaked
ARCHITECTURES = {
    "qwen3": ("Qwen3", dict(head_dim=8, tie_word_embeddings=False), 0.5),
    "qwen3 tied": ("Qwen3", dict(head_dim=8, tie_word_embeddings=True), 0.15),
    "soft-capping": ("Gemma2", dict(head_dim=8, final_logit_softcapping=6.0, query_pre_attn_scalar=8), 0.4),
    "logit scale": ("Cohere", dict(logit_scale=0.25), 0.9),
    "bias": ("Phi", {}, 0.5),
}
LORA = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

# What each training sets: fields of the config, or one of the arguments of `train`
TRAININGS: dict[str, dict] = {
    "completions of different lengths": {},
    "truncated completions masked": dict(mask_truncated_completions=True),
    "all completions of a batch masked": dict(mask_truncated_completions=True, lengths=(9, 9, 9, 9, 9, 9, 3, 5)),
    "tool masks": dict(env_mask=True),
    "soft-capping": dict(architecture="soft-capping"),
    "logit scale": dict(architecture="logit scale", divergence_threshold=0.005),
    "bias in the head": dict(architecture="bias"),
    "tied embeddings": dict(architecture="qwen3 tied", divergence_threshold=0.005),
    "vocabulary in several tiles": dict(tile=16),
    "temperature": dict(temperature=0.6),
    "cast_lm_head_to_fp32": dict(cast_lm_head_to_fp32=True, dtype="bfloat16"),
    "bfloat16": dict(dtype="bfloat16"),
    "autocast": dict(bf16=True),
    "gradient accumulation": dict(gradient_accumulation_steps=2, steps_per_generation=4),
    "gradients through the candidates": dict(sampling_support="replay", top_k=4, engine=True),
    "truncated sampling, whole support": dict(top_k=4, engine=True),
    "own-policy scoring": dict(rollout=None),
    "logprobs without candidates": dict(candidates=False),
    "LoRA": dict(peft_config=LoraConfig(**LORA)),
    "gradient checkpointing": dict(gradient_checkpointing=True),
    "direction ratio": dict(direction="ratio"),
    "proximity ratio": dict(proximity="ratio"),
    "GRPO's mask": dict(proximity="ratio", direction="ratio", importance_ratio_max=None),
    "tail estimator uniform": dict(tail_estimator="uniform"),
    "tail estimator aggregated": dict(tail_estimator="aggregated"),
    "divergence tv": dict(divergence="tv", divergence_threshold=0.1),
    "divergence reverse_kl": dict(divergence="reverse_kl"),
    "support binary": dict(divergence_support="binary", divergence_threshold=0.02),
    "entropy bonus": dict(entropy_coef=0.3),
    "reference": dict(beta=0.3, peft_config=LoraConfig(**LORA)),
    "sequence-level ratio": dict(importance_sampling_level="sequence", loss_type="grpo"),
    "records of tokens": dict(log_token_assessments=2, log_completions=True),
    "realized alignment": dict(log_realized_alignment=True, num_iterations=2),
}

HALF_PRECISION = {"cast_lm_head_to_fp32", "bfloat16", "autocast"}


def assert_logged_alike(logs: list[dict], expected: list[dict], rtol: float, atol: float) -> None:
    """Two paths agree on every step: losses, gradients and the trust region's metrics.

    Where logits are rounded to bfloat16, a token or two of a step may be on the other side of a threshold.
    """
    same = ("loss", "grad_norm", "entropy", "kl", "policy_loss", "reward")
    shares = ("outside", "masked", "disagreement", "truncated", "alignment", "entropy_kept")
    assert len(logs) == len(expected)
    for line, expected_line in zip(logs, expected, strict=True):
        for name, value in expected_line.items():
            if name in same or name.startswith(("trust_region/", "importance_ratio/")):
                near = 0.1 if rtol > 1e-3 and any(share in name for share in shares) else atol
                if "entropy_drift" in name:  # what tokens of either sign leave of each other
                    near = rtol / 10 if rtol < 1e-3 else 0.02
                assert line[name] == pytest.approx(value, rel=rtol, abs=near, nan_ok=True), name


def build(architecture: str, dtype: str = "float32"):
    family, options, spread = ARCHITECTURES[architecture]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.normal_(std=spread)
        if head.bias is not None:
            head.bias.normal_()
    return model.to(getattr(torch, dtype))


class Rollout:
    """A rollout function of a policy that is near the one trained, and does not depend on what training does.

    Args:
        architecture: of the policy.
        temperature: at which its logprobs are taken.
        lengths: of the completions. Those shorter than `T` end with the end of the text.
        env_mask: whether the second token of each completion is the environment's.
        candidates: whether it tells the candidates of each token.
        survivors: how many tokens sampling leaves, all by default.
    """

    def __init__(self, architecture, temperature, lengths, env_mask, candidates, survivors):
        self.policy = build(architecture).eval()
        self.temperature, self.lengths, self.survivors = temperature, lengths, survivors
        self.env_mask, self.candidates = env_mask, candidates
        self.generator = torch.Generator().manual_seed(11)
        self.batches: list[dict] = []

    def __call__(self, prompts, trainer):
        tokenizer = trainer.processing_class
        rows = [
            self.row(tokenizer(prompt)["input_ids"], self.lengths[n % len(self.lengths)])
            for n, prompt in enumerate(prompts)
        ]
        return {name: [row[name] for row in rows] for name in rows[0]}

    @torch.no_grad()
    def row(self, prompt, length):
        noise = torch.randn(length, VOCAB, generator=self.generator) * 0.4
        ids = list(prompt)
        row = dict(prompt_ids=list(prompt), completion_ids=[], logprobs=[])
        own = [not (self.env_mask and t == 1) for t in range(length)]
        if self.env_mask:
            row["env_mask"] = [int(x) for x in own]
        if self.candidates:
            row |= dict(topk_token_ids=[], topk_logprobs=[])
        for t in range(length):
            logits = self.policy(input_ids=torch.tensor([ids])).logits[0, -1] / self.temperature + noise[t]
            if self.survivors:
                logits[logits < logits.topk(self.survivors).values[-1]] = -torch.inf
            logps = logits.log_softmax(-1)
            token = torch.multinomial(logps.exp(), 1, generator=self.generator).item()
            if t == length - 1 and length < T and not self.survivors:
                token = 1
            ids.append(token)
            row["completion_ids"].append(token)
            row["logprobs"].append(logps[token].item() if own[t] else 0.0)
            if self.candidates:
                top = sorted({token, *logps.topk(self.survivors or K).indices.tolist()}) if own[t] else []
                row["topk_token_ids"].append(top)
                row["topk_logprobs"].append(logps[top].tolist())
        return row


class Engine:
    """Stands in for `vllm.LLM` where a rollout function brings the completions: takes weights, and that is all."""

    def __init__(self, **kwargs):
        self.loads = 0
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32, quantization=None))

    def apply_model(self, function):
        return [{}]

    def collective_rpc(self, method, kwargs):
        self.loads += len(list(kwargs["weights_iterator"])) > 0

    def reset_prefix_cache(self):
        pass


@contextmanager
def engine_stand_in():
    names = {"LLM": Engine, "SamplingParams": SimpleNamespace, "is_vllm_available": lambda *args, **kwargs: True}
    with mock.patch.multiple(vllm_generation, create=True, **names), mock.patch.dict(os.environ):
        yield


@contextmanager
def triton(kernels: bool = True):
    """TRL's GPU path: its compact layout, and its Triton kernels unless only the layout is asked for."""
    with mock.patch.object(trl_utils, "_use_triton", lambda device: True):
        with mock.patch.object(chunked_logprob, "_use_triton", lambda device: kernels):
            yield


def make(
    folder,
    architecture="qwen3",
    dtype="float32",
    lengths=LENGTHS,
    env_mask=False,
    candidates=True,
    rollout=Rollout,
    engine=False,
    peft_config=None,
    cls=PDMGRPOTrainer,
    **fields,
):
    """The trainer of a training, of its own arguments and fields of the config."""
    options = dict(
        per_device_train_batch_size=B,
        max_completion_length=T,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        max_steps=3,  # the third is on a second rollout
        optim="sgd",  # equal gradients are equal weights
        learning_rate=0.005,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        temperature=TEMPERATURE,
        divergence_top_k=K,
        divergence_threshold=0.08,
        num_completions_to_print=0,
    )
    options |= fields | (dict(use_vllm=True, sync_check_steps=0) if engine else {})
    if rollout is not None:
        temperature, survivors = options["temperature"], fields.get("top_k")
        options["rollout_func"] = rollout(architecture, temperature, lengths, env_mask, candidates, survivors)
    model = build(architecture, dtype)
    if engine:  # which would load it by its name
        model.name_or_path = str(Path(folder) / "checkpoint")
        model.save_pretrained(model.name_or_path)
    return make_trainer(folder, cls, model=model, peft_config=peft_config, **options)


ONE_ROLLOUT = dict(max_steps=2)  # enough for what depends on a kernel, and Triton's interpreter is slow


def train(folder, tile=None, **settings) -> dict:
    """A training's `logs` and its `start` and `end` weights, one vector each."""
    with (
        engine_stand_in(),
        mock.patch.object(trl_utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", tile or trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE),
    ):
        trainer = make(folder, **settings)
        start = weights(trainer)
        logs = run(trainer)
        return {"logs": logs, "start": start, "end": weights(trainer)}


@contextmanager
def counted_rows():
    """How many positions TRL's kernel was given, call by call, and that it was Triton's interpreter that ran it."""
    rows, apply = [], trl_utils._ChunkedLogProbFunction.apply

    def spy(hidden, *args):
        rows.append(len(hidden))
        return apply(hidden, *args)

    with mock.patch.object(trl_utils._ChunkedLogProbFunction, "apply", spy):
        yield rows


if __name__ == "__main__":
    out = Path(sys.argv[1])
    kernels = type(chunked_logprob._forward_kernel).__name__, type(chunked_logprob._backward_kernel).__name__
    for name in sys.argv[2:] or TRAININGS:
        with triton(), counted_rows() as rows:
            outcome = train(out / "trainer", **TRAININGS[name] | ONE_ROLLOUT)
        torch.save(outcome | {"rows": rows, "kernels": kernels}, out / "partial")
        (out / "partial").rename(out / f"{name}.pt")  # who waits for it sees all of it or none
