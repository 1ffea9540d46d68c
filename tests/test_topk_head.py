"""The scores taken from TRL's fused LM head, against the log-softmax of the full logits of the model's plain forward."""

import copy
import inspect
import itertools
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import peft
import pytest
import torch
import transformers
import trl
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from trl import GRPOTrainer
from trl.trainer import utils as trl_utils

from tests.helpers.processes import in_two_processes
from tests.helpers.shapes import shapes_checked
from trl_pdm import topk_head as module
from trl_pdm._hooks import SUPPORTED_TRL, TRLCompatibilityError
from trl_pdm.topk_head import topk_head


VOCAB = 97
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
SIZES.update(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=2)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
# The config, the spread of the LM head's weights, and what stands between its projection and the logits
MODELS = {
    "llama": ("LlamaConfig", {}, 0.6, None),
    "qwen3": ("Qwen3Config", {}, 0.6, None),
    "qwen3_moe": ("Qwen3MoeConfig", MOE, 0.6, None),
    "gemma2": ("Gemma2Config", {"final_logit_softcapping": 8.0, "query_pre_attn_scalar": 8}, 0.8, "tied softcap"),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 8}, 0.3, "tied"),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}, 1.2, "tied scale"),
    "granite": ("GraniteConfig", {"logits_scaling": 8.0}, 4.8, "scale"),
    "phi": ("PhiConfig", {}, 0.6, "bias"),
}
# An odd number of rows, prompts padded on the left, completions on the right; the third one is masked altogether, as
# `mask_truncated_completions` does it
PROMPT_LENGTHS, COMPLETION_LENGTHS = (6, 3, 1, 5, 4), (7, 4, 0, 1, 6)
P, T, B = max(PROMPT_LENGTHS), max(COMPLETION_LENGTHS), len(PROMPT_LENGTHS)
EXACT = {"atol": 1e-5, "rtol": 2e-6}


def build(name: str = "llama") -> torch.nn.Module:
    config_class, options, spread, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.normal_(std=spread)  # peaked distributions: with flat ones a wrong score would hardly be off
        if head.bias is not None:
            head.bias.normal_(std=2)
    return model


class Batch(NamedTuple):
    input_ids: Tensor
    attention_mask: Tensor

    @property
    def mask(self) -> Tensor:
        return self.attention_mask[:, -T:].bool()

    @property
    def sampled(self) -> Tensor:
        return self.input_ids[:, -T:]


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (B, P + T), generator=generator)
    position = torch.arange(P + T)
    prompts, completions = torch.tensor(PROMPT_LENGTHS)[:, None], torch.tensor(COMPLETION_LENGTHS)[:, None]
    mask = (position >= P - prompts) & (position < P + completions)
    return Batch(ids.where(mask, 0), mask.long())


@pytest.fixture(params=["every position", "labelled positions"])
def layout(request, monkeypatch) -> str:
    """Which positions TRL passes to its kernel: the labelled ones where there is Triton, elsewhere every one.

    No CPU runs Triton, so the former is a stand-in: the selection of positions is TRL's own, the kernel stays torch's.
    """
    if request.param == "labelled positions":
        monkeypatch.setattr(trl_utils, "_use_triton", lambda device: True)
    return request.param


def log_softmax_of_logits(model, batch: Batch, temperature: float = 0.7) -> Tensor:
    with torch.no_grad():
        logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    return (logits[:, -T - 1 : -1].float() / temperature).log_softmax(-1)


def fuse(model, temperature: float = 0.7, **kwargs):
    trl_utils.add_fused_lm_head(model, temperature, outputs=("log_probs", "entropy"), **kwargs)
    return model


def trl_score(model, batch: Batch, batch_size: int | None = None) -> Tensor:
    """TRL's log-probabilities of the sampled tokens, as the trainer has them computed."""
    method = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext))
    return method(trainer, model, batch.input_ids, batch.attention_mask, T, batch_size)[0]


def score(model, batch: Batch, batch_size: int | None = None, **kwargs):
    with topk_head(batch.attention_mask, T, batch_size, **kwargs) as scores:
        logps = trl_score(model, batch, batch_size)
    assert_close(scores.logps[..., 0][batch.mask], logps.detach()[batch.mask], rtol=0, atol=0)
    return scores


def candidates(batch: Batch, expected: Tensor, k: int = 12) -> Tensor:
    """The sampled token, the three most probable ones and random ones; every fifth slot is empty, some slots 0 too."""
    generator = torch.Generator().manual_seed(2)
    random = torch.randint(0, VOCAB, (B, T, k - 3), generator=generator)
    ids = torch.cat([batch.sampled[..., None], expected.topk(3).indices, random], -1)
    return ids.where(torch.rand(ids.shape, generator=generator) > 0.2, -1).int()


def check(scores, ids: Tensor, batch: Batch, expected: Tensor, layout: str, **tolerance) -> None:
    valid = batch.mask[..., None] & (ids >= 0)
    valid[..., 0] = batch.mask
    tokens = torch.cat([batch.sampled[..., None], ids[..., 1:]], -1).long().clamp(min=0)
    assert scores.logps.dtype == torch.float32 and not scores.logps.requires_grad and scores.logps.isfinite().all()
    assert_close(scores.logps[valid], expected.gather(-1, tokens)[valid], **(tolerance or EXACT))
    assert torch.equal(scores.ids[batch.mask], ids[batch.mask])
    assert (scores.ids[~batch.mask] == -1).all() == (layout == "labelled positions")
    assert scores.vocab_size == VOCAB
    if scores.sum_sq is not None:
        assert not scores.sum_sq.requires_grad
        assert_close(scores.sum_sq[batch.mask], expected.exp().square().sum(-1)[batch.mask], **(tolerance or EXACT))


def check_top_k(scores, k: int, batch: Batch, expected: Tensor) -> None:
    mask, ids, logps = batch.mask, scores.ids[batch.mask].long(), scores.logps[batch.mask]
    expected, sampled, top = expected[mask], batch.sampled[mask][:, None], ids[:, 1:]
    assert scores.ids.shape == scores.logps.shape == (B, T, k + 1) and scores.sum_sq is None
    assert torch.equal(ids[:, :1], sampled)
    # In order of probability, whatever the order of ties; a slot is empty instead of the sampled token a second time
    assert (top != sampled).all()
    top = top.where(top >= 0, sampled)
    assert (top.sort().values.diff() > 0).all()
    assert_close(expected.gather(1, top), expected.topk(k).values, **EXACT)
    assert_close(logps[ids >= 0], expected.gather(1, ids.clamp(min=0))[ids >= 0], **EXACT)


def check_both(model, batch: Batch, expected: Tensor, layout: str, batch_size: int | None = 2) -> None:
    ids = candidates(batch, expected)
    check(score(model, batch, batch_size, ids=ids, with_sum_sq=True), ids, batch, expected, layout)
    check_top_k(score(model, batch, batch_size, top_k=9), 9, batch, expected)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_the_log_softmax_of_the_full_logits(name, temperature, layout, batch):
    model = build(name)
    expected = log_softmax_of_logits(model, batch, temperature)
    check_both(fuse(model, temperature), batch, expected, layout)


@pytest.mark.parametrize("name", MODELS)
def test_the_models_put_the_heads_to_the_test(name, batch):
    model, features = build(name), MODELS[name][3] or ""
    expected = log_softmax_of_logits(model, batch)
    assert expected.exp().amax(-1)[batch.mask].mean() > 0.2
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == ("tied" in features)
    plain = copy.deepcopy(model)
    plain.config.final_logit_softcapping, plain.config.logits_scaling, plain.logit_scale = None, 1.0, 1.0
    if (bias := plain.get_output_embeddings().bias) is not None:
        bias.data.zero_()
    difference = (log_softmax_of_logits(plain, batch) - expected)[batch.mask].abs().mean()
    assert difference > 1 if set(features.split()) & {"softcap", "scale", "bias"} else difference == 0


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5, 8])
def test_rows_in_batches_of_any_size(batch_size, layout, batch):
    model = build()
    expected = log_softmax_of_logits(model, batch)
    check_both(fuse(model), batch, expected, layout, batch_size)


def test_no_token_to_score(layout, batch):
    batch = Batch(batch.input_ids, batch.attention_mask.clone())
    batch.attention_mask[:, -T:] = 0
    model = fuse(build())
    ids = torch.full((B, T, 4), -1, dtype=torch.int32)
    for kwargs in ({"ids": ids, "with_sum_sq": True}, {"top_k": 3}):
        scores = score(model, batch, **kwargs)
        assert scores.ids.shape == scores.logps.shape == (B, T, 4)
        assert scores.logps.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16(name, layout, batch):
    model = build(name).bfloat16()
    expected = log_softmax_of_logits(model, batch)
    ids = candidates(batch, expected)
    # Both round the logits to bfloat16, and only Gemma2 does so again after soft-capping, only TRL before the bias, too
    tolerance = {"atol": 0.15, "rtol": 0} if name in ("gemma2", "phi") else EXACT
    check(score(fuse(model), batch, ids=ids), ids, batch, expected, layout, **tolerance)


def test_autocast(layout, batch):
    model = build()
    with torch.autocast("cpu", torch.bfloat16):
        expected = log_softmax_of_logits(model, batch)
        check_both(fuse(model), batch, expected, layout)
    assert (log_softmax_of_logits(model, batch) - expected).abs().max() > 0.01  # the rounding is seen


@pytest.mark.parametrize("autocast", [False, True])
def test_lm_head_in_float32(autocast, layout, batch):
    model = build().bfloat16()
    upcast = copy.deepcopy(model)
    upcast.lm_head.float().register_forward_pre_hook(lambda head, args: (args[0].float(),))
    expected = log_softmax_of_logits(upcast, batch)
    fuse(model, cast_lm_head_to_fp32=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        check_both(model, batch, expected, layout)


def test_peft(layout, batch):
    model = fuse(build("qwen3"))
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config)
    expected = log_softmax_of_logits(wrapped, batch)
    with wrapped.disable_adapter():
        assert (log_softmax_of_logits(wrapped, batch) - expected).abs().max() > 0.1
    check_both(wrapped, batch, expected, layout)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi"])
def test_gradients_are_those_without_the_scores(name, checkpointing, layout, batch):
    model = fuse(build(name)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, VOCAB, (B, T, 5))
    outputs, gradients = [], []
    for context in (nullcontext(), topk_head(batch.attention_mask, T, 2, ids=ids, with_sum_sq=True)):
        model.zero_grad()
        with context as scores:
            outputs.append(trl_score(model, batch, 2))
        outputs[-1].square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert outputs[1].requires_grad and not any(x.requires_grad for x in (scores.logps, scores.sum_sq))
    assert gradients[0][0].abs().max() > 0
    assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.fixture
def chunks(monkeypatch) -> list[tuple[int, int]]:
    """The shapes of the logits that are held at once, in a budget of a few kilobytes."""
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 4)
    monkeypatch.setattr(module, "CHUNK_BYTES", 4000)
    shapes, transform = [], module._Head.transform
    monkeypatch.setattr(module._Head, "transform", lambda self, z: shapes.append(z.shape) or transform(self, z))
    return shapes


@pytest.mark.parametrize(("name", "frozen"), [("gemma2", False), ("cohere", False), ("phi", False), ("granite", True)])
def test_gradients_through_the_candidates(name, frozen, layout, batch, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 900)  # some slots of a token at once
    model = build(name).train()
    model.get_output_embeddings().requires_grad_(not frozen)
    ids = candidates(batch, log_softmax_of_logits(model, batch))
    tokens = torch.cat([batch.sampled[..., None], ids[..., 1:]], -1).long().clamp(min=0)
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(3))
    weights[..., 1:] *= ids[..., 1:] >= 0
    weights *= batch.mask[..., None]
    gradients = []
    for fused in (False, True):
        if fused:
            with topk_head(batch.attention_mask, T, 2, ids=ids, with_sum_sq=True, with_grad=True) as scores:
                trl_score(fuse(model), batch, 2)
            assert not scores.sum_sq.requires_grad
            logps = scores.logps
        else:
            logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            logps = (logits[:, -T - 1 : -1] / 0.7).log_softmax(-1).gather(-1, tokens)
        model.zero_grad()
        (logps * weights).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    for with_logits, without in zip(*gradients, strict=True):
        assert_close(without, with_logits, rtol=1e-4, atol=1e-5 * with_logits.abs().max().item())
    with torch.no_grad(), topk_head(batch.attention_mask, T, ids=ids, with_grad=True) as scores:
        trl_score(model, batch)
    assert not scores.logps.requires_grad


@pytest.mark.parametrize("chunk_bytes", [2**16, 2**26])
def test_gradients_add_up_in_float32(chunk_bytes, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    parts = torch.ones(8000, 8).bfloat16(), torch.zeros(5, 8).bfloat16(), torch.zeros(5).bfloat16()
    hidden, weight, bias = (part.requires_grad_() for part in parts)
    ids = torch.tensor([[0, 1, 1]]).expand(8000, 3)
    module._Head(hidden, weight, bias, 0.5, None, 2.0).at(ids).sum().backward()  # a bfloat16 sum of ones ends at 256
    assert_close(
        weight.grad.float(), 32_000.0 * torch.tensor([1, 2, 0, 0, 0])[:, None].expand(5, 8), rtol=0.01, atol=0
    )
    assert_close(bias.grad.float(), 32_000.0 * torch.tensor([1, 2, 0, 0, 0]), rtol=0.01, atol=0)


@pytest.mark.parametrize("k", [1, 40, VOCAB])
@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_top_k_over_chunks_of_tokens_and_of_the_vocabulary(name, k, layout, batch, chunks):
    model = build(name)
    expected = log_softmax_of_logits(model, batch)
    check_top_k(score(fuse(model), batch, 3, top_k=k), k, batch, expected)
    tiles = [width for tokens, width in chunks if tokens == 4]
    assert min(tiles) < max(tiles) < VOCAB or k == VOCAB


@pytest.mark.parametrize("budget", [1, 900, 5000])
@pytest.mark.parametrize("name", ["gemma2", "phi"])
def test_candidates_in_chunks_of_tokens_and_of_slots(name, budget, layout, batch, chunks, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", budget)
    model = build(name)
    expected = log_softmax_of_logits(model, batch)
    ids = candidates(batch, expected)
    check(score(fuse(model), batch, 3, ids=ids), ids, batch, expected, layout)
    tokens, slots = map(max, zip(*chunks, strict=True))
    assert {1: tokens == slots == 1, 900: tokens == 1 < slots < 13, 5000: 1 < tokens < 7 and slots == 13}[budget]


def peak_memory(function, path) -> int:
    """Bytes allocated at once on top of what was there before, temporaries inside of operators included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    return max(itertools.accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])))


@pytest.fixture(params=["float32", "bfloat16", "autocast"])
def head(request):
    """Makes the arguments of a call of TRL's kernel; zeros that nobody has written to take no memory."""
    dtype = torch.bfloat16 if request.param == "bfloat16" else torch.float32

    def make(tokens: int, hidden: int, vocab: int):
        parts = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(vocab, hidden, dtype=dtype)
        return module._Head(*parts, torch.zeros(vocab, dtype=dtype), 0.7, 30.0, 0.5)

    with torch.autocast("cpu", torch.bfloat16, enabled=request.param == "autocast"):
        yield make


@pytest.mark.parametrize(("tokens", "slots"), [(256, 201), pytest.param(20_000, 1, marks=pytest.mark.slow)])
def test_memory_of_candidates(tokens, slots, head, tmp_path):
    scorer, ids = head(tokens, 1024, 150_001), torch.zeros(tokens, slots, dtype=torch.int32)
    limit = 64 * 2**20 + 4 * ids.numel()  # temporaries and result; all rows at once, or the logits, take more
    assert peak_memory(lambda: scorer.at(ids), tmp_path / "trace.json") < limit
    assert min(tokens * slots * 1024 * 2, tokens * 150_001 * 2) > limit or slots == 1


@pytest.mark.parametrize("tokens", [3, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_of_top_k(tokens, head, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * 2**20)
    scorer, targets = head(tokens, 256, 20_001), torch.zeros(tokens, dtype=torch.long)
    peak = peak_memory(lambda: scorer.top(20, targets), tmp_path / "trace.json")
    assert peak < 4 * 2**20 + tokens * 21 * 8  # the copy of the head in another dtype, or the logits, take more


def score_sharded(rank: int, batch: Batch) -> None:
    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for name in ("llama", "phi"):
        for own_group in (True, False):  # in the root's group, the head is whole again during the model's forward
            model = build(name)
            expected = log_softmax_of_logits(model, batch)
            fuse(model)
            if own_group:
                fully_shard(model.get_output_embeddings(), mesh=mesh)
            fully_shard(model, mesh=mesh)
            assert isinstance(model.get_output_embeddings().weight, DTensor)
            check_both(model, batch, expected, "every position")


@pytest.mark.slow
def test_a_sharded_lm_head(batch):
    in_two_processes(score_sharded, batch)


@pytest.mark.parametrize("found", [None, "inverse_temperature"])
def test_error_without_the_kernel_as_trl_1_16_has_it(found, batch, monkeypatch):
    class Other(trl_utils._ChunkedLogProbFunction):
        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, inverse_temperature, chunk_size, softcap, scale, outputs):
            raise AssertionError("the kernel was called all the same")

    model = fuse(build())
    if found:
        monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Other)
    else:
        monkeypatch.delattr(trl_utils, "_ChunkedLogProbFunction")
    with pytest.raises(TRLCompatibilityError, match=found or "_ChunkedLogProbFunction") as caught:
        score(model, batch, top_k=3)
    assert f"TRL {trl.__version__} " in str(caught.value) and f"trl{SUPPORTED_TRL}" in str(caught.value)


def test_error_where_not_every_row_passes_through_the_kernel(batch):
    kernel, model, first = trl_utils._ChunkedLogProbFunction, fuse(build()), Batch(*(x[:2] for x in batch))
    for forward in (lambda: log_softmax_of_logits(model, batch), lambda: trl_score(model, first, 1)):
        context = topk_head(batch.attention_mask, T, 1, top_k=3)
        with pytest.raises(TRLCompatibilityError, match="did not score"), context:
            forward()
    with pytest.raises(ZeroDivisionError), topk_head(batch.attention_mask, T, top_k=3):
        raise ZeroDivisionError  # and no other error
    assert trl_utils._ChunkedLogProbFunction is kernel


def test_shapes_are_those_of_the_signatures():
    with shapes_checked("trl_pdm.topk_head") as checked:
        head = checked._Head(torch.randn(5, 8), torch.randn(30, 8), torch.randn(30), 0.7, 20.0, 1.5)
        ids, z = head.top(4, torch.arange(5))
        torch.testing.assert_close(head.at(ids.clamp(min=0))[ids >= 0], z[ids >= 0])
        with pytest.raises(TypeCheckError):
            head.at(torch.arange(5))
