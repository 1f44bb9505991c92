"""What could be saved of an update, from what was measured of a few: pure arithmetic.

Every amount is an upper bound, and says so: the whole of what a fault costs, or the part that the measured factor leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from halfstep.events.vocabulary import Place
from halfstep.findings.card import Card
from halfstep.rules.measured import speed as cards

LIMIT = 0.05
"""A saving below this share of an update is no finding."""
ODD_LIMIT = 0.10
SMALL_LIMIT = 0.30


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Something that happens at a line: how often an update, and what exactly."""

    place: Place | None
    count: float
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A few updates, all numbers a single one. Seconds that nobody measured are None.

    Attributes:
        updates: how many were measured.
        seconds: of wall time.
        waiting_s: in the loader.
        forward_s: of the model's forward, on the host.
        backward_s: of autograd, on the host.
        optimizer_s: in the optimizer's step.
        optimizer: its name.
        optimizer_place: the line that steps.
        loop_place: the line of the loop over batches.
        optimizer_form: `fused`, `foreach` or `loop`.
        products_s: in matrix products, on the device.
        flops: of matrix products by dtype.
        odd_flops: of those in low precision with a side that is no multiple of 8.
        casts_s: in casts, on the host where the device is the CPU.
        casts: how many.
        reads: reads of the device by the host.
        transfers: copies from the host to the device.
        transfers_s: in such copies.
        small_s: in operations of less than ten microseconds.
        small: how many of those.
        operations: how many operations.
        tf32_off: whether the GPU has TF32 and FP32 products do not use it.
        recompiles: graphs compiled in these updates.
        speedup: how much faster the device multiplies in low precision than in FP32; None where not measured.
        device_type: such as `cpu`.
    """

    updates: int
    seconds: float
    waiting_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    optimizer: str
    optimizer_form: str
    products_s: float | None
    flops: dict[torch.dtype, float]
    odd_flops: float
    casts_s: float | None
    casts: float
    reads: tuple[Lines, ...]
    transfers: tuple[Lines, ...]
    transfers_s: float | None
    small_s: float | None
    small: float
    operations: float
    tf32_off: bool
    recompiles: int
    speedup: float | None
    device_type: str
    optimizer_place: Place | None = None
    loop_place: Place | None = None

    @property
    def whole_flops(self) -> float:
        """Of all matrix products."""
        return sum(self.flops.values())

    def share(self, seconds: float | None) -> float:
        """Of the update's time; 0 for what is unknown."""
        return (seconds or 0.0) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """A change, and how many seconds an update it saves at most; None where that is unknown."""

    card: Card
    seconds: float | None
    told: str
    place: Place | None = None

    @property
    def change(self) -> str:
        """What to write instead, in one line."""
        return "; ".join(self.card.instead.strip().splitlines()).replace(":; ", ":").replace("    ", " ")


def savings(profile: Profile) -> list[Saving]:
    """The largest first, unknown ones last."""
    found = [*_products(profile), *_data(profile), *_optimizer(profile), *_device(profile), *_small(profile)]
    return sorted(found, key=lambda saving: -(saving.seconds if saving.seconds is not None else -1.0))


def _products(p: Profile) -> Iterator[Saving]:
    fp32 = p.flops.get(torch.float32, 0.0)
    share = fp32 / p.whole_flops if p.whole_flops else 0.0
    if share > LIMIT and (p.speedup is None or p.speedup > 1.1):
        slow = None if p.products_s is None or p.speedup is None else _fp32_seconds(p, fp32) * (1 - 1 / p.speedup)
        factor = "unknown" if p.speedup is None else f"{p.speedup:.1f}"
        if slow is None or p.share(slow) > LIMIT:
            told = f"{share:.0%} of {p.whole_flops / 1e9:.3g} GFLOP an update are FP32; low precision is faster by {factor} here"
            yield Saving(card=cards.FP32_PRODUCTS, seconds=slow, told=told)
    if share > LIMIT and p.tf32_off:
        yield Saving(card=cards.TF32_OFF, seconds=None, told=f"{share:.0%} of the matrix work is FP32, and TF32 is off")
    odd = p.odd_flops / p.whole_flops if p.whole_flops else 0.0
    if odd > ODD_LIMIT and p.device_type == "cuda":
        yield Saving(
            card=cards.ODD_SHAPES, seconds=None, told=f"{odd:.0%} of the matrix work has a side that is no multiple of 8"
        )
    if p.share(p.casts_s) > LIMIT:
        yield Saving(card=cards.CASTS, seconds=p.casts_s, told=f"{p.casts:.0f} casts take {p.share(p.casts_s):.0%} of an update")


def _fp32_seconds(p: Profile, fp32: float) -> float:
    """The seconds of FP32 products, where products in low precision take the measured part of the time for the same work."""
    assert p.products_s is not None
    assert p.speedup is not None
    weight = fp32 + (p.whole_flops - fp32) / p.speedup
    return p.products_s * fp32 / weight


def _data(p: Profile) -> Iterator[Saving]:
    if p.share(p.waiting_s) > LIMIT:
        told = f"waiting for data takes {p.share(p.waiting_s):.0%} of an update, limit {LIMIT:.0%}"
        yield Saving(card=cards.INPUT_WAIT, seconds=p.waiting_s, told=told, place=p.loop_place)
    slow = [copy for copy in p.transfers if "not pinned" in copy.what or "blocking" in copy.what]
    if slow:
        told = f"{sum(copy.count for copy in slow):.0f} copies an update: {slow[0].what}"
        yield Saving(card=cards.TRANSFERS, seconds=p.transfers_s, told=told, place=slow[0].place)


def _optimizer(p: Profile) -> Iterator[Saving]:
    if p.optimizer_form == "loop" and p.share(p.optimizer_s) > LIMIT:
        told = f"{p.optimizer} steps parameter by parameter in {p.share(p.optimizer_s):.0%} of an update"
        yield Saving(card=cards.OPTIMIZER_LOOP, seconds=p.optimizer_s, told=told, place=p.optimizer_place)


def _device(p: Profile) -> Iterator[Saving]:
    if p.device_type != "cpu" and p.reads:
        most = max(p.reads, key=lambda read: read.count)
        told = f"{sum(read.count for read in p.reads):.0f} reads an update at {len(p.reads)} lines"
        yield Saving(card=cards.HOST_READS, seconds=None, told=told, place=most.place)
    if p.recompiles:
        told = f"{p.recompiles} graphs were compiled in {p.updates} updates after the first"
        yield Saving(card=cards.RECOMPILES, seconds=None, told=told)


def _small(p: Profile) -> Iterator[Saving]:
    if p.small_s is not None and p.share(p.small_s) > SMALL_LIMIT:
        told = f"{p.small:.0f} of {p.operations:.0f} operations take less than 10 us each and {p.share(p.small_s):.0%} together"
        yield Saving(card=cards.SMALL_KERNELS, seconds=p.small_s, told=told)
