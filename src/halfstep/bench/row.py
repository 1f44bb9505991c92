"""A row of the table: one way to make the same update."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from halfstep.config.options import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to make an update of the same global batch.

    Attributes:
        precision: the arithmetic.
        micro: samples of a micro-batch.
        accumulate: micro-batches in an update.
        compile: whether the model's blocks are compiled.
    """

    precision: Precision
    micro: int
    accumulate: int
    compile: bool = False

    def __str__(self) -> str:
        compiled = ", compiled" if self.compile else ""
        return f"{self.precision}, {self.micro} x {self.accumulate}{compiled}"

    def settings(self) -> list[str]:
        """The keys that make a configuration this row."""
        return [
            f"precision={self.precision}",
            f"batch.micro={self.micro}",
            f"batch.global={self.micro * self.accumulate}",
            f"model.compile={str(self.compile).lower()}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one process measured of a row.

    Attributes:
        seconds: of each update, the first ones left out.
        weights: tokens or samples that counted in each of them.
        losses: of every update from the first on, the same data in every row.
        allocated_bytes: the highest that tensors took; on the CPU, that the process held above what it held
            without the model.
        reserved_bytes: the highest that the allocator took; None on the CPU, which has none of its own.
        failed: why there is nothing else; the row does not fit, or was too slow.
    """

    seconds: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    failed: str | None = None

    @property
    def rate(self) -> float:
        """What counted, a second, over the whole trial."""
        return sum(self.weights) / sum(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)
