"""A small training run that breaks off at a named point. `test_faults.py` starts it in a process of its own."""

import gc
import json
import os
import re
import resource
import signal
import time
from functools import partial
from pathlib import Path

import torch
import transformers.modeling_utils
from peft import LoraConfig
from transformers import TrainerCallback, TrainerState
from trl.generation import vllm_generation

from tests.helpers import tiny
from tests.helpers.processes import free_port
from tests.helpers.trainers import TWO_STEPS, make_trainer
from trl_pdm.rollout import rendezvous
from trl_pdm.weight_sync import adapter_files, strategies


STEPS = 6  # a rollout and a checkpoint every second one
gc.freeze()  # every training collects garbage, which takes a second where all modules' objects are gone through
COMPLETE, INCOMPLETE = "checkpoint-2", "checkpoint-4"  # what is there when a fault strikes, and what is never finished


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    Path(FOLDER, "interrupted.json").write_text(json.dumps({"at": time.time(), "in memory": in_shared_memory()}))
    os.kill(os.getpid(), signal.SIGINT)


def in_shared_memory():
    """What this process has mapped or open there, and adapters."""
    used = Path("/proc/self/maps").read_text() + " ".join(
        os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and link.exists()
    )
    adapters = Path(adapter_files._SHARED_MEMORY).glob(f"{adapter_files._FOLDER_PREFIX}*")
    return sorted({*re.findall(r"/dev/shm/[^\s]+", used), *map(str, adapters)})


def cut_short(write, is_file, then):
    """`write`, but the process ends when half of the file is there."""

    def wrapper(*args, **kwargs):
        written = write(*args, **kwargs)
        path = next(str(arg) for arg in (*args, *kwargs.values()) if isinstance(arg, (str, Path)))
        if is_file(path):
            os.truncate(path, os.path.getsize(path) // 2)
            then()
        return written

    return wrapper


class FullDisk(TrainerCallback):
    """Before the second checkpoint: from then on the kernel lets no file grow beyond `size`."""

    def __init__(self, size):
        self.size = size

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.size))


def prepare(trainer, fault):
    """Let `fault` strike after the first checkpoint."""
    name, _, how = fault.partition(":")
    then = interrupt if how == "interrupt" else kill
    calls = 0

    def at_call(n, condition=lambda: True):
        def hook(*args):
            nonlocal calls
            calls += trainer.state.global_step == 2 and condition()
            if calls == n:
                then()

        return hook

    def in_incomplete(path, ending=""):
        return Path(path).parent.name == INCOMPLETE and path.endswith(ending)

    match name:
        case "generation":  # the third token
            trainer.model.register_forward_hook(at_call(3, lambda: not torch.is_grad_enabled()))
        case "loss":
            trainer.model.register_forward_hook(at_call(1, torch.is_grad_enabled))
        case "weights":
            module = transformers.modeling_utils
            module.safe_save_file = cut_short(module.safe_save_file, in_incomplete, then)
        case "optimizer":
            torch.save = cut_short(torch.save, partial(in_incomplete, ending="optimizer.pt"), then)
        case "state":
            TrainerState.save_to_json = cut_short(TrainerState.save_to_json, in_incomplete, then)
        case "full disk":
            trainer.add_callback(FullDisk(int(how)))
        case "sync":  # on a way that the training's first sync has gone
            strategies.save_file = cut_short(strategies.save_file, lambda path: trainer.state.global_step == 2, then)
        case "engine":
            engine, hook = trainer.vllm_generation.llm.llm_engine, at_call(3)
            step = engine.step
            engine.step = lambda: (hook(), step())[1]
        case _:
            raise ValueError(fault)


def train(folder, fault=None, resume=None, use_vllm=False):
    """Train, and leave what must not depend on an interruption in `result.pt`; an error in `error.txt`."""
    global FOLDER
    # A shell starts its background jobs with this signal ignored, and they hand that down
    signal.signal(signal.SIGINT, signal.default_int_handler)
    FOLDER, rollouts = folder, []

    def reward(prompts, completions, **kwargs):
        rollouts.append((prompts, completions))
        return tiny.count_ones(completions)

    for name in rendezvous.VARIABLES:  # of an engine of the process that started this one
        os.environ.pop(name, None)
    os.environ["MASTER_PORT"] = str(free_port())
    options = dict(use_vllm=True, vllm_gpu_memory_utilization=0.3, vllm_max_model_length=64) if use_vllm else {}
    vllm_generation.LLM = partial(getattr(vllm_generation, "LLM", None) or dict, enforce_eager=True)
    trainer = make_trainer(
        folder,
        reward_funcs=reward,
        temperature=1.0,
        max_completion_length=6,
        max_steps=STEPS,
        learning_rate=1e-2,
        warmup_steps=3,
        divergence_threshold=0.01,
        save_strategy="steps",
        save_steps=2,
        peft_config=LoraConfig(r=4, target_modules="all-linear") if use_vllm else None,
        **TWO_STEPS,
        **options,
    )
    Path(folder, "at start.json").write_text(json.dumps(in_shared_memory()))
    if fault:
        prepare(trainer, fault)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except BaseException as error:
        Path(folder, "error.txt").write_text(f"{type(error).__name__}: {error}")
        raise
    result = dict(
        weights=trainer.model.state_dict(),
        optimizer=trainer.optimizer.state_dict()["state"],
        schedule=trainer.lr_scheduler.state_dict(),
        logs=trainer.state.log_history,
        rollouts=rollouts,
    )
    torch.save(result, Path(folder, "result.pt"))
