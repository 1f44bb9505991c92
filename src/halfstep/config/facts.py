"""What has to be known about machine, model and data before "auto" can become a value."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from halfstep.config.choice import Choice
from halfstep.config.options import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Where the run will be.

    Attributes:
        device: the kind of device, as torch names it: "cpu", "cuda", "mps", ...
        device_name: what the device calls itself.
        cores: processor cores that this process may use.
        memory_bytes: memory of the device (of the machine for the CPU); `None` where it is not known.
        world_size: ranks that are already running; 1 outside torchrun.
    """

    device: str
    device_name: str
    cores: int
    memory_bytes: int | None
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model's configuration says, before a weight is loaded.

    Attributes:
        parameters: the number of them; exact where the model could be counted without memory.
        hidden: the width of the residual stream.
        layers: the number of blocks.
        vocabulary: the number of tokens that it knows.
        context: the most tokens it can look at; `None` where it has no limit.
        has_sdpa: whether its attention can be `scaled_dot_product_attention`.
    """

    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    context: int | None
    has_sdpa: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """How much text there is.

    Attributes:
        text_bytes: bytes of all text, held out or not.
        train_tokens: tokens to train on.
        train_files: files they come from.
        evaluation_tokens: tokens held out.
        evaluation_bytes: bytes of text held out.
        held_out: how the held-out text was chosen, as a sentence.
    """

    text_bytes: int
    train_tokens: int
    train_files: int
    evaluation_tokens: int
    evaluation_bytes: int
    held_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that resolving needs to know.

    Attributes:
        machine: where the run will be.
        model: what the model's configuration says.
        data: how much text there is.
        started: when the run was started, for the name of its folder.
        precision: what measuring the model in each precision led to; `None` as long as that was not done.
        loss_chunk: what trying the model without its logits led to; `None` as long as that was not done.
    """

    machine: MachineFacts
    model: ModelFacts
    data: DataFacts
    started: datetime
    precision: Choice[Precision] | None = None
    loss_chunk: Choice[int] | None = None
