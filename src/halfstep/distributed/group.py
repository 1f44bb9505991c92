"""A process group as the engine needs it: sums, agreement, and gradients reduced late.

Every method that talks to other ranks must be called by all of them, in the same order.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from halfstep._compat import accelerator_device
from halfstep.distributed.buckets import copy_from_first, sum_over_ranks
from halfstep.distributed.env import World, restarts, world
from halfstep.distributed.failure import explain
from halfstep.distributed.whereabouts import Answering
from halfstep.errors import DeviceError

Item = TypeVar("Item")


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


class Vote:
    """Which of some flags are set on any rank.

    Between hosts that are the devices too, it waits for the window's sums and goes with them: a collective less.
    """

    def __init__(self, flags: Sequence[bool]) -> None:
        self.values = [float(flag) for flag in flags]
        self.pending: Pending | None = None
        """What the ranks made of it, once it is under way."""


class Group:
    """All ranks of a run. A group of one does nothing and costs nothing.

    Args:
        place: this process and its world.
        control: a gloo group of its own for small agreements between the hosts. Some of them run ahead of the gradients'
            reductions (whether anybody has data left), so that the two need no common order.
        device: where this rank computes.
    """

    def __init__(self, place: World, control: Any = None, device: torch.device | None = None) -> None:
        self.rank, self.size = place.rank, place.size
        self.alone = place.size == 1
        """Whether there is no other rank."""
        self._answering: Answering | None = None
        self._control, self._device = control, device
        self._steps: Any = None
        self._waiting: Vote | None = None

    def start_sum(self, tensor: torch.Tensor) -> Pending:
        """Start to sum `tensor`, a vector, over the ranks on the device's own backend, with a vote that waits to go along."""
        if self.alone:
            return Pending(tensor)
        vote, self._waiting = self._waiting, None
        if vote is None:
            return Pending(tensor, dist.all_reduce(tensor, async_op=True))
        both = torch.cat([tensor, torch.tensor(vote.values, dtype=tensor.dtype)])
        work = dist.all_reduce(both, async_op=True)
        vote.pending = Pending(both[len(tensor) :], work)
        return Pending(both[: len(tensor)], work)

    def cast(self, *flags: bool) -> Vote:
        """Cast a vote, which `count` counts; every rank does both, with at most one sum in between."""
        vote = Vote(flags)
        if self.alone or (self._device is not None and self._device.type == "cpu"):
            self._waiting = vote
        else:
            vote.pending = self.start_max(vote.values)
        return vote

    def count(self, vote: Vote) -> list[bool]:
        """Which flags were set on any rank."""
        if vote.pending is None:
            self._waiting = None
            vote.pending = self.start_max(vote.values)
        return [value > 0 for value in vote.pending.wait().tolist()]

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

    def anybody_in_step(self, flag: bool) -> bool:
        """Whether the flag is set on any rank, which all ask in step: apart from votes that run ahead on some of them."""
        return bool(self._in_step(float(flag)))

    def first_in_step(self, item: Item | None, *, has_some: bool) -> Item | None:
        """This rank's picklable object where it has some, else that of the lowest rank which has; all ask in step."""
        first = self.size - int(self._in_step(float(self.size - self.rank if has_some else 0)))
        box = [item]
        dist.broadcast_object_list(box, src=first, group=self._steps)
        return item if has_some else box[0]

    def _in_step(self, value: float) -> float:
        """The largest value, between the hosts."""
        if self._steps is None:
            self._steps = _group_of_hosts(self._device)
        largest = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._steps)
        return float(largest)

    def mean(self, total: float, weight: float) -> float:
        """The sum of the ranks' `total` over the sum of their `weight`; NaN where nothing counts."""
        if not self.alone:
            both = torch.tensor([total, weight], dtype=torch.float64)
            dist.all_reduce(both, group=self._control)
            total, weight = both.tolist()
        return total / weight if weight else float("nan")

    def from_first(self, item: Item) -> Item:
        """Rank 0's item, a small picklable object, on every rank.

        It goes over the device's own backend: ranks may have cast different numbers of votes when they ask for it.
        """
        if self.alone:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0, device=None if dist.get_backend() == "gloo" else self._device)
        return box[0]

    def broadcast_buffers(self, module: torch.nn.Module) -> None:
        """Give every rank the buffers of rank 0 (running statistics of batch norm, say)."""
        if not self.alone:
            copy_from_first(module.buffers())

    def equalise(self, module: torch.nn.Module) -> None:
        """Give every rank the parameters and buffers of rank 0."""
        if not self.alone:
            copy_from_first(module.parameters())
            copy_from_first(module.buffers())

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum `.grad` over the ranks; a gradient that no rank has stays None, one that some have is zero elsewhere."""
        if self.alone:
            return
        has = self.max(*(float(p.grad is not None) for p in parameters))
        wanted = [p for p, present in zip(parameters, has, strict=True) if present]
        for p in wanted:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        sum_over_ranks(p.grad for p in wanted if p.grad is not None)

    def another(self) -> Any:
        """A gloo group of the same ranks for a thread of its own; None where there is one rank. Every rank calls it."""
        return None if self.alone else _group_of_hosts(self._device)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if not self.alone:
            dist.barrier(group=self._control)

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """Within it, note for the other ranks why this one fails; where another failed first, raise what it noted.

        Raises:
            RunStopped: another rank failed first.
        """
        try:
            yield
        except Exception as error:
            if not self.alone:
                explain(error, self.rank, self.size)
            raise

    def answer(self) -> None:
        """Tell the other ranks where this one is, when one of them has waited too long."""
        from torch.distributed.distributed_c10d import _get_default_store  # only there where torch has process groups

        self._answering = Answering(_get_default_store(), self.rank, self)

    def release(self) -> None:
        """Let go of the groups of hosts, when the process ends; nothing can be trained afterwards.

        Not where it fails: they may have work under way that the others will never do their part of.
        """
        if self._answering is not None:
            self._answering.end()
        if not _fails():
            self._control = self._steps = None


def connect(device: torch.device, *, timeout: timedelta | None = None) -> Group:
    """Join the ranks that `torchrun` started; the group ends with the process.

    Uses the process group that exists, or starts one with the backend of `device` (NCCL, XCCL, gloo).

    Args:
        device: where this rank computes.
        timeout: how long a group that is started here waits for a rank; None for as long as its backend does by itself.

    Raises:
        DeviceError: there are several ranks, and torch connects none on this device.
    """
    place = world()
    if dist.is_available() and dist.is_initialized():
        place = World(rank=dist.get_rank(), size=dist.get_world_size())
    if place.size == 1:
        return Group(place)
    if device.type == "mps":
        raise DeviceError(
            f"{place.size} ranks were started with the model on MPS, for which torch has no process group. "
            "Start one process, or put the model on the CPU."
        )
    if not dist.is_initialized():
        _start(device, timeout)
    group = Group(place, _group_of_hosts(device), device)
    group.answer()
    atexit.register(_release, weakref.ref(group))
    return group


def lend(wrapper: DistributedDataParallel) -> None:
    """Let a wrapper that was made here use the process group until the process ends."""
    atexit.register(_release_wrapper, weakref.ref(wrapper))


def _release(lent: Callable[[], Group | None]) -> None:
    group = lent()
    if group is not None:
        group.release()


def _release_wrapper(lent: Callable[[], DistributedDataParallel | None]) -> None:
    wrapper = lent()
    if wrapper is not None and not _fails():
        for holder in ("process_group", "reducer", "logger"):
            setattr(wrapper, holder, None)


def _group_of_hosts(device: torch.device | None) -> Any:
    """A gloo group of all ranks, which waits for a rank as long as theirs does, and not for gloo's own half an hour."""
    backend = dist.distributed_c10d._get_default_group()._get_backend(device or torch.device("cpu"))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return dist.new_group(backend="gloo", timeout=timeout)


def _start(device: torch.device, timeout: timedelta | None) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    from torch.distributed.distributed_c10d import PrefixStore  # only there where torch has process groups
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    # torchrun's store outlives the ranks (torch 2.13), and gloo would look for those that have died where they were
    store = PrefixStore(f"attempt {restarts()}", store)
    backend = dist.get_default_backend_for_device(device.type)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    atexit.register(_end)


def _end() -> None:
    """Leave the group, unless this process fails: NCCL would then wait for collectives that the others are not in.

    Called after everything that uses it was let go, so that the group's threads end here: one that still holds a tensor
    when the interpreter is gone aborts the process ("terminate called without an active exception").
    """
    if dist.is_initialized() and (dist.get_backend() == "gloo" or not _fails()):
        dist.destroy_process_group()


def _fails() -> bool:
    """Whether the interpreter ends with an error that nobody caught."""
    return bool(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))
