"""What the package must agree with, computed otherwise: full logits, autograd, and losses written out."""

import math

import torch

from tests.helpers import tiny
from trl_pdm.trust_region import Evidence


B, P, T, K = 4, 5, 7, 6
TEMPERATURE = 0.8
CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo"]  # the losses that `reference_loss` knows


def full_logps(model, batch, temperature=TEMPERATURE, **inputs):
    """Log-probabilities of the whole vocabulary at every completion position, from plain logits: `(B, T, V)`."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length = batch["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=mask, **inputs).logits[:, :-1][:, -length:].float()
    return (logits / temperature).log_softmax(-1)


def sampled_logps(model, batch, temperature=TEMPERATURE, **inputs):
    """Of the sampled tokens alone: `(B, T)`."""
    return full_logps(model, batch, temperature, **inputs).gather(-1, batch["completion_ids"][..., None])[..., 0]


def make_batch(model, seed=0, drift=0.6, top_k=K):
    """Random completions whose behaviour policy is a perturbation of the model, with its top `top_k` beside them."""
    generator = torch.Generator().manual_seed(seed)
    vocab = model.config.vocab_size
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    lengths = torch.tensor([7, 4, 6, 1])
    batch = {
        "prompt_ids": torch.randint(2, vocab, (B, P), generator=generator),
        "prompt_mask": torch.tensor([[0, 0, 1, 1, 1], [1] * 5, [0, 1, 1, 1, 1], [1] * 5]),
        "completion_mask": (torch.arange(T) < lengths[:, None]).long(),
        "advantages": torch.tensor([1.3, -0.8, -1.1, 0.6]),
        "num_items_in_batch": torch.tensor(50),
        "tool_mask": torch.ones(B, T, dtype=torch.long),
    }
    batch["tool_mask"][0, 2] = 0
    batch["completion_ids"] = torch.zeros(B, T, dtype=torch.long)
    with torch.no_grad():  # sample token by token from the perturbed policy
        noise = draw(B, T, vocab) * drift
        for t in range(T):
            mu = (full_logps(model, batch)[:, t] + noise[:, t]).log_softmax(-1)
            batch["completion_ids"][:, t] = torch.multinomial(mu.exp(), 1, generator=generator)[:, 0]
        mu = (full_logps(model, batch) + noise).log_softmax(-1)
    sampled = batch["completion_ids"]
    top = mu.topk(top_k).indices
    repeats = top == sampled[..., None]
    ids = torch.cat([sampled[..., None], top.masked_fill(repeats, -1)], -1)
    batch["behavior_topk_ids"] = ids.int()
    batch["behavior_topk_logps"] = mu.gather(-1, ids.clamp(min=0))
    batch["sampling_per_token_logps"] = batch["behavior_topk_logps"][..., 0].clone()
    return batch, mu


def divergence_between(p, q, name):
    if name == "tv":
        return (p - q).abs().sum() / 2
    return (p * (p / q).log()).sum() if name == "kl" else (q * (q / p).log()).sum()


def reference_keep(model, batch, mu, *, divergence="kl", direction="predictive", threshold):
    """The mask, token by token: autograd on the divergence over {top K, sampled, rest} of full logits, in float64."""
    with torch.no_grad():
        log_pi = full_logps(model, batch).double()
    keep = torch.ones(B, T, dtype=torch.bool)
    for b in range(B):
        for t in range(T):
            advantage = batch["advantages"][b].item()
            sampled = batch["completion_ids"][b, t]
            head = sorted({i.item() for i in batch["behavior_topk_ids"][b, t] if i >= 0})
            z = log_pi[b, t].clone().requires_grad_()
            pi, m = z.softmax(-1), mu[b, t].double().exp()
            value = divergence_between(*(torch.cat([p[head], 1 - p[head].sum()[None]]) for p in (m, pi)), divergence)
            (gradient,) = torch.autograd.grad(value, z)
            step = -pi.detach()
            step[sampled] += 1
            change = {
                "predictive": (gradient * step).sum(),
                "ratio": pi[sampled].detach() - m[sampled],
            }[direction]
            keep[b, t] = not (value.item() > threshold and advantage * change.item() > 0)
    return keep


def reference_loss(model, batch, keep, loss_type, ratio_max, accumulation, steps_per_generation):
    """M * min(r, C) * A * log pi with the weight detached, normalised as each loss type's paper has it."""
    logps = sampled_logps(model, batch)
    ratio = (logps - batch["behavior_topk_logps"][..., 0]).exp().detach()
    weight = keep * ratio.clamp(max=ratio_max or math.inf) * batch["advantages"][:, None]
    mask = batch["completion_mask"] * batch["tool_mask"]
    per_token = -weight * logps * mask
    if loss_type == "grpo":
        return (per_token.sum(1) / mask.sum(1)).mean() / accumulation
    if loss_type == "bnpo":
        return per_token.sum() / mask.sum() / accumulation
    if loss_type == "dr_grpo":
        return per_token.sum() / (B * T) / accumulation
    items_per_window = batch["num_items_in_batch"] * accumulation / steps_per_generation
    return per_token.sum() / items_per_window  # dapo


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]).double()


def assert_same(actual, expected, relative):
    assert (actual - expected).norm() <= relative * expected.norm(), (actual - expected).norm() / expected.norm()
    assert expected.norm() > 0


# ---- Of what a rollout brings


def reference_model(trainer):
    """The architecture's own forward, with the trainer's weights."""
    model = tiny.model(trainer.model.config.vocab_size, seed=99)
    model.load_state_dict(trainer.model.state_dict())
    return model.eval()


@torch.no_grad()
def reference_logps(model, prompt_ids, completion_ids, temperature=1.0):
    """Log-probabilities of the whole vocabulary where each completion token was sampled: `(T, V)`."""
    logits = model(input_ids=torch.tensor([[*prompt_ids, *completion_ids]])).logits[0].float()
    return (logits / temperature).log_softmax(-1)[len(prompt_ids) - 1 : -1]


def unpadded(batch):
    """`(prompt ids, completion ids, candidate ids, candidate logprobs)` of each row."""
    for row in range(len(batch["prompt_ids"])):
        length = batch["completion_mask"][row].sum()
        yield (
            batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist(),
            batch["completion_ids"][row, :length].tolist(),
            batch["behavior_topk_ids"][row, :length],
            batch["behavior_topk_logps"][row, :length],
        )


def batch_of_tokens(seed=0, shape=(3, 4), top_k=5, vocab_size=40):
    """The fields of an `Evidence`, and advantages, of random policies."""
    generator = torch.Generator().manual_seed(seed)
    log_mu = (3 * torch.randn(*shape, vocab_size, generator=generator)).log_softmax(-1)
    log_pi = (log_mu + torch.randn(*shape, vocab_size, generator=generator)).log_softmax(-1)
    sampled = torch.multinomial(log_mu.exp().flatten(0, -2), 1, generator=generator).view(*shape, 1)
    top_ids = log_mu.topk(top_k).indices
    ids = torch.cat([sampled, top_ids], dim=-1)
    return {
        "behavior_logps": log_mu.gather(-1, ids),
        "policy_logps": log_pi.gather(-1, ids),
        "valid": torch.cat([torch.ones_like(sampled, dtype=torch.bool), top_ids != sampled], dim=-1),
        "policy_sum_sq": (2 * log_pi).exp().sum(-1),
        "vocab_size": vocab_size,
        "advantages": torch.randn(shape[0], *[1] * (len(shape) - 1), generator=generator),
    }


def evidence_of(inputs):
    return Evidence(**{name: value for name, value in inputs.items() if name != "advantages"})
