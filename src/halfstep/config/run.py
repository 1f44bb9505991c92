"""A complete run: every value decided, nothing left to "auto".

The shape is that of the schema, so that a run written as TOML is a configuration which asks for the same run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.config.options import (
    Attention,
    Corpus,
    DataFormat,
    DataKind,
    LoggerName,
    OptimizerName,
    Precision,
    SchedulerName,
    Sharding,
    Tail,
    Task,
    TooLong,
)
from halfstep.config.toml import toml_document


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRun:
    """The model: the folder it is loaded from, or the architecture or factory and the configuration it is built from.

    `attention` is `None` for a model of the user's own, which has its own.
    """

    path: str | None
    architecture: str | None
    factory: str | None
    config: Mapping[str, Any] | None
    task: Task
    loss: str | None
    frozen: tuple[str, ...] | None
    attention: Attention | None
    checkpoint_activations: bool
    compile: bool
    loss_chunk: int
    label_smoothing: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRun:
    """Adapters of low rank beside the modules that the patterns name."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRun:
    """The data: an embedded corpus, files or the user's own; what their rows are; how they become tokens; their length;
    processes beside this one that make batches.

    Text files are one stream of tokens, to which kind, columns, packing and length limit do not belong; pictures are no
    tokens, and of the user's own data nothing is known: `None`.
    """

    corpus: Corpus | None
    files: tuple[str, ...] | None
    factory: str | None
    config: Mapping[str, Any] | None
    format: DataFormat | None
    kind: DataKind | None
    classes: tuple[str, ...] | None
    image_size: int | None
    columns: tuple[str, ...] | None
    packing: bool | None
    too_long: TooLong | None
    tokenizer: str | None
    sequence_length: int | None
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """Sequences in an update over all ranks, sequences in a micro-batch of one rank, and the tail of an epoch."""

    global_: int
    micro: int
    tail: Tail


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRun:
    """The optimizer; `None` where a setting does not belong to it or is off."""

    name: OptimizerName
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float] | None
    eps: float | None
    momentum: float | None
    clip_norm: float
    clip_value: float
    ema_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRun:
    """The learning rate over applied updates; `decay_updates` is `None` where the fall has no length of its own."""

    name: SchedulerName
    warmup_updates: int
    decay_updates: int | None
    final_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRun:
    """What is held out, how often it is looked at (0: never), and how many looks may be no better (0: any number)."""

    every_updates: int
    share: float | None
    files: tuple[str, ...] | None
    keep_best: bool
    patience: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsRun:
    """Where the run ends: at the first of these that is reached; at least one is set."""

    updates: int | None
    epochs: int | None
    tokens: int | None
    minutes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRun:
    """Updates and minutes between two checkpoints (0: not by these), and how many of the last ones are kept."""

    every_updates: int
    every_minutes: float
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRun:
    """Where the run is kept, its seed, whether every operation must repeat bitwise, who is told beside the log, and how many
    minutes the ranks wait for one that does not answer."""

    folder: str
    seed: int
    deterministic: bool
    tensorboard: bool
    loggers: tuple[LoggerName, ...]
    rank_minutes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that decides what a run does."""

    precision: Precision
    device: str
    processes: int
    sharding: Sharding
    watch: bool
    model: ModelRun
    lora: LoraRun | None
    data: DataRun
    batch: BatchRun
    optimizer: OptimizerRun
    scheduler: SchedulerRun
    evaluation: EvaluationRun
    limits: LimitsRun
    checkpoint: CheckpointRun
    run: OutputRun

    @property
    def accumulate(self) -> int:
        """Micro-batches that one rank puts into an update."""
        return self.batch.global_ // (self.batch.micro * self.processes)

    @property
    def most_weight(self) -> float:
        """What a full update counts at most: tokens that are predicted, or samples."""
        if self.model.loss is not None:
            return math.inf
        per_sample = 1 if self.model.task.has_classes or self.data.sequence_length is None else self.data.sequence_length - 1
        return self.batch.global_ * per_sample

    def to_dict(self) -> dict[str, Any]:
        """The run as plain tables, lists, strings and numbers; what is not set is `None`."""
        table = _plain(self)
        assert isinstance(table, dict)
        return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A run and, by dotted key, why each value is what it is.

    Attributes:
        run: the run.
        choices: by dotted key, the value and its reason.
        planned_updates: applied updates until a limit ends the run; `None` where only the clock does.
    """

    run: Run
    choices: Mapping[str, Choice[Any]]
    planned_updates: int | None

    def with_choices(self, more: Mapping[str, Choice[Any]]) -> Resolved:
        """The same run with choices that were made while it was built."""
        return replace(self, choices={**self.choices, **more})

    def to_toml(self) -> str:
        """The run as a configuration file, each automatic value with its reason behind it; at the end, as comments, what
        was decided that no key asks for.
        """
        table = self.run.to_dict()
        reasons = {key: choice.reason for key, choice in self.choices.items() if choice.reason != ASKED_FOR}
        others = [f"# {key}: {choice}\n" for key, choice in self.choices.items() if not _is_key(key, table)]
        return toml_document(table, reasons) + "".join(["\n", *others] if others else [])

    def to_dict(self) -> dict[str, Any]:
        """The run and the choices as plain tables, for JSON."""
        return {
            "config": self.run.to_dict(),
            "planned_updates": self.planned_updates,
            "choices": choices_to_dict(self.choices),
        }


def _is_key(key: str, table: Mapping[str, Any]) -> bool:
    section, _, name = key.rpartition(".")
    return name in (table.get(section, {}) if section else table)


def choices_to_dict(choices: Mapping[str, Choice[Any]]) -> dict[str, dict[str, Any]]:
    """Choices as plain tables, for JSON."""
    return {key: {"value": _plain(choice.value), "reason": choice.reason} for key, choice in choices.items()}


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name.rstrip("_"): _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
