"""Several real processes."""

import concurrent.futures
import multiprocessing
import os
import socket

import torch


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def forked() -> multiprocessing.context.BaseContext:
    """Whose processes are forked from one that has imported everything, which takes longer than most of what they do.

    They have the environment of the first time that one of them was started.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.fault_run"])
    return context


def in_two_processes(work, *args) -> None:
    """Call `work(rank, *args)` in two processes of a gloo group, as `torchrun` starts them."""
    forked()
    arguments = (work, str(free_port()), args)
    torch.multiprocessing.start_processes(_one_of_two, arguments, nprocs=2, start_method="forkserver")


def _one_of_two(rank, work, port, args):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ |= dict(ACCELERATE_USE_CPU="1", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    torch.set_num_threads(1)
    try:
        work(rank, *args)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class InThisProcess(concurrent.futures.Executor):
    """In the place of a `ProcessPoolExecutor`, whose processes would first import everything."""

    def __init__(self, *args, **kwargs):
        pass

    def submit(self, work, /, *args, **kwargs):
        done = concurrent.futures.Future()
        done.set_result(work(*args, **kwargs))
        return done
