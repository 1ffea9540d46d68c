"""Several real processes."""

import os
import socket

import torch


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def in_two_processes(work, *args) -> None:
    """Call `work(rank, *args)` in two processes of a gloo group, as `torchrun` starts them."""
    port = str(free_port())
    torch.multiprocessing.spawn(_one_of_two, args=(work, port, args), nprocs=2)


def _one_of_two(rank, work, port, args):
    os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ |= dict(ACCELERATE_USE_CPU="1", OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    torch.set_num_threads(1)
    try:
        work(rank, *args)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
