"""On a real engine: a sync that went wrong stops the run and names its tensors; truncated sampling can be replayed."""

import copy
import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from trl.generation import vllm_generation

from tests.helpers import tiny
from tests.helpers.references import T
from tests.helpers.trainers import TWO_STEPS, Recorder, make_trainer
from tests.weight_sync.helpers import pack_tied_heads
from trl_pdm import noise, trust_region
from trl_pdm.weight_sync import check as sync_check
from trl_pdm.weight_sync import engine
from trl_pdm.weight_sync.check import SyncCheck, WeightSyncError
from trl_pdm.weight_sync.rounding import WeightRounding


def make_check(every, threshold=0.5, **engine):
    """Of an engine with these attributes."""
    return SyncCheck(every, threshold, gather=lambda x: x, engine=SimpleNamespace(**engine))


def test_check_is_due_right_after_a_sync_and_then_every_so_many_steps():
    check = make_check(10)
    same = torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.bool)
    due = []
    for step in range(30):
        if check.is_due(step, sampled_at=step // 4 * 4):
            due.append(step)
            assert check.run(step, *same) == {f"weight_sync/logp_difference_{of}": 0 for of in ("mean", "max")}
    assert due == [0, 12, 24]
    assert check.is_due(4, sampled_at=4), "of another training, with the same trainer"
    assert not check.is_due(40, sampled_at=None)
    assert not any(make_check(0).is_due(step, step) for step in range(5))


def test_nothing_to_compare_says_nothing_and_stays_due():
    check = make_check(10)
    nothing = torch.full((1, 2, 1), torch.nan), torch.zeros(1, 2, 1), torch.tensor([[True, False]])
    assert check.run(0, *nothing) == {}
    assert check.is_due(0, sampled_at=0)


def test_difference_above_the_threshold_or_no_number_stops():
    make_check(1, suspects=lambda: pytest.fail("nothing is wrong")).verify(0.5, 3.0)
    with pytest.raises(WeightSyncError, match="0.510 nats .* `sync_check_threshold=0.5` .*: a, b"):
        make_check(1, suspects=lambda: ["a", "b"]).verify(0.51, 3.0)
    with pytest.raises(WeightSyncError, match="No tensor can be named"):
        make_check(1, suspects=list).verify(float("nan"), 3.0)


def test_a_layer_that_cannot_be_asked_does_not_hide_the_error():
    def suspects():
        raise NotImplementedError("of a kernel")

    with pytest.raises(WeightSyncError, match=r"by 1.000 nats on average .* \(NotImplementedError\('of a kernel'\)\)"):
        make_check(10, suspects=suspects).verify(1.0, 2.0)


CANNOT_TELL = SimpleNamespace(can_round_the_trainer=False, advice="")


def checked(behavior, policy, valid):
    """What the check makes of evidence from an engine that truncates."""
    check = make_check(1, samples_from_the_policy=True, truncates=True, suspects=list, rounding=CANNOT_TELL)
    evidence = trust_region.Evidence(behavior.log(), policy.log(), valid, vocab_size=4)
    return check(0, 0, evidence, torch.ones(valid.shape[:-1], dtype=torch.bool), again=None)


def test_tokens_that_were_forced_say_nothing_of_the_weights():
    """Nine of ten tokens had one survivor: its probability is 1 in either policy."""
    behavior, policy = torch.tensor([[1.0, 1.0, 0, 0]] * 10)[None], torch.full((1, 10, 4), 0.25)
    behavior[0, 9] = torch.tensor([0.5, 0.5, 0.5, 0])  # the sampled token, and the candidates that survived
    policy[0, 9] = torch.tensor([0.375, 0.375, 0.125, 0.5])
    valid = torch.tensor([[True, False, False, False]] * 9 + [[True, False, True, False]])[None]
    # By hand: over the two survivors the trainer's own are 3/4 and 1/4
    found = checked(behavior, policy, valid)
    assert found["weight_sync/logp_difference_mean"] == pytest.approx(math.log(0.75 / 0.5))


def test_the_check_is_off_where_the_survivors_are_not_known(monkeypatch):
    said = []
    monkeypatch.setattr(sync_check.logger, "warning_once", said.append)
    one = torch.ones(1, 3, 1)
    assert checked(one, one / 10, one.bool()) == {} and "`sampling_support='replay'`" in said[0]


def test_replayed_support_equals_a_softmax_over_the_survivors():
    torch.manual_seed(0)
    logits = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    mu = (logits.detach() + 0.3 * torch.randn(6, 12)).softmax(-1)
    survivors, ids = mu.topk(5, dim=-1)
    survivors = survivors / survivors.sum(-1, keepdim=True)
    survivors[3:] *= 0.9  # here some survivors are not among the candidates
    behavior = torch.cat([survivors.log(), torch.full((6, 2), -torch.inf)], -1)  # the engine's word for "filtered"
    ids = torch.cat([ids, torch.tensor([[0, 1]]).expand(6, 2)], -1)
    valid = torch.ones_like(ids, dtype=torch.bool)
    policy = logits.log_softmax(-1).gather(-1, ids)
    sum_sq = policy.exp().square().sum(-1)
    evidence, complete, log_mass = trust_region.replay_support(
        trust_region.Evidence(behavior, policy, valid, vocab_size=12, policy_sum_sq=sum_sq)
    )
    assert complete.tolist() == [True] * 3 + [False] * 3
    expected = logits.gather(-1, ids[:, :5]).log_softmax(-1)  # an independent softmax, with its gradient
    torch.testing.assert_close(evidence.policy_logps[:3, :5], expected[:3].detach())
    torch.testing.assert_close(evidence.policy_logps[3:], policy[3:].detach())
    torch.testing.assert_close(evidence.policy_sum_sq[:3], expected[:3].exp().square().sum(-1).detach())
    assert not evidence.valid[:3, 5:].any() and evidence.valid[3:].all()
    (actual,) = torch.autograd.grad((policy[:, 0] - log_mass)[:3].sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected[:3, 0].sum(), logits)
    torch.testing.assert_close(actual, wanted)


def explained(apart, moved, mode="nearest", can=True, monkeypatch=None):
    """What is said of a policy that is `apart` from the engine, and that rounding its weights moves by `moved`."""
    said = []
    monkeypatch.setattr(sync_check.logger, "warning", said.append)
    rounding = WeightRounding(mode, tiny.model(30), merged=False, sharded=not can)
    check, found = make_check(1, rounding=rounding), {"weight_sync/logp_difference_mean": apart}
    trained, mask = torch.zeros(1, 2, 1), torch.tensor([[True, False]])
    for _ in range(2):
        check.tell_why(found, trained, mask, lambda: torch.tensor([[[-moved], [9.0]]]))
    return said


def test_a_notable_difference_is_explained_once(monkeypatch):
    assert explained(0.049, 0.04, monkeypatch=monkeypatch) == []
    (rounding,) = explained(0.25, 0.24, monkeypatch=monkeypatch)
    assert "by 0.250 nats on average" in rounding and "moves them by 0.240 nats" in rounding
    assert "`vllm_dtype='float32'`" in rounding and "`vllm_weight_rounding='stochastic'`" in rounding
    (stochastic,) = explained(0.25, 0.24, mode="stochastic", monkeypatch=monkeypatch)
    assert "`vllm_dtype='float32'`" in stochastic and "vllm_weight_rounding" not in stochastic
    (kernels,) = explained(0.25, 0.01, monkeypatch=monkeypatch)
    assert "moves them by 0.010 nats" in kernels and "The rest is how the engine computes" in kernels
    (unknown,) = explained(0.25, 0.24, can=False, monkeypatch=monkeypatch)
    assert "cannot be computed for this model" in unknown and "0.240" not in unknown


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_generation, "LLM", partial(vllm_generation.LLM, enforce_eager=True))
        return make_trainer(
            tmp_path_factory.mktemp("engine"),
            model=dict(tie_word_embeddings=True),
            use_vllm=True,
            vllm_dtype="float32",  # what is left between engine and trainer is then no rounding
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=64,
            divergence_top_k=40,
            per_device_train_batch_size=16,
            **TWO_STEPS,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_steps=6,
            sync_check_steps=1,
            max_completion_length=T,
        )


@pytest.fixture(scope="module")
def initial(trainer):
    return copy.deepcopy(trainer.model.state_dict())


@pytest.fixture
def restart(trainer, initial):
    """Train from the start, on the one engine that all tests share."""
    trainer.model.load_state_dict(initial)

    def run():
        trainer.add_callback(recorder := Recorder())
        trainer.optimizer = trainer.lr_scheduler = None
        trainer._last_loaded_step, trainer._step, trainer._buffered_inputs = -1, 0, None
        trainer._metrics["train"].clear()
        trainer._token_metrics._totals.clear()
        try:
            trainer.train()
        finally:
            trainer.remove_callback(recorder)
        return recorder.logs

    return run


@pytest.mark.vllm
@pytest.mark.slow
class TestOnARealEngine:
    def test_right_weights_pass_and_are_measured(self, restart):
        logs = restart()
        means = [log["weight_sync/logp_difference_mean"] for log in logs if "weight_sync/logp_difference_mean" in log]
        assert len(means) == 3 and max(means) < 0.02  # three rollouts, the last after four updates
        assert max(log.get("trust_region/divergence_max", 0) for log in logs) > 0.01, "the policy must move"

    def test_rounding_is_told_from_the_rest(self, trainer, restart, monkeypatch):
        """A float32 engine that gets weights on a coarse grid: nothing else can be the cause."""
        said = []
        monkeypatch.setattr(sync_check, "NOTABLE", 1e-5)
        monkeypatch.setattr(sync_check.logger, "warning", said.append)
        monkeypatch.setattr(trainer._sync_check, "_told_why", False)
        monkeypatch.setattr(
            trainer.vllm_generation.rounding, "rounded", lambda name, weight: (64 * weight).round() / 64
        )
        weights = copy.deepcopy(trainer.model.state_dict())
        restart()
        apart, by_rounding = (float(nats) for nats in re.findall(r"by ([0-9.]+) nats", said[0]))
        assert apart == pytest.approx(by_rounding, abs=0.0011), "as printed, to a thousandth"
        assert apart > 0.01 and len(said) == 1 and "`vllm_dtype='float32'`" in said[0]
        moved = [not torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items()]
        assert all(moved), "the trainer goes on with its own weights"

    def test_dropout_is_left_out_of_the_comparison(self, trainer, restart, monkeypatch):
        for layer in trainer.model.model.layers:
            monkeypatch.setattr(layer.self_attn, "attention_dropout", 0.5)
        monkeypatch.setattr(trainer._sync_check, "noise", noise.sources(trainer.model))
        quiet = [log["weight_sync/logp_difference_mean"] for log in restart() if "reward" in log]
        monkeypatch.setattr(trainer._sync_check, "noise", {})  # compared with the training forward, as it is
        monkeypatch.setattr(trainer._sync_check, "threshold", 100.0)
        noisy = [
            log["weight_sync/logp_difference_mean"] for log in restart() if "weight_sync/logp_difference_mean" in log
        ]
        assert len(quiet) > 1 and max(quiet) < 0.03 and min(noisy) > 3 * max(quiet)

    def test_an_evaluation_between_updates_is_no_rollout(self, trainer, restart, monkeypatch):
        """It syncs the engine, but the next update trains on what older weights sampled."""
        for name, value in {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}.items():
            monkeypatch.setattr(trainer.args, name, value)
        monkeypatch.setattr(trainer, "eval_dataset", tiny.prompts(8))
        logs = restart()
        assert sum("eval_reward" in log for log in logs) == 6
        means = [log["weight_sync/logp_difference_mean"] for log in logs if "weight_sync/logp_difference_mean" in log]
        assert len(means) == 3 and max(means) < 0.02

    def test_corrupted_sync_stops_and_names_the_tensor(self, trainer, restart, monkeypatch):
        push = trainer.vllm_generation._sync.push

        def corrupt(model):
            dict(model.named_parameters())["model.layers.1.post_attention_layernorm.weight"].data.mul_(-3)
            dict(model.named_parameters())["model.norm.weight"].data.mul_(-3)

        def push_and_corrupt(llm):
            moved = push(llm)
            llm.apply_model(corrupt)
            return moved

        monkeypatch.setattr(trainer.vllm_generation._sync, "push", push_and_corrupt)
        before = [p.clone() for p in trainer.model.parameters()]
        with pytest.raises(WeightSyncError) as error:
            restart()
        assert "model.layers.1.post_attention_layernorm, model.norm." in str(error.value)
        assert all(map(torch.equal, before, trainer.model.parameters())), "it must stop before it trains"

    def test_corrupted_fused_layer_is_named(self, trainer, restart, monkeypatch):
        tensors = trainer.vllm_generation._sync.tensors

        def with_a_wrong_query(**kwargs):
            for name, param in tensors():
                yield name, param.flip(0) * 4 if name.endswith("0.self_attn.q_proj.weight") else param

        monkeypatch.setattr(trainer.vllm_generation._sync, "tensors", with_a_wrong_query)
        trainer.vllm_generation.sync_weights()
        monkeypatch.undo()
        assert trainer.vllm_generation.suspects() == ["model.layers.0.self_attn.qkv_proj"]
        trainer.vllm_generation.sync_weights()
        assert trainer.vllm_generation.suspects() == []

    def test_stale_tied_head_stops_and_is_named(self, trainer, restart, monkeypatch):
        pack_tied_heads(trainer.vllm_generation.llm, monkeypatch)
        monkeypatch.setattr(engine, "_repack_tied_heads", lambda model: None)
        with torch.no_grad():
            trainer.model.get_input_embeddings().weight.copy_(trainer.model.get_input_embeddings().weight.flip(0))
        with pytest.raises(WeightSyncError, match="differ from the trainer's: lm_head"):
            restart()

    @pytest.mark.parametrize("support, is_one", [("full", False), ("replay", True)])
    @pytest.mark.parametrize("name, value", [("top_p", 0.9), ("structured_outputs_regex", "[0-9]{3}")])
    def test_replay_makes_on_policy_ratios_one_under_truncation(
        self, trainer, restart, monkeypatch, caplog, name, value, support, is_one
    ):
        assert not trainer.vllm_generation.truncates
        monkeypatch.setattr(trainer.vllm_generation, name, value)
        monkeypatch.setattr(trainer.args, "sampling_support", support)
        monkeypatch.setattr(trainer.vllm_generation, "_told_of_truncation", False)
        logs = [log for log in restart() if "weight_sync/logp_difference_mean" in log]
        on_policy = [abs(log["importance_ratio/mean"] - 1) for log in logs]
        assert all(log["trust_region/support_unknown"] < 0.5 for log in logs)
        assert sum("renormalises its logprobs" in line for line in caplog.messages) == (0 if is_one else 1)
        assert (max(on_policy) < 1e-3) if is_one else (min(on_policy) > 0.02), on_policy
        # Either way the check compares like with like
        assert max(log["weight_sync/logp_difference_mean"] for log in logs) < 0.02
