"""What is decided from trials that are given: pure arithmetic."""

import pytest

from halfstep.config.options import Precision
from halfstep.precision.select import decide
from halfstep.precision.trial import GradientCount, Trial

BF16, FP16, FP32 = Precision.BF16, Precision.FP16, Precision.FP32
ALL_GOOD = GradientCount(total=100, zero=0, not_finite=0)
STEADY = (1.0, 1.01, 0.99, 1.0, 1.0)


def trial(
    precision: Precision,
    speed: float = 1.0,
    *,
    losses: tuple[float, ...] = (2.0,),
    gradients: GradientCount = ALL_GOOD,
    seconds: tuple[float, ...] = STEADY,
) -> Trial:
    return Trial(precision=precision, seconds=tuple(second / speed for second in seconds), losses=losses, gradients=gradients)


def choose(*trials: Trial, tie: Precision = FP32) -> tuple[Precision, str]:
    choice = decide({one.precision: one for one in trials}, num_products=8, tie=tie)
    return choice.value, choice.reason


@pytest.mark.parametrize(
    ("bf16", "tie", "expected"),
    [
        (1.5, FP32, BF16),
        (1.5, BF16, BF16),
        (1.01, FP32, FP32),
        (1.01, BF16, BF16),
        (0.99, BF16, BF16),
        (0.5, FP32, FP32),
        (0.5, BF16, FP32),
    ],
)
def test_a_gain_wins_a_loss_loses_and_the_tie_decides_between(bf16: float, tie: Precision, expected: Precision) -> None:
    assert choose(trial(FP32), trial(BF16, bf16), tie=tie)[0] is expected


def test_a_gain_within_the_spread_of_the_rounds_is_none() -> None:
    restless = (1.0, 3.0, 0.5, 2.0, 0.7)
    value, reason = choose(trial(FP32), trial(BF16, 1.2, seconds=restless))
    assert value is FP32
    assert "no difference beyond the noise" in reason


def test_one_round_must_gain_more_than_many() -> None:
    once = (1.0,)
    assert choose(trial(FP32, seconds=once), trial(BF16, 1.2, seconds=once))[0] is FP32
    assert choose(trial(FP32, seconds=once), trial(BF16, 1.3, seconds=once))[0] is BF16


def test_the_fastest_of_three_is_taken() -> None:
    assert choose(trial(FP32), trial(BF16, 1.5), trial(FP16, 2.0))[0] is FP16


def test_between_equal_halves_the_one_without_a_scale_is_taken() -> None:
    value, reason = choose(trial(FP32), trial(BF16, 1.5), trial(FP16, 1.52))
    assert value is BF16
    assert "fp16 forward and backward takes" in reason


def test_a_tie_taken_for_its_memory_says_so() -> None:
    _, reason = choose(trial(FP32), trial(BF16), tie=BF16)
    assert reason.endswith("its activations take half the memory")


def test_a_loss_out_of_tolerance_is_ruled_out_with_the_derivation() -> None:
    value, reason = choose(trial(FP32), trial(BF16, 2.0, losses=(2.1,)))
    assert value is FP32
    ruled_out = "bf16 ruled out: loss 2.1 against 2 in fp32, limit 0.047 = 2 * sqrt(8 products + 1) * 0.0039 of it"
    assert reason.endswith(ruled_out)


def test_what_fp32_itself_varies_by_is_allowed_on_top() -> None:
    value, reason = choose(trial(FP32, losses=(1.9, 2.0, 2.1)), trial(BF16, 2.0, losses=(2.1,)))
    assert value is BF16
    assert "+ 0.2 that fp32 itself varies by" in reason


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_disagrees(loss: float) -> None:
    value, reason = choose(trial(FP32), trial(BF16, 2.0, losses=(2.0, loss)))
    assert value is FP32
    assert "bf16 ruled out: its loss is not finite" in reason


def test_bf16_gradients_that_are_not_finite_disagree() -> None:
    broken = GradientCount(total=100, zero=0, not_finite=3)
    value, reason = choose(trial(FP32), trial(BF16, 2.0, gradients=broken))
    assert value is FP32
    assert "3 of 100 gradient values are not finite" in reason


def test_fp16_overflow_and_underflow_at_the_first_scale_are_told_and_no_disagreement() -> None:
    strained = GradientCount(total=100, zero=7, not_finite=3)
    value, reason = choose(trial(FP32), trial(FP16, 2.0, gradients=strained))
    assert value is FP16
    told = "of 100 gradient values at scale 65536, 3 overflow (the scale then falls) and 7 become zero that are not in fp32"
    assert told in reason


def test_where_fp32_is_not_finite_nothing_can_be_judged() -> None:
    value, reason = choose(trial(FP32, losses=(float("nan"),)), trial(BF16, 2.0))
    assert value is FP32
    assert reason == "the loss is nan in fp32 on the first micro-batch, which no other precision can be judged by"


def test_a_trial_that_stopped_early_is_compared_by_its_median() -> None:
    value, reason = choose(trial(FP32), trial(BF16, 0.1, seconds=(1.0,)))
    assert value is FP32
    assert "0.10 times as fast as fp32" in reason


def test_the_reason_holds_times_spreads_and_losses() -> None:
    _, reason = choose(trial(FP32), trial(BF16, 2.0))
    assert reason == (
        "bf16 forward and backward takes 500 ms (500 to 500, 5 runs), 2.00 (2.00 to 2.00) times as fast as fp32 "
        "at 1.00 s (1.00 to 1.00, 5 runs); loss 2 against 2 in fp32, "
        "limit 0.047 = 2 * sqrt(8 products + 1) * 0.0039 of it"
    )
