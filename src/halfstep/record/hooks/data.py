"""Loaders, samplers, checkpoints and seeds."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data.distributed import DistributedSampler

from halfstep.events.vocabulary import EpochBegin, EpochEnd, Fetch, Load, MemoryFlush, Ref, Save, Seed, SetEpoch
from halfstep.record.objects import Known
from halfstep.record.patches import Patches
from halfstep.record.places import Here, Moment
from halfstep.record.recorder import Recorder


def install(patches: Patches, rec: Recorder) -> None:
    """Hear data."""
    patches.wrap(DataLoader, "__init__", lambda original: _making_loader(original, rec))
    patches.wrap(DataLoader, "__iter__", lambda original: _beginning(original, rec))
    patches.wrap(torch_dataloader._BaseDataLoaderIter, "__next__", lambda original: _fetching(original, rec))
    patches.wrap(DistributedSampler, "__init__", lambda original: _making_sampler(original, rec))
    patches.wrap(DistributedSampler, "set_epoch", lambda original: _telling(original, rec))
    patches.wrap(torch, "save", lambda original: _saving(original, rec))
    patches.wrap(torch, "load", lambda original: _loading(original, rec))
    patches.wrap(torch, "manual_seed", lambda original: _seeding(original, rec))
    patches.wrap(torch.cuda, "empty_cache", lambda original: _flushing(original, rec))


def _making_loader(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __init__(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:  # noqa: N807
        if rec.hears and rec.objects.find(self) is None:
            with rec.safe:
                here = rec.here()
                given = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
                rec.made(self, "loader", here, **_loader_facts(rec, given, here))
        original(self, *args, **kwargs)

    return __init__


def _loader_facts(rec: Recorder, given: dict[str, Any], here: Here) -> dict[str, Any]:
    dataset = given.get("dataset")
    iterable = isinstance(dataset, IterableDataset)
    sampler, batches = given.get("sampler"), given.get("batch_sampler")
    inner = getattr(batches, "sampler", None)
    return {
        "sampler": _sampler(rec, sampler, here),
        "batch_sampler": _sampler(rec, inner if isinstance(inner, DistributedSampler) else batches, here),
        "shuffle": bool(given.get("shuffle")),
        "dataset": rec.objects.known(dataset, "dataset", None).ref if dataset is not None and _weak(dataset) else None,
        "dataset name": "",
        "iterable": iterable,
        "map style": not iterable,
        "workers": given.get("num_workers", 0),
        "pin_memory": bool(given.get("pin_memory", False)),
        "drop_last": bool(given.get("drop_last", False)),
        "persistent": bool(given.get("persistent_workers", False)),
        "worker_init": given.get("worker_init_fn") is not None,
        "tags": frozenset({"rank"} if _is_shard(dataset) else ()),
    }


def _is_shard(dataset: Any) -> bool:
    """Whether these are as few of a data set's samples as one rank gets."""
    if not isinstance(dataset, Subset) or not dist.is_initialized():
        return False
    ranks = dist.get_world_size()
    return ranks > 1 and ranks * (len(dataset) - 1) < len(dataset.dataset)  # type: ignore[arg-type]  # torch's Dataset has no length


def _weak(thing: Any) -> bool:
    return hasattr(type(thing), "__weakref__")


def _sampler(rec: Recorder, sampler: Any, here: Here) -> Ref | None:
    return rec.objects.known(sampler, "sampler", here.place).ref if sampler is not None and _weak(sampler) else None


def _making_sampler(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if rec.hears and rec.objects.find(self) is None:
            with rec.safe:
                rec.made(
                    self,
                    "sampler",
                    rec.here(),
                    distributed=True,
                    shuffle=bool(self.shuffle),
                    drop_last=bool(self.drop_last),
                    replicas=self.num_replicas,
                    rank=self.rank,
                    seed=self.seed,
                    **{"class": type(self).__name__},
                )

    return __init__


def _telling(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def set_epoch(self: Any, epoch: int) -> None:
        if rec.notes:
            with rec.safe:
                here = rec.here()
                rec.say(SetEpoch, here, target=rec.objects.known(self, "sampler", here.place).ref, value=epoch)
        original(self, epoch)

    return set_epoch


def _say_moved(rec: Recorder, here: Here, loader: Known, sampler: Any) -> None:
    """A sampler whose epoch is another than at the last pass was told it, however that was done."""
    if not isinstance(sampler, DistributedSampler):
        return
    before, loader.facts["epoch"] = loader.facts.get("epoch"), sampler.epoch
    if before is not None and before != sampler.epoch:
        rec.say(SetEpoch, here, target=rec.objects.known(sampler, "sampler", here.place).ref, value=sampler.epoch)


def _beginning(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __iter__(self: DataLoader[Any]) -> Any:  # noqa: N807
        if not rec.hears:
            return original(self)
        known = None
        rec.turns()
        with rec.safe:
            here = rec.here(Moment.BEGIN)
            known = rec.objects.known(self, "loader", here.place)
            index = known.facts["passes"] = known.facts.get("passes", -1) + 1
            known.facts["micro"] = 0
            if not rec.resting:
                _say_moved(rec, here, known, self.sampler)
                rec.say(EpochBegin, here, loader=known.ref, index=index, function=here.function)
        iterator = original(self)
        iterator._halfstep = known
        return iterator

    return __iter__


def _fetching(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807
        known: Known | None = getattr(self, "_halfstep", None)
        if known is None or not rec.hears:
            return original(self)
        begun = time.perf_counter()
        try:
            batch = original(self)
        except StopIteration:
            with rec.safe:
                if not rec.resting:
                    rec.say(EpochEnd, rec.here(Moment.END), loader=known.ref, index=known.facts["passes"])
            raise
        with rec.safe:
            wait = time.perf_counter() - begun
            if not rec.resting:
                rec.say(Fetch, rec.here(Moment.FETCH), loader=known.ref, micro_batch=known.facts["micro"], wait_s=wait)
            known.facts["micro"] += 1
            for listener in rec.listeners:
                listener.batch_fetched(batch)
        return batch

    return __next__


# --- checkpoints ---


def _saving(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if rec.hears and not rec.quiet:
            with rec.safe:
                rec.say(Save, rec.here(), {"file": str(f)}, states=states_in(obj))
        return original(obj, f, *args, **kwargs)

    return save


def states_in(value: Any, depth: int = 0) -> frozenset[str]:
    """The kinds of object whose state a value holds, told by the keys of their states; `?` when that cannot be told."""
    if isinstance(value, dict):
        keys = set(value)
        if keys >= {"state", "param_groups"}:
            return frozenset({"optimizer"})
        if keys >= {"scale", "growth_factor"}:
            return frozenset({"scaler"})
        if "last_epoch" in keys:
            return frozenset({"scheduler"})
        if value and all(isinstance(v, torch.Tensor) for v in value.values()):
            return frozenset({"model"})
        return frozenset().union(*(states_in(v, depth + 1) for v in value.values())) if depth < 4 else frozenset()
    if isinstance(value, (list, tuple)) and depth < 4:
        return frozenset().union(*(states_in(v, depth + 1) for v in value))
    plain = value is None or isinstance(value, (int, float, str, bytes, torch.Tensor))
    return frozenset() if plain or type(value).__module__ in ("numpy", "builtins") else frozenset({"?"})


def _loading(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if rec.hears and not rec.quiet:
            with rec.safe:
                rec.say(Load, rec.here(), target=None, map_location=map_location is not None)
        return original(f, map_location, *args, **kwargs)

    return load


# --- seeds and memory ---


def _seeding(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def manual_seed(seed: Any) -> Any:
        if rec.hears:
            with rec.safe:
                rec.say(Seed, rec.here(), {"value": int(seed)}, constant=False)
        return original(seed)

    return manual_seed


def _flushing(original: Callable[..., Any], rec: Recorder) -> Callable[..., Any]:
    def empty_cache() -> None:
        if rec.hears:
            with rec.safe:
                rec.say(MemoryFlush, rec.here(), kind="torch.cuda.empty_cache")
        original()

    return empty_cache
