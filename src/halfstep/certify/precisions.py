"""Half precisions against FP32 on the same global batch: loss and gradient, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from halfstep.certify.certificate import Line, Topic
from halfstep.certify.exact import Result
from halfstep.certify.recording import update_of
from halfstep.certify.stillness import plain_loss
from halfstep.certify.subject import Parts
from halfstep.config.options import Precision
from halfstep.precision.select import ARITHMETIC, available, tolerance

SMALL = 0.01
"""A layer whose gradient is a smaller share of the whole is judged by this share: nothing but rounding is left in it."""


def precision_lines(parts: Parts) -> Iterator[Line]:
    """A claim for each precision."""
    exact, _ = update_of(parts, parts.batches)
    products = sum(p.dim() >= 2 for p in parts.model.parameters())
    for precision, verdict in available(next(parts.model.parameters()).device).items():
        if precision in (Precision.FP32, Precision.BF16_PURE):
            continue
        claim = f"{precision}: loss and every layer's gradient are FP32's, to the rounding of {precision}"
        if not verdict.value:
            yield Line(topic=Topic.PRECISION, claim=claim, holds=None, note=verdict.reason)
        else:
            found, _ = update_of(parts, parts.batches, precision=precision.value)
            line = _judged(claim, exact, found, precision, products)
            yield replace(line, note=verdict.reason) if _is_rounded(exact, found) else _unrounded(line, parts, precision)
    yield _tf32(parts, exact, products)


def _judged(claim: str, exact: Result, found: Result, precision: Precision, products: int) -> Line:
    loss = abs(found.loss - exact.loss) / max(abs(exact.loss), torch.finfo(torch.float32).tiny)
    worst, layer = _worst_layer(exact, found)
    for_loss, for_gradient = tolerance(precision, products), tolerance(precision, 2 * products)
    return Line(
        topic=Topic.PRECISION,
        claim=claim,
        holds=loss <= for_loss and worst <= for_gradient,
        figure=f"loss {loss:.1e} away; gradient {worst:.1e} of its norm in {layer}, the worst of {len(exact.gradients)} layers",
        tolerance=f"{for_loss:.1e} and {for_gradient:.1e}: 2 u sqrt(n + 1), u = {_roundoff(precision):.1e} the unit roundoff, "
        f"n = {products} products in a forward, twice as many with the backward (Higham 2002, 2.8)",
    )


def _is_rounded(exact: Result, found: Result) -> bool:
    return found.loss != exact.loss or _worst_layer(exact, found)[0] > 0


def _unrounded(line: Line, parts: Parts, precision: Precision) -> Line:
    """Bitwise FP32 is right only of a model in which autocast has nothing to round; of any other, FP32 is what ran."""
    with torch.autocast(next(parts.model.parameters()).device.type, ARITHMETIC[precision].dtype):
        rounded = plain_loss(parts, parts.batches[:1], 0)
    if rounded == plain_loss(parts, parts.batches[:1], 0):
        return replace(line, holds=None, note=f"no operator of this model is rounded to {precision} by autocast")
    return replace(line, holds=False, note=f"nothing was rounded: it ran in fp32, though plain autocast rounds to {precision}")


def _worst_layer(exact: Result, found: Result) -> tuple[float, str]:
    if exact.gradients.keys() != found.gradients.keys():
        return float("inf"), sorted(exact.gradients.keys() ^ found.gradients.keys())[0]
    whole = sum(float(g.double().square().sum()) for g in exact.gradients.values()) ** 0.5

    def deviation(name: str) -> float:
        right, other = exact.gradients[name].double(), found.gradients[name].double()
        size = max(float(right.norm()), SMALL * whole)
        away = float((other - right).norm()) / size if size else float((other - right).norm())
        return away if away == away else float("inf")

    worst = max(exact.gradients, key=deviation)
    return deviation(worst), worst


def _roundoff(precision: Precision) -> float:
    return torch.finfo(torch.float16 if precision is Precision.FP16 else torch.bfloat16).eps / 2


def _tf32(parts: Parts, exact: Result, products: int) -> Line:
    claim = "tf32: loss and every layer's gradient are FP32's, to the rounding of TF32"
    device = next(parts.model.parameters()).device
    if device.type != "cuda":
        return Line(topic=Topic.PRECISION, claim=claim, holds=None, note=f"{device.type} has no TF32")
    return _judged(claim, exact, update_of(parts, parts.batches, tf32=True)[0], Precision.FP16, products)
