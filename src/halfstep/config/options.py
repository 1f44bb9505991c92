"""The closed lists of values that a setting can have."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from halfstep.errors import ConfigError

Option = TypeVar("Option", bound=Enum)


class Precision(str, Enum):
    """The arithmetic of forward and backward."""

    FP32 = "fp32"
    """FP32 throughout, with TF32 matmuls on GPUs that have them."""
    FP16 = "fp16"
    """FP16 autocast over FP32 parameters, with loss scaling."""
    BF16 = "bf16"
    """BF16 autocast over FP32 parameters."""
    BF16_PURE = "bf16-pure"
    """Parameters, gradients and optimizer states in BF16; no autocast, no FP32 master weights."""

    def __str__(self) -> str:
        return self.value


class Sharding(str, Enum):
    """What each of several ranks holds."""

    NONE = "none"
    """Everything, without another rank."""
    DDP = "ddp"
    """Everything; gradients are averaged over the ranks."""
    ZERO2 = "zero2"
    """Its shard of gradients and optimizer states; parameters are gathered once a window."""
    ZERO3 = "zero3"
    """Its shard of parameters, gradients and optimizer states; parameters are gathered block by block."""

    def __str__(self) -> str:
        return self.value

    @property
    def divides(self) -> bool:
        """Whether states are divided over the ranks."""
        return self in (Sharding.ZERO2, Sharding.ZERO3)


class Tail(str, Enum):
    """What becomes of the last micro-batches of an epoch when they do not fill a window."""

    STEP = "step"
    """They are a shorter window of their own, exactly weighted."""
    CARRY = "carry"
    """They begin the first window of the next epoch."""
    DROP = "drop"
    """They are not used."""

    def __str__(self) -> str:
        return self.value


class Metric(str, Enum):
    """What says how good a model is on held-out data, and which one is the best."""

    PERPLEXITY = "perplexity"
    """e to the loss, of which less is better."""
    ACCURACY = "accuracy"
    """The share that is right, of which more is better; of equals, the one of lower loss."""
    LOSS = "loss"
    """The loss itself."""

    def __str__(self) -> str:
        return self.value


class Task(str, Enum):
    """What a model learns to do."""

    CAUSAL_LM = "causal-lm"
    """To predict the next token."""
    MASKED_LM = "masked-lm"
    """To predict tokens that were hidden."""
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    """To tell the class of a text."""
    IMAGE_CLASSIFICATION = "image-classification"
    """To tell the class of a picture."""
    OWN = "own"
    """What the user's own loss says, on the user's own data."""

    @property
    def metric(self) -> Metric:
        """What says which model is the best."""
        if self in (Task.CAUSAL_LM, Task.MASKED_LM):
            return Metric.PERPLEXITY
        return Metric.LOSS if self is Task.OWN else Metric.ACCURACY

    @property
    def unit(self) -> str:
        """What its loss counts: what a weight of 1 is."""
        units = {Task.SEQUENCE_CLASSIFICATION: "texts", Task.IMAGE_CLASSIFICATION: "images", Task.OWN: "counted"}
        return units.get(self, "tokens")

    @property
    def has_classes(self) -> bool:
        """Whether each sample has a class."""
        return self in (Task.SEQUENCE_CLASSIFICATION, Task.IMAGE_CLASSIFICATION)

    def __str__(self) -> str:
        return self.value


class Corpus(str, Enum):
    """A text that is found on every machine."""

    PYTHON_STDLIB = "python-stdlib"
    """The source text of Python's standard library."""

    def __str__(self) -> str:
        return self.value


class Attention(str, Enum):
    """How attention is computed."""

    SDPA = "sdpa"
    """`scaled_dot_product_attention`, which picks a fused kernel."""
    EAGER = "eager"
    """Plain matmuls and a softmax, all of the scores kept until backward."""
    MATMUL = "matmul"
    """The same in fewer passes over the scores: for short sequences in BF16 on a CPU."""

    def __str__(self) -> str:
        return self.value


class OptimizerName(str, Enum):
    """The optimizers that a configuration can name."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw-8bit"
    """AdamW of `bitsandbytes`, whose two averages take a byte a parameter each instead of four."""
    ADAM = "adam"
    SGD = "sgd"
    ADAFACTOR = "adafactor"

    def __str__(self) -> str:
        return self.value


class SchedulerName(str, Enum):
    """How the learning rate goes after the warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"
    WSD = "wsd"
    """Warm-up, stable, decay."""

    def __str__(self) -> str:
        return self.value


class LoggerName(str, Enum):
    """The services beside log and TensorBoard that a run can be told to, through their own libraries."""

    MLFLOW = "mlflow"
    WANDB = "wandb"

    def __str__(self) -> str:
        return self.value


class DataFormat(str, Enum):
    """How rows are written."""

    JSON_LINES = "jsonl"
    """A table a line."""
    CSV = "csv"
    """A line of column names, then a row a line."""
    PARQUET = "parquet"
    """Columns with types."""
    TEXT = "text"
    """A document a file, in the column `text`."""
    DATASET = "dataset"
    """A folder that `datasets` has saved to disk."""
    IMAGES = "images"
    """A folder of folders, one a class, of picture files."""

    def __str__(self) -> str:
        return self.value


class DataKind(str, Enum):
    """What a row is."""

    TEXT = "text"
    """A text, all of which is to be predicted."""
    CHAT = "chat"
    """A list of turns, of which the assistant's are to be predicted."""
    COMPLETION = "completion"
    """A prompt and its completion, of which the completion is to be predicted."""
    LABEL = "label"
    """A text or a picture, and its class."""

    def __str__(self) -> str:
        return self.value


class TooLong(str, Enum):
    """What becomes of a document that is longer than a sequence."""

    CUT = "cut"
    """Its start is used, the rest is not."""
    DROP = "drop"
    """It is not used."""
    SPLIT = "split"
    """It becomes several documents, which do not see each other."""

    def __str__(self) -> str:
        return self.value


def option(kind: type[Option], value: object, *, name: str, also: tuple[str, ...] = ()) -> Option:
    """The member of `kind` that `value` names.

    Args:
        kind: the closed list.
        value: a member or its string.
        name: what the user calls the setting, for the message.
        also: further strings that the setting takes, to be named in the message.

    Raises:
        ConfigError: `value` is not in the list.
    """
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(f'"{word}"' for word in (*also, *(member.value for member in kind)))
        raise ConfigError(f"`{name}` is {value!r}, which is not one of {known}.") from None
