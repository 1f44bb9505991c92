"""How fast a device multiplies matrices in each number format, measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from halfstep.measure.clock import Elapsed, Work, elapsed_s, garbage_collection_off
from halfstep.measure.dtypes import Arithmetic, Support, dtype_support
from halfstep.measure.stats import Measured, summarize

RATE_UNIT = "TFLOP/s"
SMALLEST_SIDE = 128
LARGEST_SIDE = 8192
SHARE_OF_BUDGET = 1 / 40
"""A product that takes more of the budget than this is not grown further: four times as long is still a tenth."""
FEWEST_RUNS = 3
MOST_RUNS = 15


def matmul_rates(device: torch.device, *, budget_s: float = 1.0) -> dict[Arithmetic, Measured]:
    """The rate of every number format that `device` multiplies in, emulated ones included.

    A format that turns out to have no product on this device is left out.

    Args:
        device: where to multiply.
        budget_s: about how long to take for each format.
    """
    rates: dict[Arithmetic, Measured] = {}
    for arithmetic, told in dtype_support(device).items():
        if told.support is not Support.ABSENT:
            with suppress(RuntimeError):
                rates[arithmetic] = matmul_rate(device, arithmetic, budget_s=budget_s)
    return rates


def matmul_rate(device: torch.device, arithmetic: Arithmetic, *, budget_s: float = 1.0, elapsed: Elapsed = elapsed_s) -> Measured:
    """The rate of square matrix products in one format, in TFLOP/s.

    The side doubles from 128 until one product takes a good part of the budget, so that a slow format ends in time
    and a fast one is not measured by its launch. A multiplication and an addition count as two operations.

    Args:
        device: where to multiply.
        arithmetic: the format of the inputs; TF32 is FP32 with inputs rounded by the device.
        budget_s: about how long to take.
        elapsed: how time is taken.
    """
    with float32_products(exact=arithmetic is not Arithmetic.TF32, device=device), garbage_collection_off():
        side, seconds = _largest_side(device, arithmetic, budget_s, elapsed)
        runs = max(FEWEST_RUNS, min(MOST_RUNS, int(budget_s / 2 / seconds)))
        product = _product(device, arithmetic, side)
        product()
        samples = [elapsed(product, device) for _ in range(runs)]
    return summarize([2 * side**3 / seconds / 1e12 for seconds in samples], RATE_UNIT)


@contextmanager
def float32_products(*, exact: bool, device: torch.device) -> Iterator[None]:
    """Let FP32 matrix products on an accelerator be exact, or rounded to TF32, and put back what was set.

    On a CPU nothing is changed: there FP32 is what the process has set, which is exact unless the user asked otherwise.
    """
    backend = {"cuda": getattr(torch.backends, "cuda", None), "xpu": getattr(torch.backends, "mkldnn", None)}
    settings = getattr(backend.get(device.type), "matmul", None)
    with nullcontext() if settings is None else _set_products(settings, exact=exact):
        yield


@contextmanager
def _set_products(settings: object, *, exact: bool) -> Iterator[None]:
    """torch 2.9 has `fp32_precision`; older ones a flag, and the two must not be mixed."""
    name: str = "fp32_precision"
    value: str | bool = "ieee" if exact else "tf32"
    if not hasattr(settings, name):
        name, value = "allow_tf32", not exact
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)


def _largest_side(device: torch.device, arithmetic: Arithmetic, budget_s: float, elapsed: Elapsed) -> tuple[int, float]:
    """The side of the largest product that fits and takes a share of the budget, and the seconds it took."""
    share_s = budget_s * SHARE_OF_BUDGET
    side, seconds = SMALLEST_SIDE, _seconds_at(SMALLEST_SIDE, device, arithmetic, share_s, elapsed)
    while seconds < share_s and side < LARGEST_SIDE:
        try:
            side, seconds = 2 * side, _seconds_at(2 * side, device, arithmetic, share_s, elapsed)
        except torch.OutOfMemoryError:
            break
    return side, seconds


def _seconds_at(side: int, device: torch.device, arithmetic: Arithmetic, share_s: float, elapsed: Elapsed) -> float:
    """Seconds of one product; too long is believed when it was seen three times, for one may have been interrupted."""
    product = _product(device, arithmetic, side)
    product()
    seconds = elapsed(product, device)
    return seconds if seconds < share_s else min(seconds, elapsed(product, device), elapsed(product, device))


def _product(device: torch.device, arithmetic: Arithmetic, side: int) -> Work:
    """A square product of its own matrices. Filled without a random generator, whose state stays the user's."""
    values = torch.linspace(-1, 1, side * side, device=device).reshape(side, side).to(arithmetic.dtype)
    out = torch.empty_like(values)
    return lambda: torch.mm(values, values, out=out)
