"""Two real processes (gloo): the same global batch trains the same as one process, however the model is wrapped."""

import os
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import nn

from tests.helpers import tiny
from tests.helpers.processes import in_two_processes
from tests.helpers.references import TEMPERATURE, B, K, T, full_logps, make_batch, reference_logps
from tests.helpers.trainers import make_trainer, run


pytestmark = pytest.mark.slow


def build(folder, **options):
    """A trainer of the model that is saved in `folder`, which both processes read."""
    schedule = dict(gradient_accumulation_steps=1, lr_scheduler_type="constant")
    return make_trainer(folder / "out", model=str(folder / "model"), **schedule | options)


# ---- One batch, the model wrapped


def by_ddp(model):
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
    return wrapped, lambda loss: loss.backward(), lambda parameter: parameter.grad


def by_fsdp2(model):
    """By hand, layer by layer and then the root, as accelerate does on GPUs; it ignores FSDP on CPUs."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for module in [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh), lambda loss: loss.backward(), lambda p: p.grad.full_tensor()


def by_deepspeed(stage, model):
    """By hand, with the optimizer of torch: accelerate ignores DeepSpeed on CPUs."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(trained, lr=0.0),
        config=dict(
            train_micro_batch_size_per_gpu=B // 2,
            zero_optimization=dict(stage=stage, stage3_param_persistence_threshold=0),
            zero_allow_untested_optimizer=True,
        ),
    )
    return engine, engine.backward, safe_get_full_grad


WRAPPERS = {
    "ddp": by_ddp,
    "fsdp2": by_fsdp2,
    "zero2": lambda model: by_deepspeed(2, model),
    "zero3": lambda model: by_deepspeed(3, model),
}


def build_for_one_step(folder, lora):
    peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if lora else None
    torch.manual_seed(5)
    trainer = build(
        folder,
        peft_config=peft_config,
        loss_type="grpo" if lora else "dapo",
        per_device_train_batch_size=B // 2 if "RANK" in os.environ else B,
        max_completion_length=T,
        divergence_threshold=1e-5,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def global_batch(model):
    """Uneven lengths, and every token of the second process's rows outside, on its way further out."""
    batch, _ = make_batch(model)
    with torch.no_grad():
        logits = full_logps(model, batch)[2:]
    sampled = batch["completion_ids"][2:, :, None]
    away = -3 * batch["advantages"][2:].sign()[:, None, None].expand(sampled.shape)
    mu = logits.scatter_add(-1, sampled, away).log_softmax(-1)
    ids = batch["behavior_topk_ids"][2:].clamp(min=0).long()
    batch["behavior_topk_logps"][2:] = mu.gather(-1, ids)
    batch["sampling_per_token_logps"] = batch["behavior_topk_logps"][..., 0].clone()
    return batch


def part_of(batch, rank):
    rows = slice(2 * rank, 2 * rank + 2)
    part = {name: value[rows] if value.dim() else value for name, value in batch.items()}
    length = part["completion_mask"].sum(1).max()  # each process pads to its own longest completion
    narrow = ("completion_ids", "completion_mask", "tool_mask", "sampling_per_token_logps")
    narrow += ("behavior_topk_ids", "behavior_topk_logps")
    return part | {name: part[name][:, :length] for name in narrow}


CASES = [(wrap, lora) for wrap in WRAPPERS for lora in (False, True)]


def one_step_each(rank, folder):
    """All cases in one pair of processes, as starting them takes longer than the rest."""
    for wrap, lora in CASES:
        trainer = build_for_one_step(folder, lora)
        part = part_of(torch.load(folder / f"batch-{lora}.pt"), rank)
        model, backward, gradient_of = WRAPPERS[wrap](trainer.model)
        loss = trainer.compute_loss(model, part)
        backward(loss)
        trained = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
        gradients = {name: gradient_of(parameter).clone() for name, parameter in trained}
        torch.save(
            (loss.detach(), gradients, trainer._token_metrics.pop("train")), folder / f"{wrap}-{lora}-{rank}.pt"
        )


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The folder with each process's loss, gradients and metrics, and the same from this one with the whole batch."""
    folder, alone = tmp_path_factory.mktemp("steps"), {}
    tiny.save(folder / "model")
    for lora in (False, True):
        trainer = build_for_one_step(folder, lora)
        batch = global_batch(trainer.model)
        torch.save(batch, folder / f"batch-{lora}.pt")
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}
        alone[lora] = batch, loss.detach(), gradients, trainer._token_metrics.pop("train")
    in_two_processes(one_step_each, folder)
    return folder, alone


@pytest.mark.parametrize("wrap, lora", CASES)
def test_two_processes_are_one(steps, wrap, lora):
    folder, alone = steps
    batch, loss, expected, metrics = alone[lora]
    mask = (batch["completion_mask"] * batch["tool_mask"]).bool()
    share = (mask[2:].sum() / mask.sum()).item()
    assert share < metrics["trust_region/masked"] < 1, "all of the second process's tokens and some of the first's"

    parts = [torch.load(folder / f"{wrap}-{lora}-{rank}.pt") for rank in (0, 1)]
    torch.testing.assert_close(sum(part[0] for part in parts) / 2, loss, rtol=1e-5, atol=1e-6)
    assert parts[1][0] == 0, "every token of the second process is masked"
    for _, gradients, seen in parts:  # on every rank: the gradients and metrics of the global batch
        assert seen == pytest.approx(metrics, rel=1e-5, abs=1e-6)
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-2


# ---- A whole run


def rollout(prompts, trainer):
    """Completions that only depend on the prompt and on which of its copies this is, of uneven lengths."""
    tokenizer, policy = trainer.processing_class, tiny.model(len(trainer.processing_class), seed=7).eval()
    names = ("prompt_ids", "completion_ids", "logprobs", "topk_token_ids", "topk_logprobs")
    result, copies = {name: [] for name in names}, {}
    for prompt in prompts:
        copy = copies[prompt] = copies.get(prompt, 0) + 1
        prompt_ids = tokenizer(prompt)["input_ids"]
        seed = 31 * sum(prompt_ids) + copy
        generator = torch.Generator().manual_seed(seed)
        completion_ids = torch.randint(2, 41, (2 + seed % 5,), generator=generator).tolist()
        logps = reference_logps(policy, prompt_ids, completion_ids, TEMPERATURE)
        top = logps.topk(K)
        own = logps.gather(-1, torch.tensor(completion_ids)[:, None])[:, 0]
        values = (prompt_ids, completion_ids, own.tolist())
        lists = [
            (
                [token, *(i for i in ids if i != token)],
                [mine, *(p for i, p in zip(ids, ps, strict=True) if i != token)],
            )
            for token, mine, ids, ps in zip(
                completion_ids, own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
            )
        ]
        values += ([ids for ids, _ in lists], [ps for _, ps in lists])
        for name, value in zip(names, values, strict=True):
            result[name].append(value)
    return result


def whole_run(rank, folder, processes):
    trainer = build(
        folder,
        rollout_func=rollout,
        per_device_train_batch_size=8 // processes,
        num_iterations=3,
        max_steps=6,
        max_completion_length=T,
        divergence_threshold=0.3,
        log_realized_alignment=True,
        optim="sgd",
        learning_rate=0.3,
    )
    assert trainer.accelerator.num_processes == processes
    logs = run(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    torch.save((logs, model.state_dict()), folder / f"run-{processes}-{rank}.pt")


# What TRL logs as a mean of the processes' means is left out
SAME = ("loss", "grad_norm", "reward", "completions/mean_length", "trust_region/", "importance_ratio/")


def test_a_run_in_two_processes_is_the_run_in_one(tmp_path):
    tiny.save(tmp_path / "model")
    in_two_processes(whole_run, tmp_path, 2)
    whole_run(0, tmp_path, 1)
    expected_logs, expected = torch.load(tmp_path / "run-1-0.pt", weights_only=False)
    for rank in (0, 1):
        logs, weights = torch.load(tmp_path / f"run-2-{rank}.pt", weights_only=False)
        assert len(logs) == len(expected_logs)
        for log, expected_log in zip(logs[:-1], expected_logs[:-1], strict=True):
            names = [name for name in expected_log if name.startswith(SAME)]
            assert {name: log[name] for name in names} == pytest.approx(
                {name: expected_log[name] for name in names}, rel=1e-4, abs=1e-5
            )
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    assert any(0 < log.get("trust_region/masked", 0) < log["trust_region/outside"] for log in expected_logs[:-1])


# ---- What crosses between processes


def record_traffic(rank, folder):
    gathered = []
    trainer = build_for_one_step(folder, False)
    gather = trainer._token_metrics._gather
    trainer._token_metrics._gather = lambda tensor: gathered.append(tensor.numel()) or gather(tensor)
    sent, collectives = [], ("all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "all_reduce")
    for name in collectives:
        original = getattr(torch.distributed, name)

        def counted(*args, original=original, **kwargs):
            sent.extend(t.numel() for t in args if isinstance(t, torch.Tensor))
            return original(*args, **kwargs)

        setattr(torch.distributed, name, counted)
    part = part_of(torch.load(folder / "batch.pt"), rank)
    trainer.compute_loss(trainer.model, part)
    assert len(gathered) == 1 and gathered[0] < 40, "one row of sums a micro-batch"
    assert sent and max(sent) < min(part["behavior_topk_ids"].numel(), 80), sent


def test_no_candidates_cross_between_processes(tmp_path):
    tiny.save(tmp_path / "model")
    trainer = build_for_one_step(tmp_path, False)
    torch.save(global_batch(trainer.model), tmp_path / "batch.pt")
    in_two_processes(record_traffic, tmp_path)


def own_engine(rank, folder):
    from functools import partial

    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(vllm_generation.LLM, enforce_eager=True)
    trainer = build(
        folder,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=64,
        sync_check_steps=1,
        sync_check_threshold=0.02,  # a stale engine is off by more: the weights move by 0.1 nats and more
        per_device_train_batch_size=4,
        steps_per_generation=2,
        max_completion_length=8,
        learning_rate=1e-2,
        max_steps=4,
    )
    logs = run(trainer)
    checked = [log["weight_sync/logp_difference_mean"] for log in logs if "weight_sync/logp_difference_mean" in log]
    moved = [log["trust_region/divergence_mean"] for log in logs if "trust_region/divergence_mean" in log]
    assert len(checked) == 2 and max(checked) < 0.02 and max(moved) > 0.01, (checked, moved)
    torch.save(logs, folder / f"engine-{rank}.pt")


@pytest.mark.vllm
def test_each_process_has_its_own_engine(tmp_path):
    tiny.save(tmp_path / "model")
    in_two_processes(own_engine, tmp_path)
    first, second = (torch.load(Path(tmp_path) / f"engine-{rank}.pt", weights_only=False) for rank in (0, 1))
    for mine, other in zip(first[:-1], second[:-1], strict=True):
        names = [name for name in mine if name.startswith(("trust_region/", "importance_ratio/"))]
        assert names and {n: mine[n] for n in names} == {n: other[n] for n in names}
