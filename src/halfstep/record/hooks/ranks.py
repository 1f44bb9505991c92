"""DDP wrappers, `no_sync`, collectives and process groups."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from halfstep.events.vocabulary import Collective, Made, NoSyncEnter, NoSyncExit
from halfstep.record.hooks.models import model_known
from halfstep.record.patches import Patches
from halfstep.record.recorder import Recorder

SETTLE_S = 0.05
"""Gloo's thread drops its last work after the collective has returned, and needs the interpreter for that; a group that ends
meanwhile with a live DDP wrapper holds the interpreter and waits for that thread for ever (torch 2.13, on a busy machine)."""
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("scatter", "scatter_object_list", "monitored_barrier"),
)


def install(patches: Patches, rec: Recorder) -> None:
    """Hear what ranks do together."""
    if not dist.is_available():
        return
    patches.wrap(DistributedDataParallel, "__init__", lambda original: _wrapping(original, rec))
    patches.wrap(DistributedDataParallel, "no_sync", lambda original: _not_syncing(original, rec))
    patches.wrap(DistributedDataParallel, "join", lambda original: _joining(original, rec))
    for name in COLLECTIVES:
        for owner in (dist, dist.distributed_c10d):
            patches.wrap(owner, name, lambda original, name=name: _together(original, rec, name))  # type: ignore[misc]
    for owner in (dist, dist.distributed_c10d):
        patches.wrap(owner, "init_process_group", lambda original: _grouping(original, rec))
        patches.wrap(owner, "destroy_process_group", lambda original: _leaving(original, rec))


def _wrapping(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if not rec.hears:
            original(self, module, *args, **kwargs)
            return
        here = rec.here()
        rec.quiet += 1
        try:
            original(self, module, *args, **kwargs)
        finally:
            rec.quiet -= 1
        with rec.safe:
            inner = model_known(rec, module, here)
            known = rec.made(self, "model", here, wrapper="ddp", find_unused=bool(kwargs.get("find_unused_parameters", False)))
            known.facts["inner"] = inner.ref
            inner.facts["ddp"] = known.ref
            model_known(rec, self, here)
            rec.ddp[known.ref] = weakref.ref(self)

    return __init__


def _not_syncing(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        heard = rec.hears
        model = rec.objects.find(self)
        ref = model.ref if model is not None else None
        if heard:
            rec.say(NoSyncEnter, rec.here(depth=4), model=ref)
        try:
            with original(self):
                yield
        finally:
            if heard:
                rec.say(NoSyncExit, rec.here(depth=4), model=ref)

    return no_sync


def _joining(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def join(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        if rec.hears:
            with rec.safe:
                rec.made(made, "join", rec.here())
        return made

    return join


def _together(original: Callable[..., Any], rec: Recorder, name: str) -> Callable[..., Any]:
    def collective(*args: Any, **kwargs: Any) -> Any:
        if rec.quiet or not rec.hears:
            return original(*args, **kwargs)
        with rec.safe:
            here = rec.here()
            rec.say(Collective, here, kind=name)
            if kwargs.get("group") in (None, dist.group.WORLD) and not any(isinstance(a, dist.ProcessGroup) for a in args):
                given = tuple(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
                for listener in rec.listeners:
                    listener.collective_begins(name, given, here.place)
        rec.quiet += 1
        try:
            return original(*args, **kwargs)
        finally:
            rec.quiet -= 1

    return collective


def _grouping(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if not rec.hears or rec.quiet:
            return original(*args, **kwargs)
        here = rec.here()
        rec.quiet += 1
        try:
            done = original(*args, **kwargs)
        finally:
            rec.quiet -= 1
        with rec.safe:
            group = rec.objects.new(dist.group.WORLD, "group", here.place)
            group.facts["backend"] = str(dist.get_backend())
            rec.say(Made, here, what=group.ref, facts=group.facts)
            for listener in rec.listeners:
                listener.joined_group(dist.get_rank(), dist.get_world_size())
        return done

    return init_process_group


def _leaving(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        if rec.hears:
            with rec.safe:
                for listener in rec.listeners:
                    listener.left_group()
                if dist.is_initialized() and "gloo" in dist.get_backend():
                    time.sleep(SETTLE_S)
        return original(*args, **kwargs)

    return destroy_process_group
