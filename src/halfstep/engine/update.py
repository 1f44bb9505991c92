"""One optimizer step, as its caller sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfstep.engine.ledger import Cause, Entry

Number = float | torch.Tensor
"""A host number, or a scalar tensor that is still on the device."""


def as_scalar(number: Number, device: torch.device) -> torch.Tensor:
    """The number as an FP32 scalar on `device`; a host number is filled in there, since to copy it would make the host wait."""
    if isinstance(number, torch.Tensor):
        return number.to(device, torch.float32, non_blocking=True)
    return torch.full((), number, dtype=torch.float32, device=device)


class Update:
    """What one update did. Reading a value waits for the device, if it has not arrived; not reading costs nothing.

    Attributes:
        index: number of the update, from 1, applied or not.
        micro_batches: micro-batches of this rank in the window.
        lr: learning rate of the first parameter group in this update.
    """

    __slots__ = (
        "_cause",
        "_detail",
        "_grad_norm",
        "_is_settled",
        "_loss",
        "_scale",
        "_settle",
        "_weight",
        "index",
        "lr",
        "micro_batches",
    )

    def __init__(
        self,
        *,
        index: int,
        micro_batches: int,
        lr: float,
        loss: Number,
        grad_norm: Number,
        scale: Number,
        weight: Number,
        settle: Callable[[], None],
    ) -> None:
        self.index, self.micro_batches, self.lr = index, micro_batches, lr
        self._loss, self._grad_norm, self._scale, self._weight = loss, grad_norm, scale, weight
        self._settle = settle
        self._cause: Cause | None = None
        self._detail = ""
        self._is_settled = False

    @property
    def loss(self) -> float:
        """Weighted mean loss over the window and all ranks; NaN and infinities are shown as they are."""
        return float(self._loss)

    @property
    def grad_norm(self) -> float:
        """Norm of the true gradient over all parameters: unscaled, weighted, before clipping."""
        return float(self._grad_norm)

    @property
    def scale(self) -> float:
        """Loss scale under which backward ran; 1.0 where the loss is not scaled."""
        return float(self._scale)

    @property
    def weight(self) -> float:
        """Weight (tokens or samples that counted) of the window over all ranks."""
        return float(self._weight)

    @property
    def applied(self) -> bool:
        """Whether the parameters moved."""
        return self.cause is None

    @property
    def cause(self) -> Cause | None:
        """Why the parameters did not move; None where they did."""
        if not self._is_settled:
            self._settle()
        return self._cause

    @property
    def skipped_because(self) -> str | None:
        """The cause in words, with the place where it was found; None where the update was applied."""
        cause = self.cause
        if cause is None:
            return None
        return f"{cause}: {self._detail}" if self._detail else str(cause)

    @property
    def entry(self) -> Entry:
        """The update as plain numbers."""
        cause = self.cause
        return Entry(
            index=self.index,
            applied=cause is None,
            cause=cause,
            detail=self._detail,
            loss=self.loss,
            grad_norm=self.grad_norm,
            scale=self.scale,
            weight=self.weight,
            micro_batches=self.micro_batches,
        )

    def settled(self, weight: float, cause: Cause | None = None, detail: str = "") -> None:
        """Called once by the engine, when it is known whether the parameters moved; `weight` has then arrived on the host."""
        self._weight, self._cause, self._detail, self._is_settled = weight, cause, detail, True

    def __repr__(self) -> str:
        state = (self.skipped_because or "applied") if self._is_settled else "not known yet"
        return f"Update(index={self.index}, {state})"
