"""halfstep's column of the conformance table (`python -m benchmarks.conformance`), on two ranks."""

from __future__ import annotations

from benchmarks.conformance.judge import Answer
from benchmarks.conformance.scenarios import SCENARIOS, jobs
from benchmarks.conformance.stacks import halfstep
from benchmarks.conformance.table import cell_of, of_all_ranks
from benchmarks.conformance.worker import answer

from distributed.conftest import Both


def all_answers() -> list[Answer]:
    return [answer(halfstep.run, job) for job in jobs(ranks=2)]


def test_halfstep_is_right_on_two_ranks(both: Both) -> None:
    answers = of_all_ranks(2, both(all_answers))
    cells = {scenario.name: str(cell_of(scenario, answers)) for scenario in SCENARIOS if scenario.job.ranks == 2}
    assert cells == dict.fromkeys(cells, "right")
