"""The table compares round by round, and does not call noise a gain."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from halfstep.bench import benching
from halfstep.bench.benching import Result, _result, explained
from halfstep.bench.describing import Subject, usual_rows
from halfstep.bench.predicting import predicted_bytes
from halfstep.bench.row import Row, Trial
from halfstep.bench.told import conclusion, to_dict, to_page, to_text
from halfstep.bench.trying import Task
from halfstep.config.options import Precision

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64}
FP32 = Row(precision=Precision.FP32, micro=8, accumulate=2)
BF16 = Row(precision=Precision.BF16, micro=8, accumulate=2)


def subject(**values: object) -> Subject:
    usual = {
        "device": "cpu",
        "machine": "a machine",
        "parameters": 1000,
        "micro": 8,
        "accumulate": 2,
        "sequence": 64,
        "unit": "tokens",
        "conditions": {"sequence": "64 tokens", "attention": "sdpa", "activation checkpointing": "off"},
        "unavailable": {},
        "model_config": GPT2,
        "recipe": {},
    }
    return Subject(**{**usual, **values})


def trial(rate: float, *, losses: tuple[float, ...] = (2.0, 1.0), memory: int = 10**9) -> Trial:
    return Trial(seconds=(1.0, 1.0), weights=(rate, rate), losses=losses, allocated_bytes=memory)


def compared(ours: list[float], theirs: list[float]) -> Result:
    first = [trial(rate) for rate in theirs]
    return _result(BF16, [trial(rate) for rate in ours], first)


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([200, 210, 190], [100, 100, 100], "faster"),
        ([50, 60, 40], [100, 100, 100], "slower"),
        ([120, 90, 130], [100, 100, 100], "no difference beyond the spread"),
        ([300, 30, 3], [150, 15, 1.5], "faster"),  # the machine slowed down for both
        ([200, 210], [100, 100], "too few rounds to tell"),
        ([120, 130, 125, 128, 90], [100, 100, 100, 100, 100], "no difference beyond the spread"),  # its middle half is above
    ],
)
def test_a_gain_is_one_in_every_round(ours: list[float], theirs: list[float], verdict: str) -> None:
    assert compared(ours, theirs).verdict == verdict


def test_losses_are_compared_over_the_first_updates_and_nan_stays() -> None:
    first = [trial(1.0, losses=(2.0, 1.0, 4.0, 9.0))]
    assert _result(BF16, [trial(1.0, losses=(2.0, 1.1, 4.0, 1.0))], first).loss_deviation == pytest.approx(0.1)
    assert math.isnan(_result(BF16, [trial(1.0, losses=(2.0, math.nan))], first).loss_deviation or 0.0)


def test_one_failed_trial_fails_the_row_and_nothing_is_compared_with_it() -> None:
    failed = [trial(1.0), Trial(failed="does not fit: out of memory")]
    assert _result(FP32, failed, failed).failed == "does not fit: out of memory"
    assert _result(BF16, [trial(1.0)] * 2, failed).against is None


def test_the_usual_rows_make_the_same_update() -> None:
    rows = usual_rows(subject())
    assert [str(precision) for precision, _, _ in rows] == ["fp32", "fp16", "bf16", "bf16"]
    assert {micro * accumulate for _, micro, accumulate in rows} == {16}
    assert rows[-1][1:] == (2, 8)
    assert len(usual_rows(subject(micro=1))) == 3


RESULTS = [
    _result(FP32, first := [trial(100.0)] * 3, first),
    _result(BF16, [trial(200.0, memory=5 * 10**8)] * 3, first),
    Result(row=Row(precision=Precision.FP16, micro=8, accumulate=2), failed="does not fit: out of memory"),
]


def test_the_table_says_what_was_measured_and_what_was_not() -> None:
    text = to_text(subject(), RESULTS, {"bf16, 8 x 2": 6 * 10**8})
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "200 (200 to 200, 3 runs) tokens/s  2.00 (2.00 to 2.00): faster" in lines["bf16, 8 x 2"]
    assert lines["bf16, 8 x 2"].endswith("0.50 GB         0.60 GB")
    assert "does not fit" in lines["fp16, 8 x 2"]
    assert lines["fp32, 8 x 2"].endswith("1.00 GB         unknown")
    assert "fp16, 8 x 2: does not fit: out of memory" in text
    assert text.endswith("The fastest is bf16, 8 x 2: 2.00 (2.00 to 2.00) times fp32, 8 x 2.")


def test_no_gain_is_no_gain() -> None:
    assert conclusion([RESULTS[0], compared([100, 99, 101], [100, 100, 100])]) == (
        "No row is faster than fp32, 8 x 2 beyond the spread."
    )
    assert conclusion([RESULTS[2]]) == "Nothing can be compared: fp16, 8 x 2 does not fit: out of memory."


def test_too_few_rounds_are_no_verdict_either_way() -> None:
    few = compared([100, 50], [100, 100])
    assert conclusion([RESULTS[0], few]) == "Too few rounds to compare the rows: 3 show whether a difference stays."


def test_data_and_page_hold_the_same() -> None:
    data = to_dict(subject(), RESULTS, {})
    assert [row["verdict"] for row in data["rows"]] == ["", "faster", ""]
    assert data["rows"][0]["predicted_bytes"] is None
    page = to_page(subject(), RESULTS, {})
    assert data["conclusion"] in page
    assert "does not fit" in page


def test_why_a_row_is_not_faster_is_told_as_text_data_and_page() -> None:
    same = compared([100, 99, 101], [100, 100, 100])
    why = {str(same.row): ("large matrix products run at 1.1 times the rate", "casts: 9 take 20% of an update")}
    results = [RESULTS[0], same]
    reasons = (
        "Why bf16, 8 x 2 is not faster:\n  large matrix products run at 1.1 times the rate\n  casts: 9 take 20% of an update\n"
    )
    assert reasons in to_text(subject(), results, {}, why)
    assert to_dict(subject(), results, {}, why)["why_not_faster"] == why
    page = to_page(subject(), results, {}, why)
    assert "Why bf16, 8 x 2 is not faster" in page
    assert "casts: 9 take 20% of an update" in page


def test_only_low_precision_that_is_not_faster_is_profiled_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Task] = []

    def once(task: Task, ranks: int) -> Trial:
        asked.append(task)
        return Trial(why=("because",))

    monkeypatch.setattr(benching, "in_processes", once)
    same, smaller = (
        compared([100, 99, 101], [100, 100, 100]),
        replace(compared([50, 49, 51], [100, 100, 100]), row=replace(BF16, micro=4)),
    )
    results = [RESULTS[0], same, smaller, RESULTS[2]]
    why = explained(results, config=None, settings=["a=1"], limit_s=9.0, told=lambda sentence: None)
    assert why == {str(same.row): ("because",)}
    assert [(task.explain, task.settings[0]) for task in asked] == [(True, "a=1")]
    assert explained([RESULTS[0], RESULTS[1]], config=None, settings=[], limit_s=9.0, told=print) == {}


FULL = {"optimizer": "adamw", "loss": "whole", "attention": "sdpa", "trainable": None}


@pytest.mark.parametrize(
    "told",
    [
        {"optimizer": "adamw-8bit"},
        {"optimizer": "sgd"},
        {"loss": "chunked", "loss_chunk": 16},
        {"trainable": 1000},
        {"trainable": 1000, "adapter": "lora", "adapts_all": True, "adapter_dropout": False},
        {"labels_samples": True},
    ],
)
def test_prediction_counts_what_the_configuration_says(told: dict[str, object]) -> None:
    """Each of these takes less than training all weights with AdamW and whole logits."""
    large = GPT2 | {"vocab_size": 50_000}
    plain, ours = (
        predicted_bytes(subject(model_config=large, recipe=recipe), [FP32])[str(FP32)] for recipe in (FULL, FULL | told)
    )
    assert ours < 0.95 * plain


def test_images_are_predicted_without_a_sequence() -> None:
    vit = {"model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
    assert predicted_bytes(subject(model_config=vit, sequence=None), [FP32])[str(FP32)] > 8 * 197 * 64 * 50
    assert predicted_bytes(subject(sequence=None), [FP32]) == {}


def test_prediction_counts_what_a_row_changes() -> None:
    small = Row(precision=Precision.FP32, micro=1, accumulate=16)
    found = predicted_bytes(subject(), [FP32, small])
    assert found[str(FP32)] > found[str(small)] > 16 * 100_000
    assert predicted_bytes(subject(model_config={}), [FP32]) == {}
