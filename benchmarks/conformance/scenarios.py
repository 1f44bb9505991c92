"""The scenarios: a job, what of its outcome is compared, and with what."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.conformance import judge
from benchmarks.conformance.job import Item, Job
from benchmarks.conformance.judge import Check, numbers, parameters

ROUNDED = 2e-2
"""Tolerance in FP16 and BF16, whose rounding is up to 2^-8 a product."""
NO_ESTIMATE = "it estimates no memory"
NO_NORM = "it reports no gradient norm"
NO_SCALE = "it has no loss scale"
LOSS = numbers("losses", "it reports no loss")
EPOCH_LOSS = numbers("epoch_loss", "it reports no loss of an epoch")
NORMS = numbers("norms", NO_NORM)
SCHEDULER = numbers("scheduler_steps", "it has no scheduler")
RATES = numbers("rates", "it tells no learning rate")
SCALES = numbers("scales", NO_SCALE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One line of the table.

    Attributes:
        name: what must be right.
        check: how it is told.
        uninterrupted: whether it is compared with the same stack's run of the job without a stop.
    """

    name: str
    job: Job
    check: Check
    uninterrupted: bool = False

    @property
    def whole(self) -> Job:
        """The job without a stop."""
        return replace(self.job, stop_after=None)


def items(count: int, tokens: int = 4) -> tuple[Item, ...]:
    return tuple(Item(tokens=tokens) for _ in range(count))


def lengths(*tokens: int) -> tuple[Item, ...]:
    return tuple(Item(tokens=each) for each in tokens)


def poisoned(count: int, *places: int, poison: str = "gradient") -> tuple[Item, ...]:
    return tuple(Item(poison=poison if place in places else "") for place in range(count))


EQUAL = Job(items=items(8), accumulate=4)
TAIL = Job(items=items(6), accumulate=4, epochs=2)
RAGGED = Job(items=lengths(1, 4, 2, 8, 5, 1, 1, 3), accumulate=4)
EQUAL_LOSS, TAIL_LOSS, RAGGED_LOSS = (replace(job, learning_rate=0.0) for job in (EQUAL, TAIL, RAGGED))
RAGGED_TAIL = Job(items=lengths(1, 4, 2, 8, 5, 2), accumulate=4)
MASKED = Job(items=(*items(3), Item(masked=True), *items(4)), accumulate=4)
MASKED_LOSS = replace(MASKED, learning_rate=0.0)
ALL_MASKED = Job(items=(*items(2), *[Item(masked=True)] * 2, *items(2)), accumulate=2)
CLIPPED = Job(items=items(8), accumulate=4, clip_norm=0.1)
CLIPPED_RAGGED = replace(RAGGED_LOSS, clip_norm=0.1)
CLIPPED_VALUE = Job(items=items(8), accumulate=4, clip_value=0.05)
FP16 = Job(items=items(8), accumulate=2, precision="fp16")
FP16_CLIPPED = replace(CLIPPED, precision="fp16")
FP16_VALUE = replace(CLIPPED_VALUE, precision="fp16")
FIRST = Job(items=poisoned(6, 0), precision="fp16")
MID_WINDOW = Job(items=poisoned(8, 3), accumulate=2, precision="fp16")
COUNTED = replace(MID_WINDOW, schedule="count")
FUSED = replace(MID_WINDOW, optimizer="adamw fused")
COUNTED_FUSED = replace(FUSED, schedule="count")
ADAMW = replace(MID_WINDOW, optimizer="adamw")
CLIP_OVERFLOW = replace(MID_WINDOW, clip_norm=0.1)
AVERAGED = replace(MID_WINDOW, ema=True)
GROWTH = Job(items=poisoned(8, 5), precision="fp16", growth_interval=2)
DEAD = Job(items=poisoned(170, *range(168)), precision="fp16")
NAN = Job(items=poisoned(6, 2, poison="data"))
NAN_FP16 = replace(NAN, precision="fp16")
NAN_WINDOW = Job(items=poisoned(8, 3, poison="data"), accumulate=2)
BF16 = Job(items=items(8), accumulate=2, precision="bf16")
PLAIN_FP16 = Job(items=items(2), precision="fp16", plain_fp16=True)
COUNT = Job(items=items(8), accumulate=2, schedule="count")
WARM_UP = Job(items=items(12), accumulate=2, schedule="warm-up")
EMA = Job(items=items(8), accumulate=2, ema=True)
SHUFFLED = Job(items=items(12), epochs=3, shuffle=True)
LAST_SAVED = Job(items=items(8), accumulate=2, epochs=3, optimizer="adamw", schedule="count", stop_after=4)
DROPOUT_SAVED = Job(items=items(8), accumulate=2, epochs=2, dropout=0.5, stop_after=4)
SCALE_SAVED = Job(items=poisoned(4, 1, 2), epochs=2, precision="fp16", stop_after=4)
MID_EPOCH = Job(items=items(12), accumulate=2, epochs=2, shuffle=True, stop_after=4)
PEEKED = replace(BF16, peeks=True)
FITTING = Job(items=lengths(*[1] * 16, 8, 8, *[1] * 6), memory=12, optimizer="adamw")
ESTIMATE = Job(items=(), precision="bf16", estimates=True)

TWO = {"ranks": 2}
EQUAL_2 = replace(EQUAL, items=items(16), **TWO)
RAGGED_2 = Job(items=lengths(1, 4, 1, 8, 2, 6, 1, 3), accumulate=2, ranks=2)
CLIPPED_2 = replace(RAGGED_2, clip_norm=0.1)
RAGGED_2_LOSS = replace(CLIPPED_2, learning_rate=0.0)
MASKED_2 = Job(items=(Item(), Item(masked=True), Item(), Item(masked=True), *items(4)), accumulate=2, ranks=2)
OVERFLOW_2 = Job(items=poisoned(12, 5), accumulate=2, precision="fp16", ranks=2)
COUNT_2 = replace(COUNT, items=items(16), **TWO)
WARM_UP_2 = replace(WARM_UP, items=items(24), **TWO)
PLATEAU_2 = Job(items=items(4), epochs=4, metrics=((1.0, 0.9, 0.8, 0.7), (1.0, 1.2, 1.2, 1.2)), ranks=2)
UNEVEN_2 = Job(items=items(7), ranks=2)
TAIL_2 = Job(items=items(10), accumulate=4, ranks=2)
STREAM_2 = Job(items=items(8), iterable=True, ranks=2)
SYNC_2 = Job(items=items(32), accumulate=8, ranks=2)
SHUFFLED_2 = replace(SHUFFLED, **TWO)

SCENARIOS = (
    Scenario(name="equal micro-batches: weights", job=EQUAL, check=parameters()),
    Scenario(name="equal micro-batches: loss of each update", job=EQUAL_LOSS, check=LOSS),
    Scenario(name="equal micro-batches: loss of the epoch", job=EQUAL_LOSS, check=EPOCH_LOSS),
    Scenario(name="shorter last window: weights after two epochs", job=TAIL, check=parameters()),
    Scenario(name="shorter last window: loss of each update", job=TAIL_LOSS, check=LOSS),
    Scenario(name="ragged micro-batches: weights", job=RAGGED, check=parameters()),
    Scenario(name="ragged micro-batches: loss of each update", job=RAGGED_LOSS, check=LOSS),
    Scenario(name="ragged micro-batches: loss of the epoch", job=RAGGED_LOSS, check=EPOCH_LOSS),
    Scenario(name="ragged and a shorter last window: weights", job=RAGGED_TAIL, check=parameters()),
    Scenario(name="a masked micro-batch in a window: weights", job=MASKED, check=parameters()),
    Scenario(name="a masked micro-batch in a window: loss of each update", job=MASKED_LOSS, check=LOSS),
    Scenario(name="a window with all labels masked: weights", job=ALL_MASKED, check=parameters()),
    Scenario(name="clipping by norm under accumulation: weights", job=CLIPPED, check=parameters()),
    Scenario(name="clipping by norm under accumulation: norm reported", job=CLIPPED, check=NORMS),
    Scenario(name="clipping ragged micro-batches: norm reported", job=CLIPPED_RAGGED, check=NORMS),
    Scenario(name="clipping by value under accumulation: weights", job=CLIPPED_VALUE, check=parameters()),
    Scenario(name="FP16 with accumulation: weights", job=FP16, check=parameters(ROUNDED)),
    Scenario(name="FP16, clipping by norm: weights", job=FP16_CLIPPED, check=parameters(ROUNDED)),
    Scenario(name="FP16, clipping by norm: norm reported", job=FP16_CLIPPED, check=numbers("norms", NO_NORM, ROUNDED)),
    Scenario(name="FP16, clipping by value: weights", job=FP16_VALUE, check=parameters(ROUNDED)),
    Scenario(name="overflow in the first update: weights", job=FIRST, check=parameters(ROUNDED)),
    Scenario(name="overflow in mid-window: weights", job=MID_WINDOW, check=parameters(ROUNDED)),
    Scenario(name="overflow in mid-window: steps of the scheduler", job=COUNTED, check=SCHEDULER),
    Scenario(name="overflow in mid-window: loss scale of each update", job=MID_WINDOW, check=SCALES),
    Scenario(name="overflow, AdamW: weights", job=ADAMW, check=parameters(ROUNDED)),
    Scenario(name="overflow, fused AdamW: weights", job=FUSED, check=parameters(ROUNDED)),
    Scenario(name="overflow, fused AdamW: steps of the scheduler", job=COUNTED_FUSED, check=SCHEDULER),
    Scenario(
        name="overflow, fused AdamW: steps of the optimizer", job=FUSED, check=numbers("optimizer_steps", "no count of steps")
    ),
    Scenario(name="overflow while clipping: weights", job=CLIP_OVERFLOW, check=parameters(ROUNDED)),
    Scenario(name="overflow and averaged weights: updates averaged", job=AVERAGED, check=numbers("averaged", "no average")),
    Scenario(name="loss scale that grows and halves", job=GROWTH, check=SCALES),
    Scenario(name="168 overflows in a row: weights stay finite", job=DEAD, check=judge.moved_finite),
    Scenario(name="a NaN in the data, FP32: weights stay finite", job=NAN, check=judge.moved_finite),
    Scenario(name="a NaN in the data, FP16: weights", job=NAN_FP16, check=parameters(ROUNDED)),
    Scenario(name="a NaN in the data: shown in the loss reported", job=NAN_FP16, check=judge.nan_shown),
    Scenario(name="BF16 autocast: weights", job=BF16, check=parameters(ROUNDED)),
    Scenario(name="BF16 autocast: weights stay FP32", job=BF16, check=judge.dtypes("parameter_dtype", "float32")),
    Scenario(name="BF16 autocast: the forward is BF16", job=BF16, check=judge.dtypes("dtype", "bfloat16")),
    Scenario(name="BF16 autocast, a forward without gradients first: weights", job=PEEKED, check=parameters(ROUNDED)),
    Scenario(name="FP16 asked for on a CPU: the forward is FP16", job=PLAIN_FP16, check=judge.dtypes("dtype", "float16")),
    Scenario(name="scheduler under accumulation: steps", job=COUNT, check=SCHEDULER),
    Scenario(name="warm-up under accumulation: rate of each update", job=WARM_UP, check=RATES),
    Scenario(name="averaged weights under accumulation: updates averaged", job=EMA, check=numbers("averaged", "no average")),
    Scenario(
        name="the micro-batch that was found trains, longest sample and optimizer included", job=FITTING, check=judge.trains
    ),
    Scenario(name="memory of AdamW under autocast: estimated", job=ESTIMATE, check=numbers("estimate", NO_ESTIMATE, 0.05)),
    Scenario(name="shuffled epochs: another order each, each sample once", job=SHUFFLED, check=judge.other_orders),
    Scenario(name="resume: weights bit by bit", job=LAST_SAVED, check=judge.alike, uninterrupted=True),
    Scenario(name="resume: optimizer state", job=LAST_SAVED, check=numbers("moments", "no moments", 1e-12), uninterrupted=True),
    Scenario(name="resume: learning rates", job=LAST_SAVED, check=RATES, uninterrupted=True),
    Scenario(name="resume with dropout: generators restored", job=DROPOUT_SAVED, check=judge.alike, uninterrupted=True),
    Scenario(name="resume: loss scale", job=SCALE_SAVED, check=SCALES, uninterrupted=True),
    Scenario(name="resume in mid-epoch: order of the samples", job=MID_EPOCH, check=judge.same_order, uninterrupted=True),
    Scenario(name="2 ranks, equal micro-batches: weights", job=EQUAL_2, check=parameters()),
    Scenario(name="2 ranks, ragged micro-batches: weights", job=RAGGED_2, check=parameters()),
    Scenario(name="2 ranks, ragged micro-batches: loss reported", job=RAGGED_2_LOSS, check=LOSS),
    Scenario(name="2 ranks, ragged micro-batches: norm reported", job=RAGGED_2_LOSS, check=NORMS),
    Scenario(name="2 ranks, ragged micro-batches, clipping: weights", job=CLIPPED_2, check=parameters()),
    Scenario(name="2 ranks, one with all labels masked: weights", job=MASKED_2, check=parameters()),
    Scenario(name="2 ranks, overflow on one: weights", job=OVERFLOW_2, check=parameters(ROUNDED)),
    Scenario(name="2 ranks, overflow on one: loss scale of each update", job=OVERFLOW_2, check=SCALES),
    Scenario(name="2 ranks: steps of the scheduler", job=COUNT_2, check=SCHEDULER),
    Scenario(name="2 ranks, warm-up: rate of each update", job=WARM_UP_2, check=RATES),
    Scenario(name="2 ranks, plateau of a metric of both: rate of each update", job=PLATEAU_2, check=RATES),
    Scenario(name="2 ranks, uneven shares: each sample once", job=UNEVEN_2, check=judge.each_once),
    Scenario(name="2 ranks, uneven shares: weights", job=UNEVEN_2, check=parameters()),
    Scenario(name="2 ranks, shorter last window: weights", job=TAIL_2, check=parameters()),
    Scenario(name="2 ranks, iterable data: each sample once", job=STREAM_2, check=judge.each_once),
    Scenario(name="2 ranks, window of 8: gradients reduced once", job=SYNC_2, check=judge.reduced_once),
    Scenario(name="2 ranks, shuffled: another order each epoch, each once", job=SHUFFLED_2, check=judge.other_orders),
)


def jobs(ranks: int) -> list[Job]:
    """Every job of so many ranks, once."""
    needed = [job for s in SCENARIOS for job in ((s.job, s.whole) if s.uninterrupted else (s.job,)) if job.ranks == ranks]
    return list(dict.fromkeys(needed))
