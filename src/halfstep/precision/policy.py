"""What a precision means for forward, backward and parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep._compat import CAST_CACHE_SURVIVES_NO_GRAD
from halfstep.config.choice import Choice
from halfstep.config.options import Precision
from halfstep.errors import DeviceError, ModelError

HALF_DTYPES = (torch.float16, torch.bfloat16)
_AUTOCAST = {Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The arithmetic of a run.

    Attributes:
        precision: which policy this is.
        device_type: the device type of the model, as autocast names it.
        autocast_dtype: the dtype that autocast casts to; None where nothing is cast.
        scaled: whether the loss is scaled so that small gradients survive FP16.
    """

    precision: Precision
    device_type: str
    autocast_dtype: torch.dtype | None
    scaled: bool

    def autocast(self) -> torch.autocast:
        """An ordinary autocast context of this policy, for evaluation."""
        return torch.autocast(self.device_type, self.autocast_dtype or torch.bfloat16, enabled=self.autocast_dtype is not None)


def policy_for(precision: Precision, device: torch.device) -> Policy:
    """The policy of `precision` on `device`.

    Raises:
        DeviceError: the device cannot train in that precision.
    """
    if precision in (Precision.BF16, Precision.BF16_PURE):
        _check_bf16(device)
    if precision is Precision.FP16 and device.type == "mps":
        raise DeviceError('`precision = "fp16"` scales the loss, which torch does not offer on MPS; use "bf16" or "fp32" there.')
    return Policy(
        precision=precision,
        device_type=device.type,
        autocast_dtype=_AUTOCAST.get(precision),
        scaled=precision is Precision.FP16,
    )


def _check_bf16(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise DeviceError(f'{name} has no BF16 arithmetic (it would be emulated); use `precision = "fp16"` or "fp32".')


def check_parameters(policy: Policy, module: nn.Module) -> None:
    """See that the parameters' dtype suits the policy.

    Raises:
        ModelError: trainable parameters are FP16, or BF16 under a policy that needs FP32 master weights.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype in HALF_DTYPES and policy.precision is not Precision.BF16_PURE:
            raise ModelError(_half_parameter(name, parameter.dtype, policy.precision))


def _half_parameter(name: str, dtype: torch.dtype, precision: Precision) -> str:
    held = str(dtype).removeprefix("torch.")
    why = "gradients in that type cannot be unscaled" if precision is Precision.FP16 else "its updates are lost to rounding"
    also = ' or train with `precision = "bf16-pure"`' if dtype is torch.bfloat16 else ""
    return (
        f'Parameter `{name}` is {held}; `precision = "{precision}"` trains FP32 parameters ({why}). '
        f"Load the model in float32 (`model.float()` before the optimizer is made){also}."
    )


def hold_in_bf16(module: nn.Module) -> None:
    """Turn the floating-point parameters and buffers into BF16 in place; optimizers keep their references.

    Only for `Precision.BF16_PURE`, before the first update.
    """
    module.to(torch.bfloat16)


def allow_tf32(device: torch.device) -> dict[str, Choice[bool]]:
    """Turn TF32 matmuls on where the GPU has them, and say so; empty where there is nothing to choose."""
    if device.type != "cuda" or torch.version.hip is not None:
        return {}
    if torch.cuda.get_device_capability(device) < (8, 0):
        return {"tf32": Choice(value=False, reason=f"{torch.cuda.get_device_name(device)} has no TF32")}
    torch.set_float32_matmul_precision("high")
    return {
        "tf32": Choice(
            value=True,
            reason='FP32 matmuls round inputs to 10 bits; `set_float32_matmul_precision("highest")` undoes it',
        )
    }


class WindowAutocast:
    """Autocast that stays open over the forwards of one window, so that each weight is cast once a window.

    Used as a context around each forward and its loss. Between forwards (in backward, in the user's own code) autocast is
    switched off without being left, which keeps its cache; it is closed before the step, so no forward ever sees a weight that
    was cast before an update.
    """

    __slots__ = ("_cast", "_device_type", "_dtype", "_each", "_window")

    def __init__(self, policy: Policy) -> None:
        self._device_type, self._dtype = policy.device_type, policy.autocast_dtype
        self._cast = policy.autocast_dtype is not None
        self._window: torch.autocast | None = None
        self._each: torch.autocast | None = None

    def open(self) -> None:
        """Begin a window: autocast is entered and switched off until the first forward.

        Raises:
            ModelError: the caller is in an autocast of their own, which would change the arithmetic and outlive the step.
        """
        if torch.is_autocast_enabled(self._device_type):
            raise ModelError(
                "The engine is used inside a `torch.autocast` context, whose cached weights would be stale after the step. "
                "Leave that context; the engine opens its own, as `precision` says."
            )
        if self._cast and CAST_CACHE_SURVIVES_NO_GRAD:
            self._window = torch.autocast(self._device_type, self._dtype)
            self._window.__enter__()  # type: ignore[no-untyped-call]
            torch.set_autocast_enabled(self._device_type, False)

    def close(self) -> None:
        """End the window: autocast is left and its cache is dropped, even inside the window of another engine."""
        if self._window is not None:
            self._window.__exit__(None, None, None)
            self._window = None
            torch.clear_autocast_cache()

    def __enter__(self) -> None:
        if self._window is not None:
            torch.set_autocast_enabled(self._device_type, True)
        elif self._cast:
            self._each = torch.autocast(self._device_type, self._dtype)
            self._each.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        if self._window is not None:
            torch.set_autocast_enabled(self._device_type, False)
        elif self._each is not None:
            self._each.__exit__(*raised)
            self._each = None


def largest_magnitude(parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[str, float]:
    """Name and largest absolute value of the parameter that holds it; a value that is not finite wins.

    Of a sharded parameter this rank's shard is looked at, so that any rank may ask by itself.
    """
    name, largest = "", -1.0
    for candidate, parameter in parameters:
        held: torch.Tensor = parameter.detach()
        held = held.to_local() if hasattr(held, "to_local") else held
        value = float(held.abs().max()) if held.numel() else 0.0
        if not value <= largest:
            name, largest = candidate, value
            if value != value:
                break
    return name, largest
