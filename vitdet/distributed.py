"""Rank helpers over torch.distributed, as torchrun sets it up; without it, one process is rank 0 of 1."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def is_distributed() -> bool:
    """Whether a process group is running."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number, 0 for the main one."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Number of processes."""
    return dist.get_world_size() if is_distributed() else 1


def start() -> None:
    """Join the group that torchrun's environment describes: NCCL on GPUs, gloo on CPUs. Alone: nothing."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not is_distributed():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def stop() -> None:
    """Leave the group."""
    if is_distributed():
        dist.destroy_process_group()


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a tensor over all processes."""
    if not is_distributed():
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / world_size()


def share_from_main(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors of every process with those of the main one."""
    if is_distributed():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def gather_lists(items: list) -> list:
    """The lists of all processes, joined in the order of ranks, on every process."""
    if not is_distributed():
        return items
    parts: list[list] = [[] for _ in range(world_size())]
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]
