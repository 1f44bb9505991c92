"""Hears a run: what the hooks tell it becomes events on the tape, with the state that several of them share."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from halfstep.events.vocabulary import Event, Made, Place, Ref, Region, ZeroGrad
from halfstep.record.objects import Known, Objects
from halfstep.record.places import Here, Moment, Places
from halfstep.record.probes.rerun import RERUNNING
from halfstep.record.tape import Draft, Tape

STRETCH = 64
"""Updates heard together, once the start of the run was heard."""
REST = 1024
"""Updates between two stretches, unless an epoch begins or a mode changes."""


@dataclass(slots=True)
class Pass:
    """The latest forward pass of a model."""

    regions: list[Region]
    training: bool
    in_no_sync: bool
    here: Here
    bypass: bool = False


class Safe:
    """Around all that the recorder does of its own: its faults end the recording, never the script."""

    __slots__ = ("rec",)

    def __init__(self, rec: Recorder) -> None:
        self.rec = rec

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self.rec.on = False
        self.rec.fault = f"the recording ended early: {type(error).__name__}: {error}"
        return True


class Listener:
    """Is told of the moments of a run while they happen. Silent by default."""

    def forward_begins(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        """The outermost call of a model begins."""

    def batch_fetched(self, batch: Any) -> None:
        """A loader handed out a micro-batch."""

    def backward_begins(self, loss: torch.Tensor, place: Place | None) -> None:
        """A backward pass begins."""

    def step_begins(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """A scaler is about to step an optimizer, or to skip the step."""

    def update_ended(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """An optimizer has stepped, or, with a scaler, the scaler was updated after that."""

    def collective_begins(self, kind: str, tensors: tuple[torch.Tensor, ...], place: Place | None) -> None:
        """The script calls a collective over all ranks, with these tensors."""

    def joined_group(self, rank: int, size: int) -> None:
        """This process is a rank now."""

    def left_group(self) -> None:
        """The process group is about to end."""


@dataclass
class Recorder:
    """What all hooks share. Only the thread that started it is heard."""

    tape: Tape = field(default_factory=Tape)
    places: Places = field(default_factory=Places)
    objects: Objects = field(default_factory=Objects)
    on: bool = True
    fault: str = ""
    """Why the recording ended before the script."""
    unheard: dict[str, str] = field(default_factory=dict)
    """Scripts that were started as programs of their own, and by what command."""
    inside: bool = False
    """A model runs: what it calls is part of its forward pass."""
    regions: list[Region] = field(default_factory=list)
    passes: dict[Ref, Pass] = field(default_factory=dict)
    current: Pass | None = None
    stepping: Ref | None = None
    """The scaler through which an optimizer steps now."""
    scale_read: float = math.inf
    """The loss scale that the script has last asked for; infinite where it never has."""
    quiet: int = 0
    """Depth of library calls whose inner calls are part of them."""
    updates: int = 0
    resting: bool = False
    """The start of the run was heard whole: of what follows, stretches are heard, and this is not one of them."""
    since: int = 0
    """Updates since the stretch, or the rest, began."""
    listeners: list[Listener] = field(default_factory=list)
    ddp: dict[Ref, weakref.ref[Any]] = field(default_factory=dict)
    """DDP wrappers."""
    half_models: set[Ref] = field(default_factory=set)
    """Models whose parameters are stored in FP16."""
    replaced: list[tuple[Draft, weakref.ref[nn.Module]]] = field(default_factory=list)
    """Modules that were put into a model since the last step, and what was said of each."""
    filled: set[Ref] = field(default_factory=set)
    """Optimizers whose parameters got gradients since they were last cleared."""
    written: dict[Ref, tuple[weakref.ref[torch.Tensor], tuple[int, int]]] = field(default_factory=dict)
    """Of each optimizer a parameter, and which gradient the last backward left there, written how often."""
    stepped_by_scaler: list[torch.optim.Optimizer] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    _thread: int = field(default_factory=threading.get_ident)

    def __post_init__(self) -> None:
        self.safe = Safe(self)

    @property
    def hears(self) -> bool:
        """Whether events of this moment and thread count."""
        return self.on and threading.get_ident() == self._thread and not RERUNNING.get()

    @property
    def notes(self) -> bool:
        """Whether events of this moment go on the tape."""
        return not self.resting and self.hears

    def here(self, moment: Moment = Moment.PLAIN, depth: int = 3) -> Here:
        """Where the caller of a hook is."""
        return self.places.here(depth, moment)

    def say(self, kind: type[Event], here: Here, extra: dict[str, Any] | None = None, /, **fields: Any) -> Draft:
        """Put an event on the tape."""
        return self.tape.add(kind, here, fields, extra)

    def made(self, thing: Any, kind: str, here: Here, /, **facts: Any) -> Known:
        """Meet an object where it is made, and say so."""
        known = self.objects.new(thing, kind, here.place)
        known.facts.update(facts)
        self.say(Made, here, what=known.ref, facts=known.facts)
        return known

    def cleared(self, here: Here, optimizers: tuple[Ref, ...]) -> None:
        """The gradients of optimizers are cleared."""
        self.filled.difference_update(optimizers)
        self.rewritten(optimizers)
        self.say(ZeroGrad, here, optimizers=optimizers)

    def rewritten(self, optimizers: Iterable[Ref]) -> None:
        """The gradients of optimizers are written over by a function that is heard."""
        for optimizer in optimizers:
            self.written.pop(optimizer, None)

    def region(self) -> Region | None:
        """The autocast region that is open and enabled."""
        return self.regions[-1] if self.regions and self.regions[-1].enabled else None

    def taken_in(self, optimizer: Ref, parameters: Iterable[torch.Tensor]) -> None:
        """An optimizer is about to step these: a module that it was given after it was put into a model is trained."""
        held = set(map(id, parameters))
        for draft, module in self.replaced:
            new = module()
            if new is not None and any(id(p) in held for p in new.parameters()):
                draft.fields["optimizers"] = ()
        self.replaced = [
            (d, module) for d, module in self.replaced if d.fields["optimizers"] and optimizer not in d.fields["optimizers"]
        ]

    def number(self, what: str) -> int:
        """The next number of a kind."""
        self.counts[what] = self.counts.get(what, 0) + 1
        return self.counts[what]

    def stepped(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """An optimizer has stepped; with a scaler, its update ends when the scaler is updated."""
        if scaler is None:
            self._ended(optimizer, None)
        elif optimizer not in self.stepped_by_scaler:
            self.stepped_by_scaler.append(optimizer)

    def scaler_updated(self, scaler: Any) -> None:
        """The updates of the optimizers that stepped through a scaler end."""
        waiting, self.stepped_by_scaler = self.stepped_by_scaler, []
        for optimizer in waiting:
            self._ended(optimizer, scaler)

    def _ended(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        self.updates += 1
        self.since += 1
        if self.resting:
            self._wake(REST)
        elif self.tape.is_late and self.since >= STRETCH:
            self.resting, self.since = True, 0
        for listener in self.listeners:
            listener.update_ended(optimizer, scaler)

    def turns(self) -> None:
        """An epoch begins or a mode changes: worth hearing, if the last stretch is a while ago."""
        if self.resting:
            self._wake(3 * STRETCH)

    def _wake(self, after: int) -> None:
        if self.since >= after:
            self.resting, self.since = False, 0
            self.tape.begin_stretch()

    def optimizer(self, optimizer: torch.optim.Optimizer, here: Here) -> Known:
        """An optimizer, with its parameters if it is met only now."""
        known = self.objects.find(optimizer)
        if known is None:
            known = self.objects.known(optimizer, "optimizer", here.place)
            known.facts["class"] = type(optimizer).__name__
            self.met(known, optimizer)
        return known

    def met(self, known: Known, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is new: note what it holds."""
        self.objects.own(known.ref, (p for group in optimizer.param_groups for p in group["params"]))
