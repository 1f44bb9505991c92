"""The precision of a run, decided once: asked for, or measured on the first micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.config.options import Precision, option
from halfstep.distributed import Group
from halfstep.engine.batch import to_device
from halfstep.engine.loss import LossFunction
from halfstep.errors import ModelError
from halfstep.precision.policy import Policy, WindowAutocast, allow_tf32, check_parameters, hold_in_bf16, policy_for
from halfstep.precision.scaler import LossScaler, ScalerSettings
from halfstep.precision.select import explain_without_model, select_precision

AUTO = "auto"


class Arithmetic:
    """Policy, autocast and loss scale of a run.

    Args:
        asked: a precision, or "auto": decided on the first micro-batch, the same on all ranks.
        module: the model without wrappers.
        optimizers: they hold its parameters.
        device: where the model is.
        group: all ranks.
        settings: how a loss scale moves.
    """

    def __init__(
        self,
        asked: Precision | str,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        device: torch.device,
        group: Group,
        settings: ScalerSettings,
    ) -> None:
        self._module, self._optimizers, self._device, self._group = module, optimizers, device, group
        self._settings = settings
        self._policy: Policy | None = None
        self.scaler: LossScaler | None = None
        """The loss scale; None without one."""
        self.choices: dict[str, Choice[Any]] = allow_tf32(device)
        """Precision and TF32, with their reasons."""
        if asked != AUTO:
            self.decide(Choice(value=option(Precision, asked, name="precision", also=(AUTO,)), reason=ASKED_FOR))

    @property
    def decided(self) -> bool:
        """Whether the precision is known."""
        return self._policy is not None

    @property
    def choice(self) -> Choice[Precision]:
        """The precision with its reason; known once decided."""
        return self.choices["precision"]

    @property
    def policy(self) -> Policy:
        """The policy that was decided on."""
        assert self._policy is not None, "begin() or decide() comes first"
        return self._policy

    def begin(self, loss: LossFunction | None, batch: Any) -> None:
        """Decide "auto" if it is still open; every rank calls it, with a micro-batch where it has one."""
        if self._policy is not None:
            return
        if loss is None or batch is None:
            choice = explain_without_model(self._device)
        else:
            choice = select_precision(self._module, loss, to_device(batch, self._device), self._device)
        self.decide(self._group.from_first(choice))

    def decide(self, choice: Choice[Precision]) -> None:
        """Take a precision for the rest of the run.

        Raises:
            DeviceError: the device cannot train in it.
            ModelError: the parameters' dtype does not suit it.
        """
        policy = policy_for(choice.value, self._device)
        if choice.value is Precision.BF16_PURE and self._policy is None:
            self._to_bf16()
        check_parameters(policy, self._module)
        self._policy = policy
        self.autocast = WindowAutocast(policy)
        self.scaler = LossScaler(self._settings, self._device) if policy.scaled else None
        self.choices["precision"] = choice

    def _to_bf16(self) -> None:
        if any(optimizer.state for optimizer in self._optimizers):
            raise ModelError(
                'The optimizer has states already; `precision = "bf16-pure"` turns the parameters into BF16 before the first '
                "update. Make the engine before the optimizer's first step, or before its states are loaded."
            )
        hold_in_bf16(self._module)
