"""bfloat16 and autocast: the assessment is in float32, and gradients reach the head in its own dtype."""

import copy
import math

import pandas as pd
import pytest
import torch

from tests.gpu import trainings
from tests.helpers.trainers import Recorder


# What holds the weights, and what computes with them
PRECISIONS = {
    "autocast, float32 head": dict(bf16=True),
    "autocast, bfloat16 head": dict(bf16=True, dtype="bfloat16"),
    "bfloat16": dict(dtype="bfloat16"),
    "bfloat16, head in float32": dict(dtype="bfloat16", cast_lm_head_to_fp32=True),
}
EVERYTHING_KEPT = dict(divergence_threshold=1e9, importance_ratio_max=None, loss_type="bnpo")


class Case:
    """A trainer, one batch of its rollout, and models that share its weights and nothing of its forward."""

    def __init__(self, folder, precision, **fields):
        fields = PRECISIONS[precision] | dict(log_token_assessments=trainings.B) | fields
        with trainings.engine_stand_in():
            self.trainer = trainings.make(folder, **fields)
        self.folder, self.autocast = folder, fields.get("bf16", False)
        self.logs = Recorder()
        self.trainer.add_callback(self.logs)
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.model.train()
        rows = [{"prompt": row["prompt"]} for row in self.trainer.train_dataset.select(range(2)) for _ in range(2)]
        self.batch = self.trainer._generate_and_score_completions(rows)
        self.plain = trainings.build("qwen3", fields.get("dtype", "float32"))
        self.exact = copy.deepcopy(self.plain).double()
        self.mask = self.batch["completion_mask"].bool()

    def loss(self, batch=None):
        """Of the batch, with its gradients in the model."""
        self.trainer.model.zero_grad()
        with self.trainer.compute_loss_context_manager():
            loss = self.trainer.compute_loss(self.trainer.model, dict(batch or self.batch))
        loss.backward()
        return loss.detach()

    def metrics(self):
        self.trainer.log({})
        return self.logs.logs[-1]

    def records(self):
        """What was written of each token: `(B, T)`, 0 at padding."""
        self.trainer.log({})
        table = pd.read_parquet(max((self.folder / "token_assessments").glob("*.parquet")))
        laid_out = {}
        for name in ("divergence", "policy_logprob", "behavior_logprob", "predicted_change"):
            laid_out[name] = torch.zeros(self.mask.shape, dtype=torch.float64)
            laid_out[name][table["completion"].to_numpy(), table["position"].to_numpy()] = torch.tensor(
                table[name].to_list(), dtype=torch.float64
            )
        return laid_out

    def logps(self, model, autocast=False):
        """Log-probabilities over the vocabulary, of the logits of the model's own forward."""
        ids = torch.cat([self.batch["prompt_ids"], self.batch["completion_ids"]], 1)
        mask = torch.cat([self.batch["prompt_mask"], self.batch["completion_mask"]], 1)
        length = self.batch["completion_ids"].shape[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1][:, -length:]
        return (logits.double() / trainings.TEMPERATURE).log_softmax(-1)

    def divergence(self, logps):
        """KL of the behaviour policy's candidates and the rest, in float64, written out."""
        ids, behavior = self.batch["behavior_topk_ids"], self.batch["behavior_topk_logps"].double()
        known = ids >= 0
        mu = torch.where(known, behavior.exp(), 0)
        pi = torch.where(known, logps.gather(-1, ids.long().clamp(min=0)).exp(), 0)
        terms = torch.where(known, mu * (mu / pi).log(), 0).sum(-1)
        mu_rest, pi_rest = 1 - mu.sum(-1), 1 - pi.sum(-1)
        return torch.where(self.mask, terms + mu_rest * (mu_rest / pi_rest).log(), 0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_assessment_is_in_float32(tmp_path, precision):
    case = Case(tmp_path, precision)
    case.loss()
    actual = case.records()["divergence"]
    with torch.no_grad():
        rounded = case.logps(case.plain, case.autocast)
        exact = case.logps(case.exact)
    error = (rounded - exact)[case.mask].abs().max()
    assert 1e-3 < error < 0.5, "bfloat16 must have rounded something"
    # |dD| <= sum of mu_c |d log pi_c|, and the rest's logarithm moves as much as the head's
    assert (actual - case.divergence(exact))[case.mask].abs().max() < 2 * error
    # From the same rounded logits: but for those that two matrix products round to different sides, float32 all the way
    if not precision.endswith("float32"):
        apart = (actual - case.divergence(rounded))[case.mask].abs() / case.divergence(rounded)[case.mask]
        assert apart.median() < 1e-4, "bfloat16's own spacing is 4e-3"


@pytest.mark.parametrize("replay", [False, True], ids=["sampled token", "candidates"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_gradient_reaches_the_head_in_its_own_dtype(tmp_path, precision, replay):
    """Against autograd through full logits in float64. With replay the survivors' logits take part in it."""
    fields = dict(sampling_support="replay", top_k=4, engine=True) if replay else {}
    case = Case(tmp_path, precision, **EVERYTHING_KEPT, **fields)
    case.loss()
    head = case.trainer.model.get_output_embeddings().weight
    in_bfloat16 = precision.endswith(("bfloat16 head", "bfloat16"))
    assert head.grad.dtype == head.dtype == (torch.bfloat16 if in_bfloat16 else torch.float32)

    logps = case.logps(case.exact)
    if replay:
        ids, survive = case.batch["behavior_topk_ids"], case.batch["behavior_topk_ids"] >= 0
        inside = torch.zeros_like(logps, dtype=torch.long).scatter_add_(-1, ids.long().clamp(min=0), survive.long())
        logps = torch.where(inside > 0, logps, -torch.inf).log_softmax(-1)
    sampled = logps.gather(-1, case.batch["completion_ids"][..., None])[..., 0]
    behavior = case.batch["behavior_topk_logps"][..., 0].double()
    ratio = torch.where(case.mask, sampled - behavior, 0).exp()
    (-(ratio * case.batch["advantages"][:, None] * case.mask).sum() / case.mask.sum()).backward()
    expected = case.exact.get_output_embeddings().weight.grad
    assert expected.norm() > 0.01
    # Two layers in bfloat16, whose numbers are off by up to 2^-9 of their size each
    assert (head.grad.double() - expected).norm() < 0.04 * expected.norm()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_around_the_threshold_the_order_of_the_slots_does_not_matter(tmp_path, precision):
    case = Case(tmp_path, precision)
    case.loss()
    largest = case.metrics()["trust_region/divergence_max"]
    tokens = int(case.mask.sum())
    generator = torch.Generator().manual_seed(3)
    for threshold, outside in ((largest * (1 + 1e-5), 0), (largest * (1 - 1e-5), 1)):
        near = Case(tmp_path / str(outside), precision, divergence_threshold=threshold)
        losses, gradients = [], []
        for n in range(6):
            order = torch.randperm(trainings.K, generator=generator) + 1 if n else torch.arange(1, trainings.K + 1)
            order = torch.cat([torch.tensor([0]), order])
            moved = {name: near.batch[name][..., order] for name in ("behavior_topk_ids", "behavior_topk_logps")}
            losses.append(near.loss(near.batch | moved))
            gradients.append(trainings_gradient(near.trainer.model))
            metrics = near.metrics()
            assert metrics["trust_region/outside"] == pytest.approx(outside / tokens)
            assert metrics["trust_region/divergence_max"] == pytest.approx(largest, rel=5e-6)
        assert all(torch.equal(loss, losses[0]) for loss in losses)
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def trainings_gradient(model):
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def test_what_bfloat16_would_make_of_the_assessment():
    """The tolerance above tells the dtypes apart: a divergence summed in bfloat16 is off by more."""
    torch.manual_seed(0)
    mu = torch.randn(200, 7).softmax(-1)
    pi = (mu.log() + 0.2 * torch.randn(200, 7)).softmax(-1)
    exact, single, half = (
        (m * (m.log() - p.log())).sum(-1)
        for m, p in ((mu.double(), pi.double()), (mu, pi), (mu.bfloat16(), pi.bfloat16()))
    )
    assert ((single - exact).abs() / exact).median() < 1e-4 < ((half - exact).abs() / exact).median()
    assert math.isfinite(half.sum())
