"""Why a value is not finite, and what to change: read from what is known of its origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from halfstep.findings.card import Card
from halfstep.record.probes.flow import Operation
from halfstep.record.probes.origin import Origin, Phase
from halfstep.rules.measured import numbers as cards
from halfstep.rules.numbers.amp_fp16_eps import CARD as FP16_EPS
from halfstep.rules.numbers.amp_fp16_mask_overflow import CARD as FP16_MASK
from halfstep.rules.numbers.amp_loss_half_reduction import CARD as HALF_LOSS

FP16_LARGEST = 65504.0
FP16_ROUNDS_TO_ZERO = 2.0**-25
GROWTH = 100.0
"""A gradient norm that is this many times the median of those before it has exploded."""
MASKS = {"masked_fill", "masked_fill_", "where", "full", "full_like", "fill_", "add", "scalar_tensor"}
DIVISIONS = {"div", "reciprocal", "rsqrt", "log", "log2", "log10", "log1p", "sqrt", "pow", "exp", "expm1", "linalg_vector_norm"}
NODES = (
    "Log",
    "Div",
    "Sqrt",
    "Rsqrt",
    "Reciprocal",
    "Pow",
    "Exp",
    "Norm",
    "LinalgVectorNorm",
    "Acos",
    "Asin",
    "Atan2",
    "Std",
    "Cdist",
)
REDUCTIONS = ("Sum", "Mean", "Pow")
SAVED = {
    "LogBackward0": "self",
    "Log2Backward0": "self",
    "Log10Backward0": "self",
    "DivBackward0": "other",
    "SqrtBackward0": "result",
    "RsqrtBackward0": "result",
    "ReciprocalBackward0": "result",
}
"""What the autograd node of an operation keeps that tells whether it divides by zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A card and the evidence that it is this one."""

    card: Card
    because: str


def cause_of(origin: Origin, *, scale: float | None, norms: Sequence[float]) -> Cause:
    """The most certain cause.

    Args:
        origin: the first value that is not finite.
        scale: the loss scale of that update; None without a scaler.
        norms: the finite gradient norms of the updates before it.
    """
    if origin.phase is Phase.DATA:
        return Cause(card=cards.DATA, because=origin.detail)
    certain = _constant(origin.operation) if origin.operation is not None else None
    if certain is not None:
        return certain
    if exploded(norms):
        grew = f"the gradient norm grew to {norms[-1]:.3g}, {norms[-1] / median(norms):.0f} times its median (limit {GROWTH:.0f})"
        return Cause(card=cards.LEARNING_RATE, because=grew)
    if origin.phase is Phase.WEIGHTS:
        return Cause(card=cards.WEIGHTS, because=f"{origin.detail} is not finite before the update")
    return _computed(origin, scale)


def exploded(norms: Sequence[float]) -> bool:
    """Whether gradients grew from update to update out of all proportion."""
    rising = len(norms) > 2 and norms[-3] < norms[-2] < norms[-1]
    return rising and norms[-1] > GROWTH * median(norms)


def beyond_the_scale(origin: Origin) -> bool:
    """Whether nothing but scaled gradients left FP16's range, which a lower loss scale cures."""
    if origin.phase is Phase.LOSS:
        return origin.loss_is_finite is not False
    operation = origin.operation
    return origin.phase is Phase.BACKWARD and operation is not None and _fits_fp32(operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOperation:
    """The autograd node of a loss that divides by zero, takes its logarithm, or leaves FP16's range.

    Attributes:
        name: of the node, such as `LogBackward0`; empty where none was seen.
        guarded: whether it does so in FP16 although something was added, which FP16 rounded away.
        in_fp16: whether it is a sum, mean or power that is computed in FP16, and so ends at 65504.
    """

    name: str = ""
    guarded: bool = False
    in_fp16: bool = False


def loss_operation(loss: Tensor) -> LossOperation:
    """The one that is nearest to a loss that is not finite; what lies behind a loss of torch's own is the model's."""
    nodes, seen = [loss.grad_fn], 0
    overflown = bool(torch.isinf(loss.detach()).any())
    while nodes and seen < 64:
        node, seen = nodes.pop(0), seen + 1
        if node is None:
            continue
        kept = getattr(node, f"_saved_{SAVED[node.name()]}", None) if node.name() in SAVED else None
        if isinstance(kept, Tensor) and kept.dtype is torch.float16 and bool(torch.isinf(kept).any()):
            overflown = True  # what it divides by, or takes the root or logarithm of, was too large before it
        elif isinstance(kept, Tensor) and bool(((kept == 0) | ~torch.isfinite(kept)).any()):
            guard = node.next_functions[-1][0]
            added = guard is not None and guard.name().startswith(("Add", "Clamp"))
            return LossOperation(name=node.name(), guarded=added and kept.dtype is torch.float16)
        if overflown and node.name().startswith(REDUCTIONS) and node._input_metadata[0].dtype is torch.float16:
            return LossOperation(name=node.name(), in_fp16=True)
        if "Loss" in node.name():
            break
        nodes.extend(following for following, _ in node.next_functions)
    return LossOperation()


def _constant(operation: Operation) -> Cause | None:
    """A mask or guard constant that FP16 does not hold, or a mask that leaves nothing."""
    half = operation.dtype is torch.float16
    large = [s for s in operation.scalars if FP16_LARGEST < abs(s) < float("inf")]
    if half and operation.name in MASKS and large:
        return Cause(card=FP16_MASK, because=f"the constant {large[0]:g} is infinity in FP16, which ends at 65504")
    if operation.name in MASKS and any(abs(s) == float("inf") for s in operation.scalars):
        return Cause(card=cards.MASKED_ROW, because="a mask of -inf covers a whole row, whose softmax is 0 / 0")
    guards = [
        scalar
        for given in operation.inputs
        if given.maker is not None and given.dtype is torch.float16 and given.zeros
        for scalar in given.maker.scalars
        if 0 < abs(scalar) <= FP16_ROUNDS_TO_ZERO
    ]
    if guards:
        return Cause(
            card=FP16_EPS, because=f"the guard constant {guards[0]:g} is zero in FP16, so `{operation.name}` gets a zero"
        )
    return None


def _computed(origin: Origin, scale: float | None) -> Cause:
    operation = origin.operation
    if operation is not None and _fits_fp32(operation):
        would = f"in FP32 the largest value is {operation.in_fp32:.4g}, FP16 ends at 65504"
        scaled = f", at a loss scale of {scale:g}" if scale and origin.phase is Phase.BACKWARD else ""
        return Cause(card=cards.FP16_RANGE, because=would + scaled)
    if operation is not None and (operation.name in DIVISIONS or operation.node.startswith(NODES)):
        zeros = " of zero" if any(given.zeros for given in operation.inputs) else ""
        return Cause(card=cards.LOG_OR_DIVISION, because=f"`{origin.op}`{zeros} is not finite in FP32 either")
    if origin.phase is Phase.LOSS and origin.guarded:
        return Cause(card=FP16_EPS, because=f"what guards `{origin.op}` is zero in FP16, which ends at 6e-8")
    if origin.phase is Phase.LOSS and origin.in_fp16:
        return Cause(card=HALF_LOSS, because=f"`{origin.op}` is computed in FP16, which ends at 65504")
    if origin.phase is Phase.LOSS and origin.op:
        return Cause(card=cards.LOG_OR_DIVISION, because=f"the loss takes `{origin.op}` of zero or of what is not finite")
    return Cause(card=cards.NOT_FINITE, because=origin.detail or "its inputs are finite")


def _fits_fp32(operation: Operation) -> bool:
    return operation.dtype is torch.float16 and operation.in_fp32 is not None and operation.in_fp32 < float("inf")
