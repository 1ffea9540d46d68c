"""No host sync in the loss: what makes the host wait for the GPU, forwards and backwards, is TRL's, and is known."""

import pytest
import torch

from tests.gpu import trainings
from tests.gpu.host_sync import host_syncs, ours
from trl_pdm import PDMGRPOTrainer


# What TRL reads in its loss, in the layout of a GPU
OF_TRL = {
    "transformers/masking_utils.py _ignore_causal_mask_sdpa",  # is there any padding?
    "trl/trainer/utils.py _fused_forward",  # which positions are labelled?
    "torch IndexBackward0",  # of the former
    # Metrics of each micro-batch
    "trl/trainer/grpo_trainer.py _compute_loss",
    "trl/trainer/grpo_trainer.py global_masked_mean",
    "trl/trainer/utils.py nanmin",
    "trl/trainer/utils.py nanmax",
}


def syncs(folder, **settings):
    """The host syncs of `compute_loss` and of its backward pass, in a whole training."""
    noted = set()

    class Watched(PDMGRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            with host_syncs() as found:
                loss = super().compute_loss(*args, **kwargs)
            noted.update(found)
            return loss

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            backward = self.accelerator.backward

            def watched(*args, **kwargs):
                with host_syncs() as found:
                    backward(*args, **kwargs)
                noted.update(found)

            self.accelerator.backward = watched

    with trainings.triton(kernels=False):  # the layout; the kernels themselves are launched and not waited for
        trainings.train(folder, cls=Watched, **settings)
    return noted


@pytest.mark.parametrize("name", trainings.TRAININGS)
def test_the_loss_does_not_wait_for_the_gpu(tmp_path, name):
    found = syncs(tmp_path, **trainings.TRAININGS[name] | {"max_steps": 2})
    assert not ours(found)
    assert {place for place, _ in found} == OF_TRL


class Reads(torch.autograd.Function):
    """Stands in for an operation of ours that reads its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


X = torch.linspace(-1, 1, 6)
READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "if": lambda x: 1 if x.sum() > 0 else 2,
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "indexing by a mask": lambda x: x[x > 0],
    "assignment by a mask": lambda x: x.clone().__setitem__(x > 0, x[:3]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "where of one argument": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "copy from the host": lambda x: torch.tensor([1.0, 2.0]),
}
FREE = {
    "where": lambda x: torch.where(x > 0, x, 0),
    "fill by a mask": lambda x: x.clone().__setitem__(x > 0, 0.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0),
    "indexing by numbers": lambda x: x[x.argsort()],
    "index_copy": lambda x: x.index_copy(0, torch.arange(6), x),
    "topk": lambda x: x.topk(2),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_is_seen(name):
    with host_syncs() as found:
        READS[name](X)
    assert found


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_read_is_not(name):
    with host_syncs() as found:
        FREE[name](X)
    assert not found


def test_a_read_backwards_is_seen():
    x = X.clone().requires_grad_()
    with host_syncs() as found:
        loss = x[x > 0].sum() + Reads.apply(x).sum()
        forwards = set(found)
        loss.backward()
    assert len(forwards) == 1 and {operation for _, operation in found - forwards} >= {"_local_scalar_dense"}
    assert any("put" in operation for _, operation in found - forwards)


def test_a_read_of_ours_is_told_from_one_of_trl(tmp_path, monkeypatch):
    from trl_pdm import metrics

    # Compiled under the name of the module it stands in
    code = "def add(self, mode, sums, maxima):\n    next(iter(sums.values())).item()\n    return original(self, mode, sums, maxima)"
    space = {"original": metrics.TokenMetrics.add}
    exec(compile(code, metrics.__file__, "exec"), space)
    monkeypatch.setattr(metrics.TokenMetrics, "add", space["add"])
    assert ours(syncs(tmp_path)) == {("trl_pdm/metrics.py add", "_local_scalar_dense")}
