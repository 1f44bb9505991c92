"""How an update is computed: everything that memory and time depend on, beside the model and the device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from halfstep.config.options import Attention, Precision, Sharding


class Checkpointing(str, Enum):
    """Which activations are computed again in the backward."""

    NONE = "none"
    SELECTIVE = "selective"
    """All but attention and every second matrix product of a block (torchtitan's "op")."""
    FULL = "full"
    """Everything but the input of each block."""
    OFFLOAD = "offload"
    """As full, with those inputs in the machine's own memory."""

    def __str__(self) -> str:
        return self.value

    @property
    def keeps_blocks(self) -> bool:
        """Whether backward finds what a block has saved, without computing the block again."""
        return self is Checkpointing.NONE


class Optimizer(str, Enum):
    """What keeps states."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw-8bit"
    """Adam whose two states take a byte each, in blocks of 256 with a scale (Dettmers et al. 2021)."""
    ADAFACTOR = "adafactor"
    """A row and a column of second moments for each matrix."""
    LION = "lion"
    """One state."""
    SGD = "sgd"
    """No state."""
    MOMENTUM = "sgd-momentum"
    """One state."""

    def __str__(self) -> str:
        return self.value


class Adapter(str, Enum):
    """What is trained beside a frozen model."""

    LORA = "lora"
    PREFIX = "adapter"
    """LLaMA-Adapter: a learned prompt with a gate in every block but the first two."""
    SCALES = "adapter-v2"
    """LLaMA-Adapter V2: the above, and a scale and a bias on every product; normalisations are trained too."""

    def __str__(self) -> str:
        return self.value


class BaseWeights(str, Enum):
    """How the frozen weights of the blocks are kept."""

    PLAIN = "as computed"
    NF4 = "nf4"
    """4 bits and an FP32 scale a block of 64 (Dettmers et al. 2023)."""
    NF4_DOUBLE = "nf4-dq"
    """With the scales in a byte."""
    NF4_TORCHAO = "nf4-torchao"
    """torchao's: scales in a byte, and a product that keeps nothing for a frozen weight."""

    def __str__(self) -> str:
        return self.value

    @property
    def four_bits(self) -> bool:
        """Whether the weights take four bits."""
        return self is not BaseWeights.PLAIN

    @property
    def bitsandbytes(self) -> bool:
        """Whether bitsandbytes multiplies them."""
        return self in (BaseWeights.NF4, BaseWeights.NF4_DOUBLE)


class Loss(str, Enum):
    """How logits become a loss."""

    WHOLE = "whole"
    """All logits at once, in FP32."""
    PARTS = "parts"
    """All logits are made at once; they become FP32, loss and gradient in eight parts (torchtune, torchtitan)."""
    CHUNKED = "chunked"
    """Logits are made and used a part at a time and never kept, as halfstep's `train` does."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One way to train.

    Attributes:
        micro_batch: sequences (images) that go through the model at a time, on a rank.
        sequence: tokens of each.
        accumulation: micro-batches of an update.
        ranks: data-parallel ranks.
        tensor_ranks: ranks that a layer is divided over, with sequence parallelism between (Korthikanti et al. 2022).
        nodes: machines that the ranks are on.
        precision: the arithmetic.
        weights: how the weights of the blocks are kept.
        sharding: what is divided.
        checkpointing: what is computed again.
        optimizer: what keeps states.
        full_embedding_states: whether an 8-bit optimizer keeps those of embeddings in FP32, as transformers does.
        fused: whether the optimizer is one kernel; otherwise it keeps a copy of a state while it steps.
        step_in_backward: whether each parameter is stepped as soon as its gradient is there.
        gradients_stay: whether gradients are set to 0 after a step instead of being freed.
        adapter: what is trained beside frozen weights; `None` trains everything.
        trainable: parameters that are trained: those of an adapter, or what is left where some are frozen; `None` for all.
        adapter_dropout: whether the adapter drops inputs, and so keeps a copy of its own.
        attention: how attention is computed.
        flash: its kernel: FlashAttention 1, 2 (torch's own), or 3 for one made for the device (cuDNN, FlashAttention 3).
        adapts_all: whether all products of a block have an adapter; otherwise query and value have one.
        compiled: whether a compiler fuses what lies between matrix products.
        loss: how logits become a loss.
        loss_chunk: tokens of a part of a chunked loss; an eighth of all if not given.
        labels_samples: whether there is one prediction a sample, of a class, instead of one a token.
        fused_loss: whether a compiler fuses the loss.
        parallel_loss: whether `tensor_ranks` divide the logits too.
        logits_held: whether the caller holds the logits until the backward is through.
        float_loss: whether logits are turned into FP32 for the loss.
        sync_every: whether gradients are reduced in every micro-batch; otherwise only in the last, and until then whole
            gradients are kept on each rank.
        reduce_bytes: bytes of a gradient while it is reduced.
        eight_bit_products: whether the products of the blocks are computed in FP8.
    """

    micro_batch: int
    sequence: int
    accumulation: int = 1
    ranks: int = 1
    tensor_ranks: int = 1
    nodes: int = 1
    precision: Precision = Precision.BF16
    weights: BaseWeights = BaseWeights.PLAIN
    sharding: Sharding = Sharding.NONE
    checkpointing: Checkpointing = Checkpointing.NONE
    optimizer: Optimizer = Optimizer.ADAMW
    full_embedding_states: bool = False
    fused: bool = True
    step_in_backward: bool = False
    gradients_stay: bool = False
    adapter: Adapter | None = None
    trainable: int | None = None
    adapter_dropout: bool = True
    attention: Attention = Attention.SDPA
    flash: int = 2
    adapts_all: bool = False
    compiled: bool = False
    loss: Loss = Loss.WHOLE
    loss_chunk: int | None = None
    labels_samples: bool = False
    fused_loss: bool = False
    parallel_loss: bool = True
    logits_held: bool = False
    float_loss: bool = True
    sync_every: bool = True
    reduce_bytes: int = 4
    eight_bit_products: bool = False

    @property
    def autocast(self) -> bool:
        """Whether FP32 parameters are cast for each product."""
        return self.precision in (Precision.FP16, Precision.BF16)

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number that goes into a product."""
        return 4 if self.precision is Precision.FP32 else 2

    @property
    def state_bytes(self) -> int:
        """Bytes of a parameter, of its gradient and of each of its optimizer states: autocast leaves them in FP32."""
        return 2 if self.precision is Precision.BF16_PURE else 4

    @property
    def stream_bytes(self) -> int:
        """Bytes of a number of the residual stream. FSDP2 casts the weights, and the stream with them; autocast does not."""
        return 2 if self.sharding.divides and self.autocast else self.state_bytes

    @property
    def cells(self) -> int:
        """Tokens (images) of a micro-batch on one rank."""
        return self.micro_batch * self.sequence

    @property
    def full_training(self) -> bool:
        """Whether all weights are trained."""
        return self.adapter is None

    def trained_of(self, parameters: int) -> int:
        """How many are trained, of a model with so many parameters."""
        return parameters if self.trainable is None else self.trainable

    @property
    def global_batch(self) -> int:
        """Sequences of an update on all ranks."""
        return self.micro_batch * self.accumulation * self.ranks
