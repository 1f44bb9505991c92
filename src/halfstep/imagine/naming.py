"""What the names that people use for numbers say, where the program itself does not."""

from __future__ import annotations

import re

from halfstep.imagine.values import NO_TAGS, Count, Ratio, Tags, Unknown, Value, tagged

_ACCUM = re.compile(
    r"accum|grad_acc|update_freq|(^|_)(ga_steps|iter_size|iters_to_acc)$|micro_?(steps|batches)$|(subdivisions|batch_splits?)$",
    re.I,
)
_EPOCHS = re.compile(r"(^|_)(n_?|num_?|max_?|total_?|train_?)*epochs$|^ne$|^max_epoch$|^total_epoch$|^n_epoch$|^num_epoch$", re.I)
_WORLD = re.compile(r"world(_?size)?$|^num_replicas$|^nprocs$|num_processes$|^n_gpus$|^ngpus", re.I)
_BATCH = re.compile(r"(^|_)(batch_?size|bsz?|bs)$", re.I)
_RANK = re.compile(r"(^|_)rank$|^global_rank$", re.I)
_OFF = re.compile(
    r"debug|dry|eval_only|only|test_mode|profile|resume|^skip|overfit|sanity|disable|^no_|verbose|(^|_)(stop|abort|kill)(_|$)",
    re.I,
)
_SWITCH = re.compile(r"amp$|fp16|bf16|half|mixed|fused|^use_|distributed|ddp", re.I)
_INDEX = re.compile(
    r"^(i|it|idx|step|iter|iteration|batch_idx|batch_i|batch_index|i_batch|micro_step|batch_id|n_iter|data_iter_step)$"
)

MODEL = re.compile(
    r"(^|[._])(model|net|network|encoder|decoder|backbone|generator|discriminator|critic|actor|policy|unet|vae|student|teacher|netg|netd|net_g|net_d)(_?\w{0,6})?$"
    r"|(^|[._])(g|d)(_\w{1,6}|\d)?$",
    re.I,
)
"""Names that people give to models."""

MAIN = re.compile(
    r"is_(main|master|primary|global_zero|rank_zero|local_main|world_process_zero|first)|rank_?zero|on_main|main_process", re.I
)
"""Names of what asks for the first rank, or runs on it only."""


def tags_for(name: str) -> Tags:
    """What a number of this name counts."""
    if _ACCUM.search(name):
        return frozenset({"accum"})
    if _EPOCHS.search(name):
        return frozenset({"epochs"})
    if _WORLD.search(name):
        return frozenset({"world"})
    if _BATCH.search(name):
        return frozenset({"batch size"})
    return NO_TAGS


def hinted(name: str, value: Value) -> Value:
    """A value as it becomes when it gets this name: numbers get their unit, unknown counts a small number."""
    if isinstance(value, Unknown):
        return _guessed(name, value)
    if type(value) in (int, float, Count, Ratio):
        tags = tags_for(name)
        if tags and not (isinstance(value, (Count, Ratio)) and value.tags):
            if (
                "accum" in tags
                and isinstance(value, int)
                and value in (0, 1)
                and not name.startswith("_")
                and name.endswith(("steps", "accumulation", "iter"))
            ):
                value = 4
            return tagged(int(value) if isinstance(value, int) else float(value), tags)
    return value


def _guessed(name: str, value: Unknown) -> Value:
    if value.thing is not None or value.children:
        return value
    if _RANK.search(name):
        value.tags |= {"rank"}
        return value
    tags = tags_for(name)
    if (value.has_default and isinstance(value.default, (str, bool))) or not tags or value.tags & {"data"}:
        return value
    number = 4 if "accum" in tags else 16 if "batch size" in tags else 2
    return tagged(number, tags | {"guessed"})


def usually_off(name: str) -> bool:
    """Whether a flag of this name is off in the usual run."""
    return bool(_OFF.search(name.rsplit(".", 1)[-1]))


def as_flag(name: str, default: Value) -> Value:
    """The default of a parameter that nobody passed: a switch that is off may be on in another world."""
    return Unknown(name, default=False, has_default=True) if default is False and _SWITCH.search(name) else default


def is_index(name: str) -> bool:
    """Whether a parameter of this name counts micro-batches."""
    return bool(_INDEX.match(name))
