"""Problem 1, NaN: loss, gradient norm and loss scale of every update, and where the first value that is not finite was made.

Every update costs one read of the gradients, for their norm. Only when that is not finite is the update's micro-batch made
again with the weights of before the step, this time looking at every operation.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Finding
from halfstep.record.probes.cause import beyond_the_scale
from halfstep.record.probes.evidence import save
from halfstep.record.probes.history import Grid, History
from halfstep.record.probes.judgement import NOWHERE, Bad, Counts, findings_of
from halfstep.record.probes.keeping import Keeper
from halfstep.record.probes.layers import Layers, norms_of
from halfstep.record.probes.losses import Losses
from halfstep.record.probes.origin import Origin, Phase, find_origin
from halfstep.record.probes.probe import Probe
from halfstep.record.probes.rerun import Call, apart
from halfstep.record.probes.scale import scale_of
from halfstep.report.parts import AnyPart, Heat, Lines, Mark

MOST_SEARCHES = 6
MOST_KEPT = 100
SEARCH_AT = (1, 4, 16)
"""Which of a row of bad updates are searched: it may be another fault by then. So is the first whose loss is bad."""


class Numbers(Probe):
    """Loss, norms, scale; and the origin of what is not finite.

    Args:
        rank: the rank of this process, named in findings.
        evidence: the folder for bad batches; None to save none.
        script: the command that the script was started by, kept with a bad batch.
    """

    def __init__(self, *, rank: int = 0, evidence: Path | None = None, script: tuple[str, ...] = ()) -> None:
        self._rank, self._evidence, self._script = rank, evidence, script
        self._keeper, self._counts = Keeper(), Counts()
        self._bad_in_a_row = self._searches = 0
        self._loss, self._norm, self._scale = History(), History(), History()
        self._marks: list[Mark] = []
        self._bad: list[Bad] = []
        self._losses = Losses(self._keeper)
        self._scaler: torch.amp.GradScaler | None = None
        self._looked: list[float] | None = None
        self._origin: Origin | None = None
        self._is_bad = self._spoilt = self._loss_was_bad = False
        self._saved = ""
        self._hooks: list[Any] = []

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Hear forwards and steps."""
        self._model, self._layers = weakref.ref(model), Layers.of(model, optimizer)
        self._grid = Grid(self._layers.names)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scale_before = scale_of(self._scaler)
        self._keeper.attach(model, self.safely)
        self._hooks = [optimizer.register_step_pre_hook(self.safely(self._before_step))]

    def batch_fetched(self, batch: Any, sample_ids: Sequence[int] | None) -> None:
        """Remember the samples."""
        self._keeper.batch_fetched(sample_ids)

    def backward_begins(self, loss: Tensor, place: Place | None) -> None:
        """Remember the loss."""
        self._losses.begins(loss)

    def scaled_by(self, scaler: torch.amp.GradScaler) -> None:
        """Note a scaler that is new."""
        if scaler is not self._scaler:
            self._scaler, self._scale_before = scaler, scale_of(scaler)

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._look(getattr(optimizer, "grad_scale", None))

    def _look(self, scale: Tensor | None) -> None:
        """Read the gradients once, while the weights are still those that made them."""
        divisor = 1.0 if scale is None else float(scale)
        self._looked = [norm / divisor for norm in norms_of(self._layers)]
        loss_is_bad = not all(map(math.isfinite, self._losses.read()))
        self._is_bad = loss_is_bad or not all(map(math.isfinite, self._looked))
        self._bad_in_a_row = self._bad_in_a_row + 1 if self._is_bad else 0
        fresh = self._bad_in_a_row in SEARCH_AT or (loss_is_bad and not self._loss_was_bad)
        self._loss_was_bad = self._loss_was_bad or loss_is_bad
        if self._is_bad and fresh and self._searches < MOST_SEARCHES and not self._spoilt:
            self._search()

    def _search(self) -> None:
        self._searches += 1
        with apart():
            self._searched(self._keeper.calls)

    def _searched(self, calls: Sequence[Call]) -> None:
        model = self._model()
        if model is None:
            return
        try:
            origin = find_origin(model, calls, self._keeper.device)
        except (RuntimeError, NotImplementedError) as error:  # what the model raises when it is called once more
            origin = Origin(phase=Phase.UNKNOWN, detail=f"the micro-batch could not be run again ({error})")
        if origin.phase is Phase.LOSS:
            seen = self._losses.operation
            origin = replace(origin, op=seen.name, guarded=seen.guarded, in_fp16=seen.in_fp16)
        self._origin = origin
        harmless = origin.phase in NOWHERE or (self._scaler is not None and beyond_the_scale(origin))
        if self._evidence is not None and not harmless:
            name = f"update-{self._counts.updates}-rank-{self._rank}.pt"
            self._saved = save(self._evidence / name, model, calls[origin.micro_batch], origin, script=self._script)

    def update_ended(self, index: int) -> None:
        """Book the update. Where no step was heard, the scaler has skipped it and the gradients are still there."""
        scale = self._scale_before
        after = scale_of(self._scaler)
        if self._looked is None:
            self._look(None)
        skipped = scale is not None and after is not None and (after < scale or not all(map(math.isfinite, self._looked or [])))
        self._book(index, self._looked or [], scale, skipped=skipped)
        self._spoilt = self._spoilt or (self._is_bad and not skipped)
        self._scale_before, self._looked, self._origin, self._saved = after, None, None, ""
        self._losses.clear()
        self._keeper.clear()

    def _book(self, index: int, norms: list[float], scale: float | None, *, skipped: bool) -> None:
        if self._losses.read():
            self._loss.add(index, sum(self._losses.read()) / (scale or 1.0))
        if self._is_bad and len(self._bad) < MOST_KEPT:
            before = self._norm.before(index)
            bad = Bad(update=index, scale=scale, skipped=skipped, origin=self._origin, norms=tuple(before), saved=self._saved)
            self._bad.append(bad)
        self._norm.add(index, math.sqrt(sum(norm * norm for norm in norms)))
        self._grid.add(index, norms)
        if scale is not None:
            self._scale.add(index, scale)
        self._counts.add(skipped=skipped)
        if skipped and len(self._marks) < MOST_KEPT:
            self._marks.append(Mark(x=index, text="skipped update"))

    @property
    def first(self) -> Origin | None:
        """Where the first value that was not finite began; None where all were."""
        return next((item.origin for item in self._bad if item.origin is not None), None)

    def findings(self) -> list[Finding]:
        """One finding a cause."""
        place = self._keeper.first_place
        return findings_of(self._bad, self._counts, scale=self._scale_before, rank=self._rank, place=place)

    def measurements(self) -> list[AnyPart]:
        """Loss, gradient norm, scale, and the norm of every layer."""
        return [part for part in self._parts() if not isinstance(part, Lines) or any(s.points for s in part.series)]

    def _parts(self) -> list[AnyPart]:
        marks = tuple(self._marks)
        return [
            Lines(
                title="Loss",
                about="What backward began from, summed over an update, without the loss scale. It should fall.",
                series=(self._loss.series("loss"),),
                marks=marks,
            ),
            Lines(
                title="Loss scale",
                about="FP16 gradients are multiplied by it. It doubles after 2000 good updates and halves at each skip; "
                "a line that only falls means that something else than the scale is wrong.",
                series=(self._scale.series("scale"),),
                marks=marks,
                log=True,
            ),
            Lines(
                title="Gradient norm",
                about="The length of the whole gradient before the step, as the optimizer sees it. Spikes are updates that "
                "pull hard; a steady climb means a learning rate that is too high.",
                series=(self._norm.series("norm"),),
                marks=marks,
                log=True,
            ),
            self._heat(),
        ]

    def _heat(self) -> Heat:
        return self._grid.log_heat(
            title="Gradient norm per layer",
            about="Faint rows get hardly any gradient; a strong row that stands alone explodes. The colours are logarithmic.",
        )

    def detach(self) -> None:
        """Take out the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._keeper.detach()
