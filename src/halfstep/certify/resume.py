"""A run that is killed and goes on, against one that was never stopped."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from halfstep.certify.certificate import Line, Topic
from halfstep.certify.exact import Exact
from halfstep.certify.others import Task, run_alone, run_ranks
from halfstep.certify.stillness import still
from halfstep.certify.subject import Parts, Subject, seed_all
from halfstep.checkpoint import Checkpoints
from halfstep.distributed import world
from halfstep.engine import Engine
from halfstep.errors import UsageError

UPDATES = 3
"""Updates before the kill, and again after it; an epoch has two windows, so that the kill falls in the midst of one."""
SAVED, ENDED, MOVED, REFUSED = "killed", "ended.pt", "moved", "refused.txt"


class _Batches(Dataset[Any]):
    """The micro-batches, each as one sample, so that a loader can draw them in an order of its own."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = [*batches, *batches]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def resume_lines(subject: Subject, parts: Parts, stilled: Parts, right: Exact, folder: Path) -> Iterator[Line]:
    """The claims about resuming: of the parts as they are, and over ranks of those whose result does not depend on divisions."""
    yield _killed(subject, parts, folder)
    yield _moved(subject, stilled, right, folder)


def _killed(subject: Subject, parts: Parts, folder: Path) -> Line:
    claim = f"killed after {UPDATES} of {2 * UPDATES} updates and continued in another process: bitwise the uninterrupted run"
    code, words = run_alone(Task(part="begin", subject=subject, folder=str(folder)))
    if code != -signal.SIGKILL:
        return _failed(claim, f"the run that was to be killed ended by itself, with exit code {code}: {words}")
    code, words = run_alone(Task(part="go-on", subject=subject, folder=str(folder)))
    if code != 0:
        return _failed(claim, f"the continued run ended with exit code {code}: {words}")
    engine = _engine(parts)
    losses = [update.loss for update in engine.updates(_loader(parts), epochs=None, max_updates=2 * UPDATES)]
    ended = torch.load(folder / ENDED, weights_only=True)
    different = _different(_everything(engine), ended["state"])
    same_losses = losses[UPDATES:] == ended["losses"]
    return Line(
        topic=Topic.RESUME,
        claim=claim,
        holds=not different and same_losses,
        figure=f"{len(ended['state'])} tensors compared; "
        + (f"the first that differs is {different[0]}" if different else "all equal")
        + ("" if same_losses else f"; losses {ended['losses']} against {losses[UPDATES:]}"),
        tolerance="bitwise; dropout, if any, was on",
    )


def _failed(claim: str, figure: str) -> Line:
    return Line(topic=Topic.RESUME, claim=claim, holds=False, figure=figure)


def begin(subject: Subject, folder: Path) -> None:
    """Train, save, and be killed."""
    parts = subject.make()
    engine = _engine(parts)
    for _ in engine.updates(_loader(parts), epochs=None, max_updates=UPDATES):
        pass
    with Checkpoints(folder / SAVED) as checkpoints:
        checkpoints.save(engine, wait=True)
        os.kill(os.getpid(), signal.SIGKILL)


def go_on(subject: Subject, folder: Path) -> None:
    """Continue what was killed."""
    parts = subject.make()
    engine = _engine(parts)
    with Checkpoints(folder / SAVED) as checkpoints:
        checkpoints.load(engine)
    losses = [update.loss for update in engine.updates(_loader(parts), epochs=None, max_updates=2 * UPDATES)]
    torch.save({"state": _everything(engine), "losses": losses}, folder / ENDED)


def _moved(subject: Subject, parts: Parts, right: Exact, folder: Path) -> Line:
    claim = f"{UPDATES} updates on two ranks, saved, and continued on one: the parameters of one process"
    failed = run_ranks(Task(part="two-ranks", subject=subject, folder=str(folder)), 2)
    if failed:
        return _failed(claim, failed)
    if (folder / REFUSED).exists():
        return Line(topic=Topic.RESUME, claim=claim, holds=None, note=(folder / REFUSED).read_text(encoding="utf-8"))
    start = nn.utils.parameters_to_vector(parts.model.parameters()).detach().clone()
    alone, continued = _steady(parts), _steady(parts)
    for _ in range(2 * UPDATES):
        alone.update(list(parts.batches))
    with Checkpoints(folder / MOVED) as checkpoints:
        checkpoints.load(continued)
    for _ in range(UPDATES):
        continued.update(list(parts.batches))
    return _compared(claim, right, start, alone, continued)


def _compared(claim: str, right: Exact, start: torch.Tensor, alone: Engine, continued: Engine) -> Line:
    ended, other = (nn.utils.parameters_to_vector(engine.module.parameters()).detach() for engine in (alone, continued))
    way = float((ended - start).norm())
    apart, last_place = float((ended - other).norm()) / way, torch.finfo(ended.dtype).eps * float(ended.norm()) / way
    allowed = 2 * UPDATES * right.tolerance + last_place
    return Line(
        topic=Topic.RESUME,
        claim=claim,
        holds=apart <= allowed,
        figure=f"{apart:.1e} of the way that the parameters went",
        tolerance=f"{allowed:.1e}: {2 * UPDATES} updates of {right.tolerance:.1e} each, and the parameters' last place, "
        f"{last_place:.1e} of the way",
    )


def two_ranks(subject: Subject, folder: Path) -> None:
    """What each of two ranks does before the run goes on alone."""
    parts, _ = still(subject.make())
    rank = world().rank
    try:
        engine = _steady(parts)
    except UsageError as error:
        (folder / REFUSED).write_text(str(error), encoding="utf-8")
        return
    for _ in range(UPDATES):
        engine.update(list(parts.batches[rank::2]))
    with Checkpoints(folder / MOVED) as checkpoints:
        checkpoints.save(engine, wait=True)


def _engine(parts: Parts) -> Engine:
    """Trains by Adam, whose state is the richest."""
    optimizer = torch.optim.AdamW([p for p in parts.model.parameters() if p.requires_grad], lr=1e-4)
    return _trains(parts, optimizer)


def _steady(parts: Parts) -> Engine:
    """Trains by momentum, which hands rounding on as it is; Adam's division makes it larger where a gradient is small."""
    parts = replace(parts, model=copy.deepcopy(parts.model))
    optimizer = torch.optim.SGD([p for p in parts.model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9)
    return _trains(parts, optimizer)


def _trains(parts: Parts, optimizer: torch.optim.Optimizer) -> Engine:
    ranks = world().size
    seed_all(0)
    return Engine(
        parts.model,
        optimizer,
        loss=parts.loss,
        scheduler=LambdaLR(optimizer, lambda applied: 1.0 / (1 + applied)),
        precision="fp32",
        accumulate=max(1, len(parts.batches) // ranks),
        clip_norm=1.0,
        sharding="none" if ranks == 1 else "ddp",
    )


def _loader(parts: Parts) -> DataLoader[Any]:
    return DataLoader(_Batches(parts.batches), batch_size=None, shuffle=True)


def _everything(engine: Engine) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer states, by name."""
    found = {name: tensor.detach().cpu().clone() for name, tensor in engine.module.state_dict().items()}
    names: dict[Any, str] = {parameter: name for name, parameter in engine.module.named_parameters()}
    for parameter, state in engine.optimizers[0].state.items():
        found |= {f"{names[parameter]}, {key}": torch.as_tensor(value).detach().cpu().clone() for key, value in state.items()}
    return found


def _different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not bitwise equal; those that only one has among them."""
    return [name for name in {**one, **other} if name not in one or name not in other or not torch.equal(one[name], other[name])]
