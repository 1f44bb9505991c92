"""What has to be known about machine, model and data before "auto" can become a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from halfstep.config.choice import Choice
from halfstep.config.options import Attention, Precision, TooLong


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Where the run will be.

    Attributes:
        device: the kind of device, as torch names it: "cpu", "cuda", "mps", ...
        device_name: what the device calls itself.
        cores: processor cores that this process may use.
        memory_bytes: memory of the device (of the machine for the CPU); `None` where it is not known.
        world_size: ranks that are already running; 1 outside torchrun.
        ranks_sharing_memory: ranks whose device that memory is: those on this machine for the CPU, else 1.
    """

    device: str
    device_name: str
    cores: int
    memory_bytes: int | None
    world_size: int
    ranks_sharing_memory: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model's configuration says, before a weight is loaded.

    Attributes:
        parameters: the number of them; exact where the model could be counted without memory.
        hidden: the width of the residual stream; `None` where there is none.
        layers: the number of blocks; `None` where it is not known.
        vocabulary: the number of tokens that it knows; `None` where it knows none.
        context: the most tokens it can look at; `None` where it has no limit.
        attentions: the ways in which its attention can be computed.
    """

    parameters: int
    hidden: int | None
    layers: int | None
    vocabulary: int | None
    context: int | None
    attentions: tuple[Attention, ...] = (Attention.EAGER,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What the data are when they are cut into sequences.

    Attributes:
        sequences: how many there are.
        predicted: tokens that are predicted in all of them.
    """

    sequences: int
    predicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """How much text there is.

    Attributes:
        text_bytes: bytes of all text, held out or not; `None` where samples are held out by their number.
        train_tokens: tokens to train on.
        train_files: files they come from.
        evaluation_tokens: tokens held out.
        evaluation_bytes: bytes of text held out; `None` where there are none.
        held_out: how the held-out text was chosen, as a sentence.
        longest: tokens of the longest document; `None` where the text is one stream.
        samples: samples to train on, where their number does not depend on a length; `None` for text.
        classes: the classes that a sample can have, and why; `None` where it has none.
        image_size: the pixels along a side of a picture, and why; `None` where there are no pictures.
        cut: what sequences of a length, packed or not, with that for documents which are longer, come to; `None` for a stream.
    """

    text_bytes: int | None
    train_tokens: int
    train_files: int
    evaluation_tokens: int
    evaluation_bytes: int | None
    held_out: str
    longest: int | None = None
    samples: int | None = None
    classes: Choice[tuple[str, ...]] | None = None
    image_size: Choice[int] | None = None
    cut: Callable[[int, bool | None, TooLong], Cut] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that resolving needs to know.

    Attributes:
        machine: where the run will be.
        model: what the model's configuration says.
        data: how much text there is.
        started: when the run was started, for the name of its folder.
        precision: what measuring the model in each precision led to; `None` as long as that was not done.
        packing: what trying the model on packed documents led to; `None` as long as that was not done.
        loss_chunk: what trying the model without its logits led to; `None` as long as that was not done.
        workers: what making a few micro-batches led to; `None` as long as that was not done.
    """

    machine: MachineFacts
    model: ModelFacts
    data: DataFacts
    started: datetime
    precision: Choice[Precision] | None = None
    packing: Choice[bool] | None = None
    loss_chunk: Choice[int] | None = None
    workers: Choice[int] | None = None
