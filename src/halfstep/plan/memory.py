"""The memory bill of an update: what lives in each phase, in bytes, and the highest of them.

The phases are those in which the highest point can be: the loss, when everything that the forward saved is there with the
logits and their gradients; the start of the backward; its end, when all gradients are there; and the optimizer's step. Between
them memory moves in a straight line from one to the other, since activations go as gradients come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from halfstep.config.options import Sharding
from halfstep.plan.activations import logits_bytes, one_block_bytes, saved_bytes
from halfstep.plan.convnet import Convnet
from halfstep.plan.model_facts import Model
from halfstep.plan.recipe import BaseWeights, Loss, Optimizer, Recipe

GB = 10**9
GIB = 2**30

CONTEXT_BYTES = 0.5 * GB
"""CUDA context and library workspaces that torch does not count. 0.47 to 1.8 GiB seen (ml-engineering, 2026)."""
COLLECTIVES_BYTES = 1.0 * GB
"""NCCL's buffers; 1.3 to 1.5 GiB seen with many groups (ml-engineering, 2026)."""
RESERVED_SLACK = 0.1
"""Share of what comes and goes that the caching allocator holds beyond it, on one device."""
STREAMS_SLACK = 0.25
"""The same where shards are gathered on streams of their own, whose blocks no other stream can use (torchtitan, 2024)."""
BITSANDBYTES_BYTES = 0.5 * GB
"""What 4-bit runs of litgpt took beyond their parts: the same in models of 3 to 13 billion. The cause is unknown."""


class Phase(str, Enum):
    """When."""

    LOSS = "loss"
    BACKWARD_START = "backward, first block"
    BACKWARD_END = "backward, last block"
    STEP = "optimizer step"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What an update takes on one device.

    Attributes:
        phases: bytes of each item in each phase.
        slack_bytes: what the caching allocator holds beyond what tensors take.
        context_bytes: what the device's software takes outside torch's allocator.
    """

    phases: Mapping[Phase, Mapping[str, float]]
    slack_bytes: float
    context_bytes: float

    @property
    def peak_phase(self) -> Phase:
        """The phase that takes the most."""
        return max(self.phases, key=self.phase_bytes)

    @property
    def allocated_bytes(self) -> float:
        """The most that tensors take: `torch.cuda.max_memory_allocated`."""
        return self.phase_bytes(self.peak_phase)

    @property
    def reserved_bytes(self) -> float:
        """The most that the allocator takes from the device: `torch.cuda.max_memory_reserved`."""
        return self.allocated_bytes + self.slack_bytes

    @property
    def device_bytes(self) -> float:
        """The most that the process takes of the device, as `nvidia-smi` shows it."""
        return self.reserved_bytes + self.context_bytes

    def phase_bytes(self, phase: Phase) -> float:
        """All items of a phase."""
        return sum(self.phases[phase].values())

    def items(self) -> list[str]:
        """The items that any phase has, in the order of the bill."""
        return list(dict.fromkeys(name for items in self.phases.values() for name, size in items.items() if size))


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """What lives through all of an update on one device, in bytes; gradients from the backward to the step."""

    parameters: float
    gradients: float
    optimizer: float
    step_temporaries: float


def memory_bill(model: Model, recipe: Recipe) -> Bill:
    """The bill of one update in the steady state, from the second update on."""
    states = _states(model, recipe)
    gathered = _gathered(model, recipe)
    activations = saved_bytes(model, recipe)
    stay = recipe.accumulation > 1 or recipe.gradients_stay
    waiting = states.gradients if stay and not recipe.step_in_backward else 0.0
    lasting = {"parameters": states.parameters, "optimizer states": states.optimizer}
    if recipe.weights.bitsandbytes:
        lasting["4-bit workspace"] = BITSANDBYTES_BYTES
    whole = _whole_gradients(model, recipe)
    forward = {
        **lasting,
        "gradients": whole or waiting,
        "cast cache": _cast_cache(model, recipe),
        "gathered parameters": gathered,
        "activations": activations,
    }
    block = one_block_bytes(model, recipe)
    again = 0.0 if recipe.checkpointing.keeps_blocks else block
    starts = forward | {"block computed again": again, "gradients inside a block": _inside(model, recipe)}
    starts["gradients"] = max(forward["gradients"], _head_gradient(model, recipe))
    at_loss = starts["gradients"] if recipe.loss is Loss.CHUNKED else forward["gradients"]
    phases: dict[Phase, dict[str, float]] = {
        Phase.LOSS: forward | {"gradients": at_loss, "logits and loss": logits_bytes(model, recipe)},
        Phase.BACKWARD_START: starts,
        Phase.BACKWARD_END: {
            **lasting,
            "gradients": (whole or states.gradients) + _reducing(model, recipe),
            "gathered parameters": gathered,
            "activations": block,
            "gradients inside a block": _inside(model, recipe),
        },
        Phase.STEP: {**lasting, "gradients": states.gradients, "step's temporaries": states.step_temporaries},
    }
    peak = max(sum(items.values()) for items in phases.values())
    slack = (STREAMS_SLACK if recipe.sharding.divides else RESERVED_SLACK) * (peak - sum(lasting.values()))
    context = CONTEXT_BYTES + (COLLECTIVES_BYTES if recipe.ranks * recipe.tensor_ranks > 1 else 0)
    return Bill(phases=phases, slack_bytes=slack, context_bytes=context)


def _states(model: Model, recipe: Recipe) -> States:
    """Parameters, gradients and optimizer states, divided as the sharding says.

    FP32 AdamW: 4 + 4 + 8 bytes a parameter, with autocast and without (Rajbhandari et al. 2020, section 3.1, count 16 as well).
    """
    shards = recipe.tensor_ranks * (recipe.ranks if recipe.sharding.divides else 1)
    kept = _parameter_bytes(model, recipe) / shards
    if recipe.adapter is not None:
        count = recipe.trained_of(0)
        states = count * _optimizer_bytes(recipe.optimizer, recipe.state_bytes)
        trained = float(count * recipe.state_bytes)
        return States(parameters=kept + trained, gradients=trained, optimizer=states, step_temporaries=0.0)
    whole = recipe.trained_of(model.parameters) / shards
    largest = min(whole, max(_embedding_parameters(model), _block_parameters(model)) / shards)
    gradients = (largest if recipe.step_in_backward else whole) * recipe.state_bytes
    return States(
        parameters=kept,
        gradients=gradients,
        optimizer=whole * _optimizer_bytes(recipe.optimizer, recipe.state_bytes) + _embedding_states(model, recipe) / shards,
        step_temporaries=_step_temporaries(recipe, whole),
    )


def _parameter_bytes(model: Model, recipe: Recipe) -> float:
    if not recipe.weights.four_bits or isinstance(model, Convnet):
        return model.parameters * recipe.state_bytes
    packed = model.layers * model.block_matrices
    each = 0.5 + (4 / 64 if recipe.weights is BaseWeights.NF4 else 1 / 64 + 4 / 64 / 256)
    return packed * each + (model.parameters - packed) * recipe.state_bytes


def _optimizer_bytes(optimizer: Optimizer, state_bytes: int) -> float:
    return {
        Optimizer.ADAMW: 2.0 * state_bytes,
        Optimizer.ADAMW_8BIT: 2 + 2 * 4 / 256,
        Optimizer.ADAFACTOR: 0.01,
        Optimizer.LION: 1.0 * state_bytes,
        Optimizer.MOMENTUM: 1.0 * state_bytes,
        Optimizer.SGD: 0.0,
    }[optimizer]


def _embedding_states(model: Model, recipe: Recipe) -> float:
    """What those of an embedding take beyond 8 bits where they are kept in FP32."""
    if recipe.optimizer is not Optimizer.ADAMW_8BIT or recipe.trainable is not None or not recipe.full_embedding_states:
        return 0.0
    return _embedding_parameters(model) * (8.0 - _optimizer_bytes(recipe.optimizer, recipe.state_bytes))


def _step_temporaries(recipe: Recipe, trained: float) -> float:
    """`foreach` makes the square roots of all second moments at once."""
    adam = recipe.optimizer is Optimizer.ADAMW and not recipe.fused and not recipe.step_in_backward
    return trained * recipe.state_bytes if adam else 0.0


def _cast_cache(model: Model, recipe: Recipe) -> float:
    """Autocast keeps the low-precision copy of every weight that a product used until the backward of that product.

    FSDP2 casts what it gathers instead.
    """
    if not recipe.autocast or recipe.sharding.divides:
        return 0.0
    if isinstance(model, Convnet):
        return 2.0 * model.parameters
    return 2.0 * (model.layers * model.block_matrices + model.head_matrix) / recipe.tensor_ranks


def _gathered(model: Model, recipe: Recipe) -> float:
    """Whole parameters: of the block that runs, of the one that is fetched ahead, and of what lies outside the blocks."""
    if not recipe.sharding.divides:
        return 0.0
    low = min(recipe.compute_bytes, recipe.state_bytes)
    if recipe.sharding is Sharding.ZERO2:
        return model.parameters * low / recipe.tensor_ranks
    outside = 0 if isinstance(model, Convnet) else model.outer_parameters
    return (outside + 2 * _block_parameters(model)) * low / recipe.tensor_ranks


def _whole_gradients(model: Model, recipe: Recipe) -> float:
    """FSDP2 that does not reduce in every micro-batch keeps all gradients whole, in the dtype they are reduced in."""
    if not recipe.sharding.divides or recipe.sync_every or recipe.accumulation == 1:
        return 0.0
    return recipe.trained_of(model.parameters) * recipe.reduce_bytes / recipe.tensor_ranks


def _reducing(model: Model, recipe: Recipe) -> float:
    """What is outside the blocks is reduced last: its whole gradient, as computed and as it is reduced."""
    if not recipe.sharding.divides or isinstance(model, Convnet) or not recipe.full_training:
        return 0.0
    reduced = 0 if _whole_gradients(model, recipe) else recipe.reduce_bytes
    return model.outer_parameters * (recipe.compute_bytes + reduced) / recipe.tensor_ranks


def _head_gradient(model: Model, recipe: Recipe) -> float:
    if isinstance(model, Convnet) or not recipe.full_training:
        return 0.0
    width = recipe.compute_bytes if recipe.sharding.divides else recipe.state_bytes
    return model.head_matrix * width / recipe.tensor_ranks


def _inside(model: Model, recipe: Recipe) -> float:
    """The two largest gradients of activations that live at once: before and after the MLP's activation."""
    if isinstance(model, Convnet):
        return 0.0
    flowing = (2 * model.ffn + model.hidden) * recipe.compute_bytes * recipe.cells / recipe.tensor_ranks
    if not recipe.sharding.divides or not recipe.full_training:
        return flowing
    return flowing + _block_parameters(model) * (recipe.compute_bytes + recipe.reduce_bytes) / recipe.tensor_ranks


def _block_parameters(model: Model) -> int:
    return max(each.parameters for each in model.convolutions) if isinstance(model, Convnet) else model.block_parameters


def _embedding_parameters(model: Model) -> int:
    return model.features * model.classes if isinstance(model, Convnet) else model.head_matrix
