"""What the user wrote: every key optional, every key known, every value of the right kind.

`None` means that the key is absent; the word "auto" asks for the automatic value, as absence does.
A field's description says what would be right, in the words of the error message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

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
from halfstep.config.toml import toml_value
from halfstep.errors import ConfigError

Auto = Literal["auto"]
Count = Annotated[int, Field(gt=0)]
CountOrNone = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
AtLeastZero = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[list[Beta], Field(min_length=2, max_length=2)]
Paths = Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
Names = Paths
Reference = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
Word = Field(strict=False)
"""A closed list is written as a string."""
Loggers = Annotated[
    list[Annotated[LoggerName, Word]], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]

WHOLE = 'a whole number of {} above 0, or "auto"'
FROM_ZERO = 'a whole number of {} above 0, 0 for none, or "auto"'
NUMBER = 'a number above 0, or "auto"'
CLIP = 'a number above 0, 0 for no clipping, or "auto"'
YES_OR_NO = 'true, false or "auto"'
OTHER_WORDS = {
    "lr": "optimizer.learning_rate",
    "steps": "limits.updates",
    "max_steps": "limits.updates",
    "batch_size": "batch.global",
    "micro_batch": "batch.micro",
    "accumulate": "batch.global",
    "dtype": "precision",
    "fsdp": "sharding",
    "zero": "sharding",
    "amp": "precision",
    "optim": "optimizer.name",
    "context": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "output_dir": "run.folder",
}
"""What other tools call a key, for the hint when it is unknown."""
CALLABLE = 'a module and a name in it, as "package.module:factory"'
NAMES = 'a name or pattern of names, as "model.layers.*", or a list of them'
FILES = "a path or pattern of files, or a list of them"


def _key(right: str) -> Any:
    return Field(None, description=right)


def _section(kind: type[Section]) -> Any:
    return Field(default_factory=kind)


def _of_factory(value: Any) -> Any:
    """`model = "package.module:factory"` is short for a section with that factory."""
    return {"factory": value} if isinstance(value, str) else value


class Section(BaseModel):
    """A table of the configuration."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelSection(Section):
    """Which model: a local Hugging Face folder, an architecture with its configuration, or one of the user's own."""

    path: str | None = _key("the path of a local Hugging Face model folder")
    architecture: str | None = _key('the name of a model in transformers, as "llama", "gpt2", "bert" or "vit"')
    factory: Reference | None = _key(CALLABLE)
    config: dict[str, Any] | None = _key("a table of the architecture's own configuration keys, or of the factory's arguments")
    task: Annotated[Task, Word] | Auto | None = _key(
        '"causal-lm", "masked-lm", "sequence-classification", "image-classification", "own" or "auto"'
    )
    loss: Reference | None = _key(CALLABLE)
    frozen: Names | None = _key(NAMES)
    attention: Annotated[Attention, Word] | Auto | None = _key('"auto", "sdpa", "eager" or "matmul"')
    checkpoint_activations: bool | Auto | None = _key(YES_OR_NO)
    compile: bool | Auto | None = _key(YES_OR_NO)
    loss_chunk: CountOrNone | Auto | None = _key('a whole number of tokens above 0, 0 for all at once, or "auto"')
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | Auto | None = _key('a share of at least 0 and below 1, or "auto"')


class LoraSection(Section):
    """Adapters of low rank, which are trained in place of the weights that they stand beside."""

    rank: Count | Auto | None = _key('a whole number above 0, or "auto"')
    alpha: Positive | Auto | None = _key(NUMBER)
    dropout: Annotated[float, Field(ge=0, lt=1)] | Auto | None = _key('a share of at least 0 and below 1, or "auto"')
    targets: Names | Auto | None = _key(NAMES)


class DataSection(Section):
    """Which text, rows or pictures, how they become tokens, how long the sequences are and what fills them."""

    corpus: Annotated[Corpus, Word] | Auto | None = _key('"python-stdlib"')
    files: Paths | None = _key(FILES)
    format: Annotated[DataFormat, Word] | Auto | None = _key('"text", "jsonl", "csv", "parquet", "dataset", "images" or "auto"')
    kind: Annotated[DataKind, Word] | Auto | None = _key('"text", "chat", "completion", "label" or "auto"')
    factory: Reference | None = _key(CALLABLE)
    config: dict[str, Any] | None = _key("a table of the factory's arguments")
    classes: list[str] | Auto | None = _key('a list of the names of all classes, as ["cat", "dog"], or "auto"')
    image_size: Count | Auto | None = _key('a whole number of pixels above 0, or "auto"')
    columns: Paths | Auto | None = _key('the name of a column, or a list of names, as ["prompt", "completion"]')
    packing: bool | Auto | None = _key(YES_OR_NO)
    too_long: Annotated[TooLong, Word] | Auto | None = _key('"cut", "drop", "split" or "auto"')
    tokenizer: str | None = _key('"bytes", "auto" or the path of a folder that holds a tokenizer')
    sequence_length: Annotated[int, Field(gt=1)] | Auto | None = _key('a whole number of tokens above 1, or "auto"')
    workers: CountOrNone | Auto | None = _key(FROM_ZERO.format("processes"))


class BatchSection(Section):
    """How many sequences an update sees, and how many go through the model at a time."""

    global_: Count | Auto | None = Field(None, alias="global", description=WHOLE.format("sequences"))
    micro: Count | Auto | None = _key(WHOLE.format("sequences"))
    tail: Annotated[Tail, Word] | Auto | None = _key('"step", "carry" or "drop"')


class OptimizerSection(Section):
    """The optimizer, its settings, and the clipping of gradients before it."""

    name: Annotated[OptimizerName, Word] | Auto | None = _key('"adamw", "adamw-8bit", "adam", "sgd" or "adafactor"')
    learning_rate: Positive | Auto | None = _key(NUMBER)
    weight_decay: AtLeastZero | Auto | None = _key('a number of at least 0, or "auto"')
    betas: Betas | Auto | None = _key('two numbers of at least 0 and below 1, as [0.9, 0.95], or "auto"')
    eps: Positive | Auto | None = _key(NUMBER)
    momentum: Beta | Auto | None = _key('a number of at least 0 and below 1, or "auto"')
    clip_norm: AtLeastZero | Auto | None = _key(CLIP)
    clip_value: AtLeastZero | Auto | None = _key(CLIP)
    ema_decay: Beta | Auto | None = _key('a number above 0 and below 1, 0 for no averaged weights, or "auto"')


class SchedulerSection(Section):
    """How the learning rate moves over applied updates."""

    name: Annotated[SchedulerName, Word] | Auto | None = _key('"cosine", "linear", "constant" or "wsd"')
    warmup_updates: CountOrNone | Auto | None = _key(FROM_ZERO.format("updates"))
    decay_updates: CountOrNone | Auto | None = _key(FROM_ZERO.format("updates"))
    final_share: Annotated[float, Field(ge=0, le=1)] | Auto | None = _key('a share of the learning rate from 0 to 1, or "auto"')


class EvaluationSection(Section):
    """What is held out, and when it is looked at."""

    every_updates: CountOrNone | Auto | None = _key(FROM_ZERO.format("updates"))
    share: Annotated[float, Field(gt=0, lt=1)] | Auto | None = _key('a share of the text above 0 and below 1, or "auto"')
    files: Paths | None = _key(FILES)
    keep_best: bool | Auto | None = _key(YES_OR_NO)
    patience: CountOrNone | Auto | None = _key(FROM_ZERO.format("evaluations"))


class LimitsSection(Section):
    """When the run ends: at the first limit that is reached."""

    updates: Count | None = _key("a whole number of applied updates above 0")
    epochs: Count | None = _key("a whole number of passes over the data above 0")
    tokens: Count | None = _key("a whole number of tokens above 0")
    minutes: Positive | None = _key("a number of minutes above 0")


class CheckpointSection(Section):
    """When the whole state of the run is saved, and how many of the last checkpoints are kept."""

    every_updates: CountOrNone | Auto | None = _key(FROM_ZERO.format("updates"))
    every_minutes: AtLeastZero | Auto | None = _key('a number of minutes above 0, 0 for none, or "auto"')
    keep: Count | Auto | None = _key(WHOLE.format("checkpoints"))


class RunSection(Section):
    """Where the run is kept and what is written."""

    folder: str | None = _key("the path of a folder that does not exist yet")
    seed: CountOrNone | Auto | None = _key('a whole number of at least 0, or "auto"')
    deterministic: bool | Auto | None = _key(YES_OR_NO)
    tensorboard: bool | Auto | None = _key(YES_OR_NO)
    loggers: Loggers | Auto | None = _key('"mlflow", "wandb" or a list of both')
    rank_minutes: Annotated[float, Field(gt=0)] | Auto | None = _key('a number of minutes above 0, or "auto"')


class Written(Section):
    """A whole configuration as the user wrote it."""

    precision: Annotated[Precision, Word] | Auto | None = _key('"auto", "fp32", "fp16", "bf16" or "bf16-pure"')
    device: str | None = _key('"auto" or the name of a device, as "cpu", "cuda" or "cuda:1"')
    processes: Count | Auto | None = _key(WHOLE.format("processes"))
    sharding: Annotated[Sharding, Word] | Auto | None = _key('"auto", "none", "ddp", "zero2" or "zero3"')
    watch: bool | Auto | None = _key(YES_OR_NO)
    model: Annotated[ModelSection, BeforeValidator(_of_factory)] = _section(ModelSection)
    lora: LoraSection | None = _key("a table with the keys rank, alpha, dropout and targets")
    data: DataSection = _section(DataSection)
    batch: BatchSection = _section(BatchSection)
    optimizer: OptimizerSection = _section(OptimizerSection)
    scheduler: SchedulerSection = _section(SchedulerSection)
    evaluation: EvaluationSection = _section(EvaluationSection)
    limits: LimitsSection = _section(LimitsSection)
    checkpoint: CheckpointSection = _section(CheckpointSection)
    run: RunSection = _section(RunSection)


def validate(table: Mapping[str, Any]) -> Written:
    """The configuration in `table`, checked key by key.

    Raises:
        ConfigError: a key is unknown or a value is of the wrong kind; one sentence about the first fault.
    """
    try:
        return Written.model_validate(dict(table))
    except ValidationError as error:
        faults = error.errors(include_url=False)
        unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
        path = [str(part) for part in (unknown or faults)[0]["loc"]]
        raise ConfigError(_unknown(path) if unknown else _wrong(path, table)) from None


def known_keys() -> list[str]:
    """Every dotted key that a configuration may have, in the order of the schema."""
    return [".".join(path) for path in _paths(Written, ())]


def _paths(kind: type[Section], prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, field in _fields(kind).items():
        inner = _inner_section(field)
        if inner is None:
            yield (*prefix, key)
        else:
            yield from _paths(inner, (*prefix, key))


def _fields(kind: type[Section]) -> dict[str, Any]:
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def _inner_section(field: Any) -> type[Section] | None:
    kinds = [kind for kind in (get_args(field.annotation) or (field.annotation,)) if isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, Section)), None)


def _unknown(path: list[str]) -> str:
    key, keys = ".".join(path), known_keys()
    near = _nearest(path, keys)
    hint = f"Did you mean {near}?" if near else f"The keys are {', '.join(_siblings(path, keys))}."
    return f"`{key}` is not a key of the configuration. {hint}"


def _nearest(path: list[str], keys: list[str]) -> str | None:
    """The key or section that was probably meant: by its other name, by spelling, or by its last word alone."""
    key, word = ".".join(path), path[-1]
    if word in OTHER_WORDS:
        return f"`{OTHER_WORDS[word]}`"
    sections = {known.partition(".")[0] for known in keys if "." in known}
    if len(path) == 1 and (near := get_close_matches(key, sections, n=1, cutoff=0.7)):
        return f"[{near[0]}]"
    last_words = {known.rpartition(".")[2]: known for known in keys}
    if near := get_close_matches(key, keys, n=1, cutoff=0.75):
        return f"`{near[0]}`"
    near = get_close_matches(word, last_words, n=1, cutoff=0.75)
    return f"`{last_words[near[0]]}`" if near else None


def _siblings(path: list[str], keys: list[str]) -> list[str]:
    """The keys of the section that `path` names; at the top, the keys there and the sections."""
    if len(path) > 1:
        return [f"`{key}`" for key in keys if key.startswith(f"{path[0]}.")]
    return list(dict.fromkeys(f"[{key.partition('.')[0]}]" if "." in key else f"`{key}`" for key in keys))


def _wrong(path: list[str], table: Mapping[str, Any]) -> str:
    """The sentence about a value; `path` may go on into the branches of a union, which are not keys."""
    value: Any = table
    fields = _fields(Written)
    known: list[str] = []
    right = ""
    for part in path:
        if part not in fields:
            break
        known.append(part)
        value, field = value[part], fields[part]
        inner = _inner_section(field)
        fields = {} if inner is None else _fields(inner)
        right = field.description if inner is None else f"a section with the keys {', '.join(fields)}"
    return f"`{'.'.join(known)} = {toml_value(value)}` is not right: it must be {right}."
