"""A row of the table: one way to make the same update."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from halfstep.config.options import Precision, Sharding
from halfstep.config.toml import toml_value

WAYS = "a row is a precision, and micro-batches: 4 x 2 are two of 4 samples each in an update"


def size_text(size: float) -> str:
    """Bytes for a person."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to make an update of the same global batch.

    Attributes:
        precision: the arithmetic.
        micro: samples of a micro-batch.
        accumulate: micro-batches in an update, on each rank.
        compile: whether the model's blocks are compiled.
        checkpoint: whether blocks are computed again in backward; None as the configuration has it.
        sharding: what each of several ranks holds; None as the configuration has it.
        processes: ranks on this machine.
    """

    precision: Precision
    micro: int
    accumulate: int
    compile: bool = False
    checkpoint: bool | None = None
    sharding: Sharding | None = None
    processes: int = 1

    def __str__(self) -> str:
        ranks = f" x {self.processes} ranks" if self.processes > 1 else ""
        sharded = f", {self.sharding}" if self.sharding is not None and self.processes > 1 else ""
        again = ", checkpointed" if self.checkpoint else ""
        compiled = ", compiled" if self.compile else ""
        return f"{self.precision}, {self.micro} x {self.accumulate}{ranks}{sharded}{again}{compiled}"

    def settings(self) -> list[str]:
        """The keys that make a configuration this row."""
        asked = {"model.checkpoint_activations": self.checkpoint, "sharding": self.sharding}
        return [
            f"precision={self.precision}",
            f"batch.micro={self.micro}",
            f"batch.global={self.micro * self.accumulate * self.processes}",
            f"processes={self.processes}",
            f"model.compile={str(self.compile).lower()}",
            *(f"{key}={toml_value(value)}" for key, value in asked.items() if value is not None),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one process measured of a row.

    Attributes:
        seconds: of each update, the first ones left out.
        weights: tokens or samples that counted in each of them.
        losses: of every update from the first on, the same data in every row.
        allocated_bytes: the highest that tensors took; on the CPU, that the process held above what it held
            without the model; of several ranks, the one that took most.
        reserved_bytes: the highest that the allocator took; None on the CPU, which has none of its own.
        failed: why there is nothing else; the row does not fit, or was too slow.
        why: where its time goes, in sentences; empty where that was not asked.
    """

    seconds: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    failed: str | None = None
    why: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        """What counted, a second, over the whole trial."""
        return sum(self.weights) / sum(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)
