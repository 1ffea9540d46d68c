"""Prints the numbers of the trust region at one position of a completion, with a vocabulary of five tokens.

    python examples/worked_example.py

Each token in turn is taken as the sampled one, with an advantage of 1. `docs/how-it-works.md` explains the output.
"""

import math

import torch

from trl_pdm.trust_region import TAIL_ESTIMATORS, Evidence, TrustRegion


VOCABULARY = ("so", "then", "thus", "hence", "but")
BEHAVIOR = torch.tensor([0.35, 0.25, 0.15, 0.15, 0.10], dtype=torch.float64)
POLICY = torch.tensor([0.55, 0.07, 0.19, 0.03, 0.16], dtype=torch.float64)
THRESHOLD = 0.15
STEP = 0.05


def evidence(sampled: int, top_k: int) -> Evidence:
    """The evidence of a position: the sampled token, and then the behaviour policy's `top_k` most probable ones."""
    top = BEHAVIOR.topk(top_k).indices
    ids = torch.cat([torch.tensor([sampled]), top])
    valid = torch.cat([torch.tensor([True]), top != sampled])
    logps = BEHAVIOR.log()[ids], POLICY.log()[ids]
    return Evidence(*logps, valid, vocab_size=len(VOCABULARY), policy_sum_sq=POLICY.square().sum())


def assess(sampled: int, top_k: int, **choices):
    region = TrustRegion(THRESHOLD, THRESHOLD, **choices)
    return region.assess(evidence(sampled, top_k), torch.ones((), dtype=torch.float64))


def after_a_step(sampled: int) -> float:
    """The divergence once the token's own policy-gradient step has moved the logits, with an advantage of 1."""
    ratio = POLICY[sampled] / BEHAVIOR[sampled]
    logits = POLICY.log() - STEP * ratio * POLICY
    logits[sampled] += STEP * ratio
    return (BEHAVIOR * (BEHAVIOR.log() - logits.log_softmax(-1))).sum().item()


def main() -> None:
    everything = len(VOCABULARY)
    divergence = assess(0, everything).divergence.item()
    side = "outside" if divergence > THRESHOLD else "inside"
    print(f"D = {divergence:.4f} nats, {side} the threshold of {THRESHOLD}\n")
    print("sampled     mu     pi      r  ratio says        d  d says    D after a step")
    for token, name in enumerate(VOCABULARY):
        mu, pi = BEHAVIOR[token].item(), POLICY[token].item()
        change = assess(token, everything).predicted_change.item()
        by_ratio, by_prediction = (
            "keep" if assess(token, everything, direction=direction).keep else "mask"
            for direction in ("ratio", "predictive")
        )
        after = after_a_step(token)
        print(
            f"{name:<8} {mu:5.2f}  {pi:5.2f}  {math.exp(math.log(pi) - math.log(mu)):5.2f}  {by_ratio:<10}"
            f"  {change:+7.4f}  {by_prediction:<6}  {after - divergence:+.4f} to {after:.4f}"
        )
    print("\n'but', with K = 1, so that 'so' is the only candidate beside it")
    for estimator in TAIL_ESTIMATORS:
        print(f"{estimator:<10}  d = {assess(4, 1, tail_estimator=estimator).predicted_change.item():+.4f}")


if __name__ == "__main__":
    main()
