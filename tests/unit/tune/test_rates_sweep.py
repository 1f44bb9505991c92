"""A learning rate is called better only where every seed says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from halfstep.bench.row import Row, Trial
from halfstep.config.options import Precision
from halfstep.tune.rates import choose, last_loss, lines_of, sweep

ROW = Row(precision=Precision.FP32, micro=2, accumulate=1)


def short_runs(losses: dict[float, Sequence[float]]) -> list[object]:
    """Sweeps whose run with a rate and the seed `n` ends with the `n`th loss of that rate."""

    def run(settings: Sequence[str]) -> Trial:
        asked = dict(setting.split("=", 1) for setting in settings)
        loss = losses[float(asked["optimizer.learning_rate"])][int(asked["run.seed"])]
        return Trial(failed="stopped") if math.isnan(loss) else Trial(losses=(9.0,) * 8 + (loss, loss))

    return sweep(ROW, 0.5, seeds=len(losses[0.5]), run=run, told=lambda sentence: None)


def test_lower_with_every_seed_is_taken_with_how_much_lower() -> None:
    swept = short_runs({0.5: [3.0, 4.0, 5.0], 0.625: [2.9, 3.8, 4.7], 0.75: [2.0, 4.5, 4.0]})
    taken = choose(swept)
    assert taken.value == 0.625
    assert taken.reason == (
        "1.25 times the configured 0.5: -0.200 (-0.300 to -0.100, 3 runs) of loss, lower with each of 3 seeds"
    )


def test_what_the_seeds_do_not_agree_on_is_noise_and_the_configured_rate_stays() -> None:
    swept = short_runs({0.5: [3.0, 4.0, 5.0], 0.625: [2.0, 3.0, 5.1], 0.75: [3.1, 4.1, 5.1]})
    taken = choose(swept)
    assert taken.value == 0.5
    assert taken.reason == (
        "the configured one stays after short runs with 3 seeds; "
        "0.625: no difference beyond the seeds; 0.75: higher with every seed"
    )


def test_a_run_that_was_stopped_is_no_number_and_is_never_taken() -> None:
    swept = short_runs({0.5: [3.0, 4.0, 5.0], 0.625: [1.0, math.nan, 1.0], 0.75: [3.0, 4.0, 5.0]})
    assert choose(swept).value == 0.5
    assert lines_of(swept)[2] == ("0.625", "not finite", "", "diverged")


def test_nothing_is_better_than_a_configured_rate_that_diverged_itself() -> None:
    swept = short_runs({0.5: [math.nan] * 3, 0.625: [1.0] * 3, 0.75: [1.0] * 3})
    assert choose(swept).value == 0.5
    assert lines_of(swept)[1][3] == "diverged"


def test_too_few_seeds_tell_nothing() -> None:
    swept = short_runs({0.5: [3.0, 4.0], 0.625: [1.0, 1.0], 0.75: [1.0, 1.0]})
    assert choose(swept).value == 0.5
    assert [line[3] for line in lines_of(swept)[1:]] == ["", "too few seeds to tell", "too few seeds to tell"]


def test_the_loss_of_a_run_is_the_mean_of_its_last_fifth() -> None:
    assert last_loss(Trial(losses=(9.0,) * 8 + (2.0, 4.0))) == pytest.approx(3.0)
    assert math.isnan(last_loss(Trial(failed="stopped")))
