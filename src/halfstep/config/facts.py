"""What has to be known about machine, model and data before "auto" can become a value."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    parameters: int
    hidden: int
    layers: int
    vocabulary: int
    context: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """How much text there is.

    Attributes:
        train_tokens: tokens to train on.
        train_files: files they come from.
        evaluation_tokens: tokens held out.
        evaluation_bytes: bytes of text held out.
        held_out: how the held-out text was chosen, as a sentence.
    """

    train_tokens: int
    train_files: int
    evaluation_tokens: int
    evaluation_bytes: int
    held_out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that resolving needs to know."""

    machine: MachineFacts
    model: ModelFacts
    data: DataFacts
