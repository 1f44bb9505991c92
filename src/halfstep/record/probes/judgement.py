"""What the bad updates of a run say together: a fault of each cause once, and what is no fault left unsaid.

A loss scale looks for its height by overflowing: skipped updates whose scaled gradients alone left FP16's range are its normal
work, and only their number or their end is a finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Finding
from halfstep.record.probes.cause import Cause, beyond_the_scale, cause_of
from halfstep.record.probes.origin import Origin, Phase
from halfstep.record.probes.telling import finding
from halfstep.rules.measured import numbers as cards

COLLAPSED_AFTER = 5
"""So many skips in a row for another cause than the scale are a collapse."""
LOWEST_SCALE = 1.0
NOWHERE = (Phase.UNKNOWN, Phase.ELSEWHERE)
SETTLED_AFTER = 200
MOST_SKIPPED_SHARE = 0.02
"""Of settled updates; a healthy scale overflows about once in 2000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """An update whose gradients were not finite.

    Attributes:
        update: its index.
        scale: the loss scale; None without a scaler.
        skipped: whether the scaler kept the step from being taken.
        origin: where it began; None where this update was not searched.
        norms: the finite gradient norms before it.
        saved: where its micro-batch was saved, in words.
    """

    update: int
    scale: float | None
    skipped: bool
    origin: Origin | None
    norms: tuple[float, ...]
    saved: str = ""


@dataclass(slots=True)
class Counts:
    """What is counted over all updates."""

    updates: int = 0
    skipped_late: int = 0
    """Skipped updates after the scale should have settled."""
    skipped_in_a_row: int = 0
    """Skipped updates since the last that was applied."""

    def add(self, *, skipped: bool) -> None:
        """Count one update."""
        self.skipped_late += skipped and self.updates >= SETTLED_AFTER
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.updates += 1


def findings_of(bad: Sequence[Bad], counts: Counts, *, scale: float | None, rank: int, place: Place | None) -> list[Finding]:
    """The findings of a run.

    Args:
        bad: the updates whose gradients were not finite.
        counts: what was counted over all updates.
        scale: the loss scale now; None without a scaler.
        rank: of this process.
        place: a line for what has no line of its own: where the model was called first.
    """
    told = _faults(bad, rank, place)
    collapse = _collapse(bad, counts, scale, place)
    if collapse is not None:
        constants = [fault for fault in told if fault.rule.startswith("amp-")]
        return constants or [collapse]
    falling = _falling(counts, scale, place)
    return told + ([falling] if falling is not None else [])


def _faults(bad: Sequence[Bad], rank: int, place: Place | None) -> list[Finding]:
    """The first update of each cause. After a bad step was taken, what follows is its consequence."""
    found: dict[str, Finding] = {}
    for item in bad:
        origin = item.origin
        if origin is not None and origin.phase is not Phase.ELSEWHERE and not (item.skipped and beyond_the_scale(origin)):
            cause = cause_of(origin, scale=item.scale, norms=item.norms)
            found.setdefault(cause.card.name, finding(cause.card, origin.place or place, _message(item, cause, rank)))
        if not item.skipped:
            break
    return list(found.values())


def _collapse(bad: Sequence[Bad], counts: Counts, scale: float | None, place: Place | None) -> Finding | None:
    in_a_row = counts.skipped_in_a_row
    row = [item for item in bad if item.skipped and item.update >= counts.updates - in_a_row]
    searched = [item for item in row if item.origin is not None and item.origin.phase not in NOWHERE]
    other = [item for item in searched if item.origin is not None and not beyond_the_scale(item.origin)]
    dead = scale is not None and scale < LOWEST_SCALE and in_a_row > 0
    if scale is None or not ((in_a_row >= COLLAPSED_AFTER and other) or dead):
        return None
    message = f"the last {in_a_row} updates were skipped in a row and the loss scale fell to {scale:g}"
    if not other or other[-1].origin is None:
        return finding(cards.SCALE_COLLAPSE, place, message)
    origin, saved = other[-1].origin, f"; {other[-1].saved}" if other[-1].saved else ""
    because = cause_of(origin, scale=other[-1].scale, norms=other[-1].norms).because
    message += f"; {_where(origin)} is not finite, which no loss scale cures: {because}{saved}"
    return finding(cards.SCALE_COLLAPSE, origin.place or place, message)


def _falling(counts: Counts, scale: float | None, place: Place | None) -> Finding | None:
    settled = counts.updates - SETTLED_AFTER
    if scale is None or settled < SETTLED_AFTER or counts.skipped_late / settled <= MOST_SKIPPED_SHARE:
        return None
    share = f"{counts.skipped_late / settled:.1%} of the updates after the first {SETTLED_AFTER} were skipped"
    return finding(cards.SCALE_FALLING, place, f"{share}, limit {MOST_SKIPPED_SHARE:.0%}; the loss scale is {scale:g}")


def _message(item: Bad, cause: Cause, rank: int) -> str:
    assert item.origin is not None
    samples = f" (samples {', '.join(map(str, item.origin.sample_ids[:8]))})" if item.origin.sample_ids else ""
    on = f"update {item.update}, micro-batch {item.origin.micro_batch}{samples}, rank {rank}"
    ending = "skipped by the scaler" if item.skipped else "the step was taken with it"
    saved = f"; {item.saved}" if item.saved else ""
    return f"{_where(item.origin)} is the first value that is not finite: {cause.because}; {on}, {ending}{saved}"


def sentence(origin: Origin) -> str:
    """Where a value stopped to be finite, and why, as far as one run of its micro-batch tells."""
    if origin.phase in NOWHERE:
        return f"nothing that is not finite was found: {origin.detail}"
    because = cause_of(origin, scale=None, norms=()).because
    return f"{_where(origin)} is the first value that is not finite: {because}"


def _where(origin: Origin) -> str:
    """A place in the model, in words."""
    module = f"`{origin.module}`" if origin.module else "the model"
    if origin.phase is Phase.UNKNOWN:
        return "a gradient"
    if origin.phase is Phase.LOSS:
        return f"the loss{f' ({origin.op})' if origin.op else ''}"
    if origin.phase is Phase.DATA:
        return f"the batch that {module} takes"
    if origin.phase is Phase.WEIGHTS:
        return f"the weight {origin.detail}"
    return f"the {origin.phase.value} of {module} (`{origin.op}`)"
