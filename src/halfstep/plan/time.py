"""The time of an update: what is computed at the rate that it reaches, what is moved at the bandwidth that it gets.

Each part is work over rate. The work follows from shapes; the rates are those of `accelerators.tsv` times a few shares, each of
which is one physical fact, the same for every model and machine: they were set from runs of several teams (see `SHARES`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfstep.config.options import Attention, Precision, Sharding
from halfstep.plan.accelerators import Accelerator
from halfstep.plan.activations import block_inventory, predictions
from halfstep.plan.convnet import Convnet
from halfstep.plan.model_facts import Model, Transformer
from halfstep.plan.recipe import Checkpointing, Loss, Optimizer, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What part of a nominal rate a generation of devices reaches in training.

    Attributes:
        matmul: of the best rate of large matrix products, by those of a model: clocks fall under load, and shapes differ.
        eight_bits: as `matmul`, for FP8, whose scaling takes passes of its own.
    """

    matmul: float = 0.75
    eight_bits: float = 0.6


SHARES: Mapping[str, Shares] = {
    "Ampere": Shares(matmul=0.82),
    "Hopper": Shares(matmul=0.72),
    "Blackwell": Shares(matmul=0.65),
}
"""By generation, from published runs of six teams; without any one team the others give shares that differ by 0.04 at most, and
predict its runs with a median error of 11 % (`python -m benchmarks.planner`). A generation that is absent has the shares of
`Shares()`, and a wide range.
"""
ATTENTION: Mapping[str, tuple[float, float, float]] = {
    "Ampere": (0.33, 0.6, 0.6),
    "Hopper": (0.17, 0.34, 0.5),
    "Blackwell": (0.1, 0.2, 0.4),
}
"""Share of the peak that FlashAttention 1, 2, and a kernel made for the generation reach, forward and backward together.

Dao (2023): FlashAttention 1 reaches 25 to 40 % of an A100, 2 reaches 50 to 73 %, and 335 TFLOP/s of an H100; neither uses the
instructions of Hopper, so that 1 gains there what multiprocessors and clocks gain: 1.5 times an A100. Blackwell: as much more
again. Shah et al. (2024): FlashAttention 3 and cuDNN reach 550 to 650 TFLOP/s of an H100 forward, and less backward.
"""
ATTENTION_ELSEWHERE = (0.25, 0.4, 0.4)
BANDWIDTH = 0.8
"""Share of the memory's bandwidth that elementwise work reaches."""
LINK = 0.75
"""Share of a link's rate that collectives reach: 0.78 on an A100 (ml-engineering, nccl-tests)."""
HIDDEN = 0.8
"""Share of communication that compute hides where there is enough of it."""
CONVOLUTIONS = 0.5
"""Share of the rate of matrix products that convolutions reach."""
PASSES = 4.0
"""How often a byte that is saved is moved: written and read in the forward, read in the backward with a gradient written."""
PASSES_AGAIN = 1.5
"""The same for one that is computed again."""
LOGIT_PASSES_BYTES = 32
"""Bytes moved for each logit that becomes FP32, log-probability and gradient."""
STEP_PASSES = 10
"""Times that a step reads or writes a state, gradient or parameter, with clipping."""
ATTENTION_BACKWARD = 2.5
"""FlashAttention's backward computes the scores again: five products against two (Dao et al. 2022)."""
LAUNCH_S = 6e-6
"""Time to launch a kernel from Python."""
LAUNCHES = 90
"""Kernels of a block, forward and backward; a compiler leaves half."""
NETWORK = 200e9
"""Bytes a second between two machines of eight: 1,600 Gbit/s."""
WIDTH_OF_FULL_RATE = 2048
"""Width from which products of a model are large ones."""
SPREAD = 0.22
"""Half-width of the range of a compute-bound run on one machine: nine in ten published runs lie within."""
WIDE_SPREAD = 0.45
"""The same for narrow models, several machines, and what was never compared with a run."""
CALIBRATED_SPREAD = 0.15
"""The same where the machine was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one device reaches.

    Attributes:
        matmul: FLOP/s of the matrix products of a model.
        attention: FLOP/s of fused attention.
        bandwidth: bytes a second of elementwise work.
        link: bytes a second of a collective within a machine.
        launch_s: seconds to launch one kernel.
        convolutions: share of the rate of products that convolutions reach.
        full_width: width from which products of a model are large ones; narrower ones reach less.
        spread: share by which a compute-bound run on one machine may be faster or slower.
    """

    matmul: float
    attention: float
    bandwidth: float
    link: float
    launch_s: float = LAUNCH_S
    convolutions: float = CONVOLUTIONS
    full_width: int = WIDTH_OF_FULL_RATE
    spread: float = WIDE_SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How long an update takes.

    Attributes:
        parts: seconds of each part of an update.
        update_s: seconds of an update.
        rate: tokens (images) a second on all devices.
        spread: share by which the truth may lie above or below.
    """

    parts: Mapping[str, float]
    update_s: float
    rate: float
    spread: float

    @property
    def rate_low(self) -> float:
        """The lower end of the range."""
        return self.rate * (1 - self.spread)

    @property
    def rate_high(self) -> float:
        """The upper end of the range."""
        return self.rate * (1 + self.spread)


def rates_of(device: Accelerator, recipe: Recipe, shares: Shares | None = None) -> Rates:
    """What `device` reaches in the precision of the recipe; FP32 products are TF32 ones where the device has them.

    Args:
        device: from the table.
        recipe: how is trained.
        shares: what part of the nominal rates; those of its generation if not given.
    """
    shares = shares or SHARES.get(device.generation, Shares())
    peaks = device.tflops
    low = peaks.get("bf16") or peaks.get("fp16") or peaks["fp32"]
    if recipe.precision is Precision.FP16:
        low = peaks.get("fp16") or low
    if recipe.precision is Precision.FP32:
        low = peaks.get("tf32") or peaks["fp32"]
    matmul = low * device.matmul_share * shares.matmul
    if recipe.eight_bit_products:
        matmul = max(matmul, peaks.get("fp8", 0.0) * device.matmul_share * shares.eight_bits)
    return Rates(
        matmul=matmul * 1e12,
        attention=low * ATTENTION.get(device.generation, ATTENTION_ELSEWHERE)[recipe.flash - 1] * 1e12,
        bandwidth=device.bandwidth * BANDWIDTH,
        link=device.link * LINK,
        spread=SPREAD if device.generation in SHARES else WIDE_SPREAD,
    )


def estimate(model: Model, recipe: Recipe, rates: Rates) -> Estimate:
    """The time of one update."""
    micro = _convolutions(model, recipe, rates) if isinstance(model, Convnet) else _transformer(model, recipe, rates)
    launches = _launches(model, recipe) * rates.launch_s
    compute_s = max(sum(micro.values()), launches)
    each = {**micro, "waiting for launches": compute_s - sum(micro.values()), **_tensor_parallel(model, recipe, rates)}
    parts = {name: seconds * recipe.accumulation for name, seconds in each.items()}
    parts["communication not hidden"] = _exposed(model, recipe, rates, compute_s)
    parts["optimizer step"] = _step(model, recipe, rates)
    update_s = sum(parts.values())
    a_micro_batch = recipe.micro_batch if model.unit == "images" else recipe.cells
    counted = a_micro_batch * recipe.accumulation * recipe.ranks
    return Estimate(parts=parts, update_s=update_s, rate=counted / update_s, spread=_spread(model, recipe, rates))


def flops_of_products(model: Transformer, recipe: Recipe) -> float:
    """FLOPs of the matrix products of a micro-batch on one device, attention's own left out.

    2 a weight and token forward, 4 backward (Kaplan et al. 2020), of which a frozen weight needs 2; what is computed again.
    """
    tensor = recipe.tensor_ranks
    blocks = model.layers * model.active_matrices / tensor
    head = model.head_matrix / (tensor if recipe.parallel_loss else 1)
    backward = 2 if recipe.full_training else 1
    again = {Checkpointing.NONE: 0.0, Checkpointing.SELECTIVE: 0.5}.get(recipe.checkpointing, 1.0)
    products = recipe.cells * blocks * (1 + backward + again) + predictions(model, recipe) * head * (1 + backward)
    return 2 * products


def flops_of_attention(model: Transformer, recipe: Recipe) -> float:
    """FLOPs of scores and sums over values, of a micro-batch on one device; a causal kernel computes half of them."""
    seen = recipe.sequence / 2 if model.causal and recipe.attention is Attention.SDPA else recipe.sequence
    forward = 4 * recipe.cells * seen * model.q_width * model.layers / recipe.tensor_ranks
    backward = ATTENTION_BACKWARD if recipe.attention is Attention.SDPA else 2.0
    again = recipe.checkpointing in (Checkpointing.FULL, Checkpointing.OFFLOAD)
    return forward * (1 + backward + again)


def _transformer(model: Transformer, recipe: Recipe, rates: Rates) -> dict[str, float]:
    narrow = min(1.0, (model.hidden / rates.full_width) ** 0.25)
    inventory = sum(block_inventory(model, recipe).values()) * model.layers * recipe.cells / recipe.tensor_ranks
    passes = PASSES + (0.0 if recipe.checkpointing.keeps_blocks else PASSES_AGAIN)
    logits = LOGIT_PASSES_BYTES / (2 if recipe.fused_loss or recipe.loss is Loss.CHUNKED else 1)
    of_logits = predictions(model, recipe) * model.vocab * logits / (recipe.tensor_ranks if recipe.parallel_loss else 1)
    weights = 3.0 * recipe.compute_bytes * model.parameters / recipe.tensor_ranks
    casts = 6.0 * model.parameters if recipe.autocast and not recipe.sharding.divides else 0.0
    kernel = rates.attention if recipe.attention is Attention.SDPA else rates.matmul
    return {
        "matrix products": flops_of_products(model, recipe) / (rates.matmul * narrow),
        "attention": flops_of_attention(model, recipe) / kernel,
        "memory traffic": (inventory * passes + of_logits + weights + casts) / rates.bandwidth,
    }


def _convolutions(model: Convnet, recipe: Recipe, rates: Rates) -> dict[str, float]:
    moved = PASSES * recipe.micro_batch * model.kept * recipe.compute_bytes
    flops = 3 * recipe.micro_batch * model.flops
    return {"convolutions": flops / (rates.matmul * rates.convolutions), "memory traffic": moved / rates.bandwidth}


def _launches(model: Model, recipe: Recipe) -> float:
    blocks = len(model.convolutions) / 8 if isinstance(model, Convnet) else model.layers
    again = 1.0 if recipe.checkpointing.keeps_blocks else 1.33
    return blocks * LAUNCHES * again / (2 if recipe.compiled else 1)


def _step(model: Model, recipe: Recipe, rates: Rates) -> float:
    trained = recipe.trained_of(model.parameters)
    states = {Optimizer.ADAMW: 1.0, Optimizer.ADAMW_8BIT: 0.7}.get(recipe.optimizer, 0.8)
    shards = recipe.tensor_ranks * (recipe.ranks if recipe.sharding.divides else 1)
    return STEP_PASSES * states * trained / shards * recipe.state_bytes / rates.bandwidth


def _exposed(model: Model, recipe: Recipe, rates: Rates, compute_s: float) -> float:
    """What collectives take beyond what lies under compute, in all of an update."""
    if recipe.ranks == 1:
        return 0.0
    each_s, once_s = _collectives(model, recipe, rates)
    hidden_s = HIDDEN * compute_s
    exposed = recipe.accumulation * max(0.0, each_s - hidden_s, (1 - HIDDEN) * each_s)
    return exposed + max(0.0, once_s - hidden_s / 2, (1 - HIDDEN) * once_s)


def _collectives(model: Model, recipe: Recipe, rates: Rates) -> tuple[float, float]:
    """Seconds of the collectives of every micro-batch, and of those of the last alone.

    A ring moves (n - 1) / n of the whole to gather or to scatter it, and twice that to sum it everywhere.
    """
    share = (recipe.ranks - 1) / recipe.ranks / recipe.tensor_ranks
    speed = rates.link if recipe.nodes == 1 else min(rates.link, NETWORK)
    weights_s = share * model.parameters * min(recipe.compute_bytes, recipe.state_bytes) / speed
    trained = recipe.trained_of(model.parameters)
    scatter_s = share * trained * recipe.reduce_bytes / speed
    if recipe.sharding is Sharding.DDP:
        return 0.0, 2 * share * trained * recipe.state_bytes / speed
    gather_s = weights_s * (2 if recipe.sharding is Sharding.ZERO3 else 1)
    return (gather_s + scatter_s, 0.0) if recipe.sync_every else (gather_s, scatter_s)


def _tensor_parallel(model: Model, recipe: Recipe, rates: Rates) -> dict[str, float]:
    """Four gathers or scatters of the stream a block forward, as many backward; nothing to compute meanwhile."""
    if recipe.tensor_ranks == 1 or isinstance(model, Convnet):
        return {}
    again = 0 if recipe.checkpointing.keeps_blocks else 1
    stream = recipe.cells * model.hidden * recipe.compute_bytes * (recipe.tensor_ranks - 1) / recipe.tensor_ranks
    return {"tensor-parallel communication": 4 * (2 + again) * model.layers * stream / rates.link}


def _spread(model: Model, recipe: Recipe, rates: Rates) -> float:
    """Wide for what published runs say little about: narrow models, several machines, a layer over several ranks."""
    compared = isinstance(model, Transformer) and model.hidden >= rates.full_width
    return rates.spread if compared and recipe.nodes == 1 and recipe.tensor_ranks == 1 else max(rates.spread, WIDE_SPREAD)
