"""Hangs probes into the loops that the recorder hears: a set of its own for each pair of a model and its optimizer."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import dataloader as torch_dataloader

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Finding
from halfstep.record.objects import Known
from halfstep.record.patches import Patches
from halfstep.record.probes.budget import Budget
from halfstep.record.probes.dtypes import Dtypes
from halfstep.record.probes.evidence import Replay
from halfstep.record.probes.numbers import Numbers
from halfstep.record.probes.probe import Probe
from halfstep.record.probes.sizes import Sizes
from halfstep.record.probes.speed import Speed
from halfstep.record.recorder import Listener, Recorder
from halfstep.record.samples import Samples
from halfstep.report.parts import AnyPart, Table

MOST_PAIRS = 8
MOST_PAIRS_EVER = 32
MOST_WAITING = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the probes are asked to do.

    Attributes:
        evidence: the folder for bad batches; None saves none.
        profile: whether to find out where the time of an update goes.
        script: the command that the script was started by, kept with a bad batch.
        replay: a saved bad batch to be run again instead of the script's training.
    """

    evidence: Path | None = None
    profile: bool = False
    script: tuple[str, ...] = ()
    replay: Path | None = None

    def probes(self, rank: int) -> list[Probe]:
        """A set of probes for one pair."""
        if self.replay is not None:
            return [Replay(self.replay)]
        numbers = Numbers(rank=rank, evidence=self.evidence, script=self.script)
        if not self.profile:
            return [numbers, Sizes(), Dtypes()]
        speed = Speed()
        return [speed, numbers, Sizes(budget=Budget(closed=lambda: speed.profiling)), Dtypes()]


@dataclass(slots=True)
class Pair:
    """A model, the optimizer that trains it, and the probes that look at both. It keeps neither of them alive."""

    number: int
    model: weakref.ref[nn.Module]
    optimizer: weakref.ref[torch.optim.Optimizer]
    name: str
    """The model's class."""
    probes: list[Probe]
    updates: int = 0

    @property
    def is_gone(self) -> bool:
        """Whether the script has let go of one of both."""
        return self.model() is None or self.optimizer() is None

    def titled(self, part: AnyPart) -> AnyPart:
        """Parts of a second model say whose they are."""
        return replace(part, title=f"{part.title}, {self.name} ({self.number + 1})") if self.number else part


@dataclass
class Probing(Listener):
    """Drives the probes by what the recorder hears."""

    recorder: Recorder
    asked: Asked = field(default_factory=Asked)
    rank: int = 0
    pairs: list[Pair] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)
    gone: list[dict[str, Any]] = field(default_factory=list)
    """What was told of pairs that the script has let go of."""
    final: dict[str, Any] | None = None
    """What was told when the probes were taken out."""

    def install(self, patches: Patches) -> None:
        """Hear which samples a loader hands out."""
        iterator = torch_dataloader._BaseDataLoaderIter
        patches.wrap(iterator, "_next_index", self._choosing)
        patches.wrap(iterator, "__next__", self._handing_out)

    def joined_group(self, rank: int, size: int) -> None:
        """This process is a rank now."""
        self.rank = rank

    def forward_begins(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        """The first call of a model under gradients makes its pairs."""
        if self.final is not None or not torch.is_grad_enabled() or any(pair.model() is model for pair in self.pairs):
            return
        objects = self.recorder.objects
        for owner in dict.fromkeys(owner for p in model.parameters() for owner in objects.owners(p)):
            optimizer = objects.thing(owner)
            if isinstance(optimizer, torch.optim.Optimizer):
                self._let_go()
                self._pair(model, optimizer)

    def _pair(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        number = len(self.pairs) + len(self.gone)
        if len(self.pairs) >= MOST_PAIRS or number >= MOST_PAIRS_EVER:
            return
        name = type(model).__name__
        pair = Pair(number, weakref.ref(model), weakref.ref(optimizer), name, self.asked.probes(self.rank))
        self.pairs.append(pair)
        scalers = [scaler for scaler in self.recorder.objects.things("scaler") if scaler.is_enabled()]
        self._each([pair], lambda probe: probe.attach(model, optimizer, scalers[-1] if scalers else None))

    def _let_go(self) -> None:
        """Keep what was told of pairs that are gone, and leave their probes."""
        for pair in [pair for pair in self.pairs if pair.is_gone]:
            self._each([pair], lambda probe: probe.detach())
            self.gone.append(self._told(pair))
            self.pairs.remove(pair)

    def backward_begins(self, loss: torch.Tensor, place: Place | None) -> None:
        """A backward begins: of which model is for the probes to know."""
        self._each(self.pairs, lambda probe: probe.backward_begins(loss, place))

    def step_begins(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """A scaler may be made after the first forward, or anew for every step."""
        self._each([p for p in self.pairs if p.optimizer() is optimizer], lambda probe: probe.scaled_by(scaler))

    def update_ended(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """An update of one optimizer ended."""
        for pair in self.pairs:
            if pair.optimizer() is optimizer:
                self._each([pair], lambda probe, pair=pair: probe.update_ended(pair.updates))
                pair.updates += 1

    def told(self) -> dict[str, Any]:
        """What the probes found and measured until now, as data for another process."""
        if self.final is not None:
            return self.final
        told = [*self.gone, *map(self._told, self.pairs)]
        findings = [finding for of_pair in told for finding in of_pair["findings"]]
        parts = [part for of_pair in told for part in of_pair["parts"]]
        if self.failed:
            about = "The script is not at fault, and ran on without them."
            parts.append(
                Table(title="Probes that failed", about=about, columns=("probe", "error"), rows=tuple(self.failed.items()))
            )
        return {"findings": findings, "parts": parts}

    def _told(self, pair: Pair) -> dict[str, Any]:
        findings: list[Finding] = []
        parts: list[AnyPart] = []
        self._each([pair], lambda probe: findings.extend(probe.findings()))
        self._each([pair], lambda probe: parts.extend(map(pair.titled, probe.measurements())))
        return {"findings": findings, "parts": parts}

    def left_group(self) -> None:
        """The process group ends: a DDP wrapper that outlives it can abort the process, so none is held any more."""
        self.stop()

    def stop(self) -> None:
        """Take all probes out, and let go of the models."""
        self._each(self.pairs, lambda probe: probe.detach())
        self.final = self.told()
        self.pairs.clear()

    def _each(self, pairs: Sequence[Pair], call: Callable[..., object]) -> None:
        """Call every probe that has not failed. What a probe raises is no fault of the script's, which must not see it."""
        for pair in pairs:
            for probe in pair.probes:
                name = type(probe).__name__
                if not probe.failure:
                    probe.safely(call)(probe)
                if probe.failure:
                    self.failed.setdefault(name, probe.failure)

    def _fetched(self, iterator: Any, indices: Sequence[int] | None) -> None:
        """A loader that is known handed out these samples, or its pass has ended."""
        known: Known | None = vars(iterator).get("_halfstep")
        if known is None or not self.recorder.hears:
            return
        with self.recorder.safe:
            loader = known.thing()
            if loader is not None:
                self.samples.handed_out(loader, known.ref.place, indices)

    def _choosing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _next_index(iterator: Any) -> Any:
            chosen = original(iterator)
            waiting = vars(iterator).setdefault("_halfstep_chosen", deque(maxlen=MOST_WAITING))
            waiting.append(chosen)
            return chosen

        return _next_index

    def _handing_out(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __next__(iterator: Any) -> Any:  # noqa: N807
            try:
                batch = original(iterator)
            except StopIteration:
                self._fetched(iterator, None)
                raise
            waiting = vars(iterator).get("_halfstep_chosen")
            chosen = waiting.popleft() if waiting else None
            indices = chosen if isinstance(chosen, (list, tuple)) and all(isinstance(i, int) for i in chosen) else None
            if indices is not None:
                self._fetched(iterator, indices)
            if self.recorder.hears:
                self._each(self.pairs, lambda probe: probe.batch_fetched(batch, indices))
            return batch

        return __next__
