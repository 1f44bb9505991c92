"""Rule HS414: sched-args-swapped."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS414",
    name="sched-args-swapped",
    severity=Severity.ERROR,
    what="Warm-up and total steps are passed in each other's place.",
    why="The rate rises during the whole run, or the schedule is over after the warm-up.",
    example="""\
def schedule(optimizer, num_warmup_steps, num_training_steps): ...


def configure(optimizer, total_steps, warmup_steps):
    return schedule(optimizer, total_steps, warmup_steps)
""",
    instead="""\
def schedule(optimizer, num_warmup_steps, num_training_steps): ...


def configure(optimizer, total_steps, warmup_steps):
    return schedule(optimizer, warmup_steps, total_steps)
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Positional arguments whose names are those of the neighbouring parameters."""
    for fact in story.told("swapped arguments"):
        yield Found(
            fact.place,
            f"{fact.detail} are passed in each other's place: pass them by keyword",
            FixRequest("exchange", fact.place, fact.detail),
        )
