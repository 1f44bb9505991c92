"""halfstep's column of the conformance table (`python -m benchmarks.conformance`), on one process."""

from __future__ import annotations

from functools import cache

import pytest
from benchmarks.conformance.judge import Answer
from benchmarks.conformance.scenarios import EQUAL, EQUAL_LOSS, SCENARIOS, Job, Scenario, jobs
from benchmarks.conformance.stacks import halfstep
from benchmarks.conformance.table import cell_of
from benchmarks.conformance.worker import answer


@cache
def answers() -> dict[Job, Answer]:
    return {job: answer(halfstep.run, job) for job in jobs(ranks=1)}


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.job.ranks == 1], ids=lambda scenario: scenario.name)
def test_halfstep_is_right_on_one_process(scenario: Scenario) -> None:
    assert str(cell_of(scenario, answers())) == "right"


def test_a_wrong_weight_is_told_with_its_figure() -> None:
    """Weights that have not moved are the whole way off."""
    scenario = next(s for s in SCENARIOS if s.job == EQUAL)
    assert str(cell_of(scenario, {EQUAL: answers()[EQUAL_LOSS]})) == "wrong: weights 100% of the way off"


def test_names_are_those_of_one_scenario_each() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(names) == len(set(names)) >= 40
