"""The search tries little, refuses what is not safe, and takes nothing that it did not run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from halfstep.bench.describing import Subject
from halfstep.bench.row import Row, Trial
from halfstep.config.load import load
from halfstep.config.options import Precision, Sharding
from halfstep.config.schema import validate
from halfstep.errors import ConfigError, DeviceError
from halfstep.tune.searching import Found, Memory, Search
from halfstep.tune.space import Space, doubling, space_of
from halfstep.tune.telling import choices_of, conclusion, config_text, to_dict, to_text

GB = 10**9
SIMPLEST = Row(precision=Precision.FP32, micro=1, accumulate=8, checkpoint=False, sharding=Sharding.NONE)


def subject(**values: object) -> Subject:
    usual = {
        "device": "cpu",
        "machine": "a machine",
        "parameters": 1000,
        "micro": 4,
        "accumulate": 2,
        "sequence": 64,
        "unit": "tokens",
        "conditions": {"sequence": "64 tokens"},
        "unavailable": {},
        "model_config": {},
        "recipe": {},
        "native": ["fp32", "bf16"],
    }
    return Subject(**{**usual, **values})


def space(settings: Mapping[str, object] | None = None, **values: object) -> Space:
    return space_of(validate(settings or {}), subject(**values))


class Machine:
    """Measures what `rate` and `size` say, and remembers what was run."""

    def __init__(self, rate: Callable[[Row], float], size: Callable[[Row], float] = lambda row: 1.0) -> None:
        self.rate, self.size = rate, size
        self.ran: list[Row] = []
        self.rounds: list[int] = []

    def measure(self, rows: Sequence[Row], rounds: int) -> dict[Row, list[Trial]]:
        self.ran += rows
        self.rounds.append(rounds)
        return {row: [self._trial(row, number) for number in range(rounds)] for row in rows}

    def _trial(self, row: Row, number: int) -> Trial:
        if self.size(row) > 10:
            return Trial(failed="does not fit: out of memory")
        wobble = 1 + 0.01 * ((number + row.compile) % 2)
        return Trial(seconds=(1.0,), weights=(self.rate(row) * wobble,), losses=(1.0,), allocated_bytes=int(self.size(row) * GB))


def searched(
    machine: Machine, where: Space, *, rounds: int = 3, predicted: Callable[[Row], int | None] = lambda row: None
) -> Found:
    return Search(where, Memory(at_hand_bytes=10 * GB, margin=0.1, predicted=predicted), machine.measure).run(rounds)


def by_micro(row: Row) -> float:
    """The larger the micro-batch the faster; BF16 twice as fast; recomputing a third slower; compiling no gain."""
    return 100 * row.micro * (2 if row.precision is Precision.BF16 else 1) * (0.75 if row.checkpoint else 1)


def test_the_fastest_is_found_and_only_what_was_run_is_taken() -> None:
    machine = Machine(by_micro)
    found = searched(machine, space())
    assert (found.winner.precision, found.winner.micro, found.winner.accumulate) == (Precision.BF16, 8, 1)
    assert not found.winner.compile
    assert {attempt.row for attempt in found.attempts} == set(machine.ran)
    assert found.winner in machine.ran


def test_doubling_ends_where_nothing_is_gained() -> None:
    machine = Machine(lambda row: 100.0 if row.micro > 1 else 80.0)
    found = searched(machine, space({"precision": "fp32", "model": {"compile": False}}))
    assert sorted({row.micro for row in machine.ran}) == [1, 2, 4]
    assert found.winner.micro == 2


def test_what_leaves_less_than_the_margin_is_not_taken_though_it_ran() -> None:
    machine = Machine(by_micro, size=lambda row: 2.3 * row.micro)  # 4 takes 9.2 of 10 GB
    found = searched(machine, space({"precision": "fp32", "model": {"compile": False, "checkpoint_activations": False}}))
    refused = {attempt.row.micro: attempt.refused for attempt in found.attempts}
    assert refused == {1: None, 2: None, 4: "not safe: 9.20 GB measured, which leaves less than 10% of 10.00 GB"}
    assert found.winner.micro == 2


def test_recomputing_is_tried_where_memory_was_short_and_only_there() -> None:
    short = Machine(by_micro, size=lambda row: row.micro * (1.0 if row.checkpoint else 4.0))
    found = searched(short, space({"precision": "fp32", "model": {"compile": False}}))
    assert (found.winner.micro, found.winner.checkpoint) == (8, True)
    ample = Machine(by_micro)
    searched(ample, space())
    assert not any(row.checkpoint for row in ample.ran)


def test_sharding_divides_where_nothing_else_is_safe() -> None:
    size = {Sharding.DDP: 20.0, Sharding.ZERO2: 5.0, Sharding.ZERO3: 3.0}
    machine = Machine(by_micro, size=lambda row: size[row.sharding or Sharding.NONE])
    found = searched(machine, space(processes=2))
    assert (found.winner.sharding, found.winner.processes) == (Sharding.ZERO2, 2)
    assert not any(row.sharding is Sharding.ZERO3 for row in machine.ran)


def test_what_is_predicted_far_beyond_the_memory_is_not_run() -> None:
    machine = Machine(by_micro)
    found = searched(machine, space(), predicted=lambda row: row.micro * 4 * GB)
    assert {row.micro for row in machine.ran} == {1, 2}
    unseen = [attempt.refused for attempt in found.attempts if attempt.row.micro == 4 and not attempt.row.checkpoint]
    assert set(unseen) == {"does not fit: 16.00 GB predicted, 10.00 GB at hand; not run"}


def test_nothing_that_is_safe_is_an_error_with_the_last_reason() -> None:
    with pytest.raises(DeviceError) as caught:
        searched(Machine(by_micro, size=lambda row: 99.0), space())
    told = "No way to make this update is safe here: fp32, 1 x 8, checkpointed does not fit: out of memory."
    assert str(caught.value) == told


def test_the_reason_that_is_told_is_memory_where_a_last_way_cannot_be_run_at_all() -> None:
    machine = Machine(by_micro, size=lambda row: 99.0)

    def measure(rows: Sequence[Row], rounds: int) -> dict[Row, list[Trial]]:
        if rows[0].sharding is Sharding.ZERO3:
            raise ConfigError("It has no blocks.")
        return machine.measure(rows, rounds)

    memory = Memory(at_hand_bytes=None, margin=0.1, predicted=lambda row: None)
    with pytest.raises(DeviceError) as caught:
        Search(space({"batch": {"micro": 4}}, processes=2), memory, measure).run(3)
    assert str(caught.value) == (
        "No way to make this update is safe here: fp32, 4 x 2 x 2 ranks, zero2, checkpointed does not fit: out of memory."
    )


def test_between_equals_the_simpler_is_taken() -> None:
    machine = Machine(lambda row: 100.0 + 0.1 * row.compile)
    found = searched(machine, space({"precision": "fp32", "batch": {"micro": 8}}))
    assert not found.winner.compile
    assert found.because.startswith("no difference beyond the spread from fp32, 8 x 1, compiled: the simpler is taken")


def test_one_round_takes_the_trials_of_the_search_and_claims_nothing() -> None:
    machine = Machine(by_micro)
    found = searched(machine, space({"precision": "fp32", "model": {"compile": False}}), rounds=1)
    assert machine.rounds == [1] * len(machine.ran)
    assert len(machine.ran) == len(set(machine.ran))
    assert found.because.startswith("the fastest, though 1 of 3 rounds do not tell a gain from noise: fp32, 4 x 2 reaches 0.500")


def test_a_way_that_cannot_be_run_is_told_and_the_search_goes_on() -> None:
    machine = Machine(by_micro)

    def measure(rows: Sequence[Row], rounds: int) -> dict[Row, list[Trial]]:
        if any(row.compile for row in rows):
            raise ConfigError("There is no compiler.")
        return machine.measure(rows, rounds)

    found = Search(space(), Memory(at_hand_bytes=None, margin=0.1, predicted=lambda row: None), measure).run(3)
    assert [a.refused for a in found.attempts if a.row.compile] == ["cannot be run: There is no compiler."]


def test_a_configuration_that_cannot_be_run_at_all_is_an_error() -> None:
    def measure(rows: Sequence[Row], rounds: int) -> dict[Row, list[Trial]]:
        raise ConfigError("The data are gone.")

    with pytest.raises(ConfigError, match=r"^The data are gone\.$"):
        Search(space(), Memory(at_hand_bytes=None, margin=0.1, predicted=lambda row: None), measure).run(3)


def test_what_the_configuration_says_stays() -> None:
    where = space({"precision": "bf16", "batch": {"micro": 2}})
    assert (where.precisions, where.micros, where.start) == ((Precision.BF16,), (2,), 2)
    assert where.settled["precision"] == 'the configuration says so; "auto" leaves it to the search'
    assert space({"precision": "auto"}).precisions == (Precision.FP32, Precision.BF16)


@pytest.mark.parametrize(("share", "sizes"), [(1, (1,)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 12)), (15, (1, 3, 15)), (7, (1, 7))])
def test_micro_batches_divide_the_share_and_at_least_double(share: int, sizes: tuple[int, ...]) -> None:
    assert doubling(share) == sizes


def test_the_file_is_a_configuration_with_a_reason_behind_each_value(tmp_path: Path) -> None:
    machine = Machine(by_micro)
    where = space({"model": {"compile": False}})
    found = searched(machine, where)
    choices = choices_of(found, where, subject())
    text = config_text(validate({"model": {"compile": False}, "limits": {"updates": 3}}), choices, "By a test.")
    lines = dict(line.split("  # ", 1) for line in text.splitlines() if "  # " in line)
    assert lines[
        "micro = 8"
    ] == "tried as fp32, 8 x 1: 800 tokens/s (800 to 808, 3 runs); 1: 100 tokens/s; 2: 200 tokens/s; 4: " + (
        "400 tokens/s (400 to 404, 3 runs)"
    )
    assert lines['precision = "bf16"'] == ("1,600 tokens/s (1,600 to 1,616, 3 runs); fp32: 800 tokens/s (800 to 808, 3 runs)")
    assert lines["checkpoint_activations = false"] == "recomputing buys memory with time, and memory was not short"
    assert lines["compile = false"] == 'the configuration says so; "auto" leaves it to the search'
    assert "updates = 3" in text.splitlines()
    assert "sharding" not in text
    (tmp_path / "tuned.toml").write_text(text)
    again = load(tmp_path / "tuned.toml")
    assert (again.precision, again.batch.global_, again.batch.micro, again.limits.updates) == (Precision.BF16, 8, 8, 3)


def test_several_ranks_are_part_of_the_file() -> None:
    where, many = space(processes=2), subject(processes=2)
    choices = choices_of(searched(Machine(by_micro), where), where, many)
    assert (choices["processes"].value, choices["batch.global"].value) == (2, 16)
    assert choices["sharding"].value is Sharding.DDP
    assert choices["sharding"].reason == "the first that was safe: dividing more sends more"


def test_table_and_data_hold_everything_that_was_tried() -> None:
    machine = Machine(by_micro, size=lambda row: 2.3 * row.micro)
    where = space({"precision": "fp32", "model": {"compile": False, "checkpoint_activations": False}})
    found = searched(machine, where)
    text = to_text(subject(), Memory(at_hand_bytes=10 * GB, margin=0.1, predicted=lambda row: None), found)
    assert "memory at hand 10.00 GB for each rank, of which 10% stay free" in text
    assert re.search(r"^fp32, 4 x 2 +400 tokens/s +9\.20 GB +not safe: 9\.20 GB measured", text, re.M)
    assert text.endswith(conclusion(found))
    data = to_dict(subject(), found, choices_of(found, where, subject()))
    assert [row["name"] for row in data["tried"]] == ["fp32, 1 x 8", "fp32, 2 x 4", "fp32, 4 x 2"]
    assert data["winner"]["name"] == "fp32, 2 x 4"
    assert data["choices"]["batch.micro"]["value"] == 2
