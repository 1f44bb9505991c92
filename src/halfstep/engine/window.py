"""One window: micro-batches whose gradients make one update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from halfstep.distributed import Group
from halfstep.distributed.group import Pending
from halfstep.engine.backward import backward
from halfstep.engine.loss import sum_and_weight
from halfstep.engine.update import Number, Update, as_scalar
from halfstep.errors import ModelError
from halfstep.precision.policy import HALF_DTYPES, WindowAutocast
from halfstep.precision.scaler import LossScaler


class Reference:
    """The expected weight of a micro-batch: fixed in the first window, equal on all ranks, a power of two.

    Backward runs on `sum * scale / reference`, so that FP16 sees the magnitudes of a mean before the window's weight is known.
    Being a power of two it costs no rounding.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._unscaled: torch.Tensor | None = None
        self._unscaled_for = 0.0
        self.value: float | None = None
        """None until the first micro-batch was weighed."""

    def root(self, weight: Number, scaler: LossScaler | None) -> torch.Tensor:
        """The gradient that backward of a sum starts from: the scale over the reference. `fix` says who must call it."""
        reference = self.fix(weight)
        if scaler is not None:
            return scaler.scale / reference
        if self._unscaled is None or self._unscaled_for != reference:
            self._unscaled, self._unscaled_for = torch.full((), 1.0 / reference, device=self._device), reference
        return self._unscaled

    def fix(self, weight: Number) -> float:
        """The reference. Until it is fixed every rank calls this once a window; the largest weight of all ranks decides."""
        if self.value is None:
            first = torch.tensor(float(weight), device=self._device)
            largest = float(self._group.start_largest(first).wait())
            if not 0 < largest < math.inf:
                return 1.0
            self.value = 2.0 ** round(math.log2(largest))
        return self.value


class Window:
    """Forwards and backwards whose gradients are added, weighted, and end in one update.

    Engines make windows. In one that `Engine.window` gave, run the model inside `forward` and call `backward` for each loss.
    """

    def __init__(
        self,
        *,
        autocast: WindowAutocast,
        reference: Reference,
        scaler: LossScaler | None,
        group: Group,
        device: torch.device,
    ) -> None:
        self._autocast, self._reference, self._scaler, self._group = autocast, reference, scaler, group
        self._device = device
        self._root: torch.Tensor | None = None
        self.loss_sum: Number = 0.0
        """Sum of the losses of this rank, detached."""
        self.weight: Number = 0.0
        """Sum of the weights of this rank."""
        self.micro_batches = 0
        """Number of micro-batches of this rank; where the user calls `backward`, of those calls."""
        self.samples = 0
        """Number of samples of this rank, where the engine reads the micro-batches."""
        self.global_sums: Pending | None = None
        """Loss and weight over all ranks, once their reduction has been started."""
        self._update: Update | None = None

    @property
    def update(self) -> Update:
        """The update that the window ended in; known after its `with` block."""
        if self._update is None:
            raise ModelError("`window.update` is known after the window's `with` block has ended without an error.")
        return self._update

    def ended_in(self, update: Update) -> None:
        """Called by the engine when the window's update has been made."""
        self._update = update

    def __enter__(self) -> Window:
        self._autocast.open()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._autocast.close()

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward and its loss: autocast as the precision says."""
        return self._autocast

    def backward(self, loss: torch.Tensor, weight: Any = None, *, retain_graph: bool = False) -> None:
        """Add the gradients of one loss to the window.

        Args:
            loss: scalar; the mean over a micro-batch, or with `weight` the sum over it.
            weight: how much the loss counts in the window's mean (tokens, samples). 0 for a further loss of a micro-batch that
                an earlier call counted already. None: the loss is a mean and counts as one.
            retain_graph: keep the graph for another backward through it.
        """
        total, counted = sum_and_weight(loss if weight is None else (loss, weight))
        self.add(total, counted)
        self.run_backward(total, retain_graph=retain_graph)

    def add(self, total: torch.Tensor, weight: Number) -> None:
        """Count a micro-batch, before its backward."""
        self.loss_sum = self.loss_sum + total.detach()
        self.weight = self.weight + weight
        self.micro_batches += 1
        self._fix_root(weight)

    def stand_by(self) -> None:
        """Count nothing where another rank counts a micro-batch, before its backward."""
        self._fix_root(0.0)

    def _fix_root(self, weight: Number) -> None:
        if self._root is None:
            self._root = self._reference.root(weight, self._scaler)

    def run_backward(self, total: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Backward of a counted loss under the window's scale."""
        root = self._root
        assert root is not None, "add() comes first"
        if root.dtype != total.dtype:
            root = root.to(total.dtype)
        backward(total, root, retain_graph=retain_graph)

    def grad(self, outputs: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Gradients of `outputs` with respect to `inputs`, with a graph of their own, for gradient penalties.

        They are computed under the loss scale, so that FP16 does not lose them, and returned without it.
        """
        scale = 1.0 if self._scaler is None else self._scaler.scale
        scaled = torch.autograd.grad(_at_least_fp32(outputs).sum() * scale, list(inputs), create_graph=True)
        return tuple(_at_least_fp32(gradient) / scale for gradient in scaled)

    def start_sums(self) -> None:
        """Start to sum loss and weight over the ranks, once a window: every rank calls this, before its last backward."""
        if self._group.alone or self.global_sums is not None:
            return
        self._fix_root(0.0)
        pair = torch.stack([as_scalar(number, self._device) for number in (self.loss_sum, self.weight)])
        self.global_sums = self._group.start_sum(pair)

    @property
    def is_weighed(self) -> bool:
        """Whether any rank has counted anything yet, in this window or before."""
        return self._reference.value is not None

    @property
    def scale(self) -> Number:
        """The loss scale that backward ran under; 1.0 without one."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def totals(self, *, on_host: bool) -> tuple[Number, Number]:
        """Summed loss and weight over all ranks; as host numbers where reading them costs nothing."""
        loss, weight = self.loss_sum, self.weight
        if self.global_sums is not None:
            loss, weight = self.global_sums.wait().unbind()
        return (float(loss), float(weight)) if on_host else (loss, weight)


def _at_least_fp32(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in HALF_DTYPES else value
