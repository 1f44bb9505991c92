"""What a run says while it goes and when it ends."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from halfstep.engine.ledger import Cause, Entry
from halfstep.train.log import JsonLines, LedgerFile
from halfstep.train.progress import Lines, progress, time_left_text
from halfstep.train.record import EvaluationRecord, UpdateRecord
from halfstep.train.summary import Ending, Rate, Summary, rate_of


def entry(index: int = 1, cause: Cause | None = None, loss: float = 2.0) -> Entry:
    return Entry(
        index=index,
        applied=cause is None,
        cause=cause,
        detail="",
        loss=loss,
        grad_norm=0.5,
        scale=1.0,
        weight=100.0,
        micro_batches=2,
    )


def update(index: int = 1, cause: Cause | None = None, loss: float = 2.0, **changed: Any) -> UpdateRecord:
    values = {"applied": index, "done": 0.25, "lr": 0.1, "seconds": 0.5, "elapsed_s": 30.0, "memory_bytes": 10**9}
    return UpdateRecord(entry=entry(index, cause, loss), **{**values, **changed})


EVALUATION = EvaluationRecord(update=2, loss=1.0, nats_per_byte=0.5, perplexity=2.71828, seconds=1.0, best=True)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_every_few_seconds_and_for_the_first_and_last_update() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, planned_updates=4, clock=clock)
    for index, now in ((1, 0.0), (2, 1.0), (3, 6.0), (4, 7.0)):
        clock.now = now
        lines.on_update(update(index))
    lines.close()
    said = [line.partition(",")[0] for line in stream.getvalue().splitlines()]
    assert said == ["update 1 of 4", "update 3 of 4", "update 4 of 4"]


def test_a_line_tells_loss_rate_time_left_and_memory() -> None:
    stream = io.StringIO()
    Lines(stream, planned_updates=None, clock=Clock()).on_update(update())
    assert stream.getvalue() == "update 1, loss 2.000, 200 tokens/s, 1:30 left, 1.00 GB\n"


def test_a_skipped_update_is_said_at_once_with_its_cause() -> None:
    stream = io.StringIO()
    lines = Lines(stream, planned_updates=None, clock=Clock())
    lines.on_update(update(1))
    lines.on_update(update(2, Cause.OVERFLOW, memory_bytes=None))
    assert stream.getvalue().splitlines()[1] == ("update 2, skipped: overflow, 200 tokens/s, 1:30 left, memory unknown")


def test_an_evaluation_has_a_line() -> None:
    stream = io.StringIO()
    Lines(stream, planned_updates=None, clock=Clock()).on_evaluation(EVALUATION)
    assert stream.getvalue() == (
        "held-out text after update 2: loss 1.000 nats a token, 0.500 nats a byte, perplexity 2.72, the best so far\n"
    )


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    bar = progress(stream, planned_updates=4)
    bar.on_update(update())
    bar.on_evaluation(EVALUATION)
    bar.close()
    assert "update 1 of 4" in stream.getvalue()
    assert "loss 2.000, 200 tokens/s, 1:30 left, 1.00 GB" in stream.getvalue().replace("\n", " ")
    assert "\x1b[" in stream.getvalue()


@pytest.mark.parametrize(
    ("elapsed_s", "done", "text"),
    [(30.0, 0.25, "1:30"), (3600.0, 0.25, "3:00:00"), (5.0, 0.0, "unknown time"), (5.0, 1.0, "0:00")],
)
def test_time_left_follows_what_was_done(elapsed_s: float, done: float, text: str) -> None:
    assert time_left_text(update(elapsed_s=elapsed_s, done=done)) == text


def test_a_log_line_is_json_even_where_a_loss_is_not_finite(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log.jsonl")
    log.on_update(update(1, Cause.LOSS, loss=float("nan")))
    log.on_evaluation(EVALUATION)
    first, second = (json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines())
    log.close()
    assert (first["kind"], first["loss"], first["cause"], first["tokens_per_s"]) == (
        "update",
        None,
        "loss not finite",
        200.0,
    )
    assert (second["kind"], second["nats_per_byte"]) == ("evaluation", 0.5)


def test_the_ledger_file_holds_the_entries_and_nothing_else(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "ledger.jsonl")
    ledger.on_update(update(1))
    ledger.on_evaluation(EVALUATION)
    ledger.close()
    assert [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()] == [entry(1).to_dict()]


def test_the_rate_leaves_the_first_update_out() -> None:
    assert rate_of([1.0, *[float(value) for value in range(100, 201)]]) == Rate(median=150.0, low=110.0, high=190.0, updates=101)
    assert rate_of([5.0]) == Rate(median=5.0, low=5.0, high=5.0, updates=1)
    assert rate_of([]) is None


def looked(update: int, **values: float) -> EvaluationRecord:
    return EvaluationRecord(update=update, loss=2.0, seconds=1.0, best=False, **values)


def summary(**changed: Any) -> Summary:
    values: dict[str, Any] = {
        "ending": Ending.FINISHED,
        "because": "10 updates were applied",
        "planned_updates": 10,
        "applied_updates": 10,
        "skipped": {"overflow": 2, "calibration": 1},
        "tokens": 12345,
        "wall_s": 61.5,
        "rate": Rate(median=2000.0, low=1900.0, high=2100.0, updates=9),
        "final": looked(10, nats_per_byte=1.2),
        "best": looked(8, nats_per_byte=1.1),
        "train_loss": 1.3,
        "unigram_nats_per_byte": 3.0,
        "peak_memory_bytes": None,
    }
    return Summary(**{**values, **changed})


def test_the_report_says_all_of_it() -> None:
    assert summary().to_text().splitlines() == [
        "finished    10 updates were applied",
        "updates     10 applied of 10 planned",
        "skipped     2 overflow, 1 calibration",
        "tokens      12,345 in 1 min 1.5 s",
        "rate        2,000 tokens/s (median of 9 updates; 10% to 90%: 1,900 to 2,100)",
        "memory      unknown",
        "loss        1.200 nats a byte of held-out text, best 1.100 after update 8; unigram entropy 3.000 (40% of it)",
    ]


def test_the_report_of_a_run_that_was_not_judged_says_so() -> None:
    text = summary(final=None, best=None).to_text()
    assert text.splitlines()[-1] == "loss        1.300 nats a token in the last update; no held-out data were looked at"


def test_the_report_of_a_classifier_tells_accuracy_and_its_own_unit() -> None:
    text = summary(unit="images", final=looked(10, accuracy=0.5), best=looked(8, accuracy=0.75)).to_text().splitlines()
    assert text[3:5] + text[6:] == [
        "images      12,345 in 1 min 1.5 s",
        "rate        2,000 images/s (median of 9 updates; 10% to 90%: 1,900 to 2,100)",
        "loss        held-out loss 2.000, accuracy 50.00%; best after update 8: loss 2.000, accuracy 75.00%",
    ]


def test_the_report_is_json() -> None:
    assert json.loads(json.dumps(summary().to_dict()))["rate"]["median"] == 2000.0
