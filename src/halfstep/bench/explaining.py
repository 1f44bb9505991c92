"""Why a row in low precision is not faster: what `halfstep watch --profile` finds in it, and what the device itself gains."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.config.options import Precision
from halfstep.engine import Engine
from halfstep.measure.calibrating import FORMATS
from halfstep.measure.dtypes import Arithmetic
from halfstep.measure.rates import matmul_rate
from halfstep.record.probes.speed import Speed
from halfstep.report.html_figure import number
from halfstep.report.parts import Bars, Table

BUDGET_S = 0.3
"""How long products of each number format are timed."""


class Watched:
    """An engine under the profile of `halfstep watch`.

    Args:
        engine: before its first update.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._speed = Speed()
        self._speed.attach(engine.model, engine.optimizers[0], None)

    def update_ended(self, index: int) -> None:
        """The update of this index, from 0, has ended."""
        self._speed.safely(self._speed.update_ended)(index)

    def reasons(self, precision: Precision) -> tuple[str, ...]:
        """Sentences, the largest saving first."""
        self._speed.detach()
        return (*self._rates(precision), *self._found())

    def _rates(self, precision: Precision) -> Iterator[str]:
        low = FORMATS.get(precision, Arithmetic.BF16)
        plain, lower = (matmul_rate(self._engine.device, each, budget_s=BUDGET_S).value for each in (Arithmetic.FP32, low))
        yield (
            f"large matrix products in {precision} run at {lower / plain:.2g} times the rate of those in fp32 here: "
            f"{lower:.3g} against {plain:.3g} TFLOP/s"
        )

    def _found(self) -> Iterator[str]:
        parts = self._speed.measurements()
        for part in parts:
            if isinstance(part, Bars) and part.title == "Time per phase":
                whole = sum(seconds or 0.0 for _, seconds in part.items)
                shares = ", ".join(f"{name} {(seconds or 0.0) / whole:.0%}" for name, seconds in part.items if whole)
                yield f"an update of {number(whole, 's')} is {shares}"
            if isinstance(part, Table) and part.title == "What to change":
                yield from (f"{what.rstrip('.')}: {measured}; could save at most {most}" for what, most, measured, _ in part.rows)
