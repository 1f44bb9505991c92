"""A process group as the engine needs it: sums, agreement, and gradients reduced late.

Every method that talks to other ranks must be called by all of them, in the same order.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from halfstep._compat import accelerator_device
from halfstep.distributed.env import World, world

Item = TypeVar("Item")

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced in flat buckets of about this size, DDP's own default."""


def local_device() -> torch.device:
    """The device of this rank: the accelerator numbered by the local rank where there is one, else the CPU."""
    device = accelerator_device()
    if device.type in ("cpu", "mps"):
        return torch.device(device.type)
    return torch.device(device.type, world().local_rank)


@dataclass(frozen=True, slots=True)
class Pending:
    """A reduction under way: `wait` for it before reading the tensor."""

    tensor: torch.Tensor
    work: Any = None

    def wait(self) -> torch.Tensor:
        """The reduced tensor."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Group:
    """All ranks of a run. A group of one does nothing and costs nothing.

    Args:
        place: this process and its world.
        control: a gloo group of its own for small agreements between the hosts, so that they and the gradients' reductions need
            no common order.
    """

    def __init__(self, place: World, control: Any = None) -> None:
        self.rank, self.size = place.rank, place.size
        self.alone = place.size == 1
        """Whether there is no other rank."""
        self._control = control

    def start_sum(self, tensor: torch.Tensor) -> Pending:
        """Start to sum `tensor` over the ranks, in place, on the device's own backend."""
        return Pending(tensor) if self.alone else Pending(tensor, dist.all_reduce(tensor, async_op=True))

    def start_largest(self, tensor: torch.Tensor) -> Pending:
        """Start to take the largest of each element over the ranks, in place, on the device's own backend."""
        return Pending(tensor) if self.alone else Pending(tensor, dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True))

    def start_max(self, values: Sequence[float]) -> Pending:
        """Start to take the largest of each value over the ranks, between the hosts: the device is not waited for."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.alone:
            return Pending(tensor)
        return Pending(tensor, dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._control, async_op=True))

    def max(self, *values: float) -> list[float]:
        """The largest of each value over the ranks."""
        if self.alone:
            return list(values)
        return [float(value) for value in self.start_max(values).wait().tolist()]

    def mean(self, total: float, weight: float) -> float:
        """The sum of the ranks' `total` over the sum of their `weight`; NaN where nothing counts."""
        if not self.alone:
            both = torch.tensor([total, weight], dtype=torch.float64)
            dist.all_reduce(both, group=self._control)
            total, weight = both.tolist()
        return total / weight if weight else float("nan")

    def from_first(self, item: Item) -> Item:
        """Rank 0's item, a small picklable object, on every rank."""
        if self.alone:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def broadcast_buffers(self, module: torch.nn.Module) -> None:
        """Give every rank the buffers of rank 0 (running statistics of batch norm, say)."""
        if self.alone:
            return
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)

    def equalise(self, module: torch.nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), src=0)
        self.broadcast_buffers(module)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum `.grad` over the ranks; a gradient that no rank has stays None, one that some have is zero elsewhere."""
        if self.alone:
            return
        has = self.start_max([float(p.grad is not None) for p in parameters]).wait().tolist()
        wanted = [p for p, present in zip(parameters, has, strict=True) if present]
        for p in wanted:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in _buckets([p.grad for p in wanted if p.grad is not None]):
            _sum_flat(bucket)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self.alone:
            dist.barrier(group=self._control)


def connect(device: torch.device) -> Group:
    """Join the ranks that `torchrun` started; the group ends with the process.

    Uses the process group that exists, or starts one with the backend of `device` (NCCL, XCCL, gloo).
    """
    place = world()
    if dist.is_available() and dist.is_initialized():
        place = World(rank=dist.get_rank(), size=dist.get_world_size())
    elif place.size > 1:
        _start(device)
    if place.size == 1:
        return Group(place)
    return Group(place, dist.new_group(backend="gloo"))


def _start(device: torch.device) -> None:
    if device.type not in ("cpu", "mps"):
        torch.accelerator.set_device_index(device.index or 0)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    atexit.register(_end)


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        if bucket and (bucket[0].dtype != gradient.dtype or sum(g.nbytes for g in bucket) >= BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _sum_flat(bucket: list[torch.Tensor]) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat)
    for gradient, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
        gradient.copy_(part.view_as(gradient))
