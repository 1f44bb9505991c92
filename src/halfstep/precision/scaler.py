"""The loss scale of FP16: grows slowly, halves on overflow, and has a floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from halfstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerSettings:
    """How the loss scale moves.

    Attributes:
        init_scale: the scale of the first update.
        growth_factor: the scale is multiplied by this ...
        growth_interval: ... after so many applied updates in a row.
        backoff_factor: the scale is multiplied by this on every overflow.
        floor: below this scale the run stops; `torch.amp.GradScaler` has none, and at 2^-128 lets infinities through.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    growth_interval: int = 2000
    backoff_factor: float = 0.5
    floor: float = 2.0**-14

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.init_scale:
            raise ConfigError(
                f"The loss scale starts at {self.init_scale:g} with a floor of {self.floor:g}; "
                "the floor must be above 0 and at most the start."
            )
        if not (self.growth_factor >= 1 > self.backoff_factor > 0 and self.growth_interval >= 1):
            raise ConfigError(
                "The loss scale needs growth_factor >= 1, 0 < backoff_factor < 1 and growth_interval >= 1, "
                f"not {self.growth_factor:g}, {self.backoff_factor:g} and {self.growth_interval}."
            )


class LossScaler:
    """The loss scale and its growth count, on the device; equal on all ranks since all see the same flag.

    Args:
        settings: how the scale moves.
        device: where the flag of each update is.
    """

    def __init__(self, settings: ScalerSettings, device: torch.device) -> None:
        self.settings = settings
        self.scale = torch.full((), settings.init_scale, dtype=torch.float32, device=device)
        """The scale of the next update, a scalar tensor."""
        self._growth = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, skipped: bool | torch.Tensor, weight: float | torch.Tensor = 1.0) -> None:
        """Move the scale after an update.

        Args:
            skipped: whether the gradients were not finite, on the host or as a scalar tensor of 1.0 or 0.0.
            weight: what counted in the update; where nothing did, the gradients tell nothing about the scale and it stays.
        """
        s = self.settings
        found_inf = torch.as_tensor(skipped, dtype=torch.float32, device=self.scale.device)
        scale, growth = self.scale.clone(), self._growth.clone()  # the update before keeps the tensor that it ran under
        torch._amp_update_scale_(scale, growth, found_inf, s.growth_factor, s.backoff_factor, s.growth_interval)
        if isinstance(weight, torch.Tensor):
            scale, growth = torch.where(weight > 0, scale, self.scale), torch.where(weight > 0, growth, self._growth)
        self.scale, self._growth = scale, growth

    @property
    def below_floor(self) -> bool:
        """Whether the scale has fallen below its floor; waits for the device."""
        return bool(self.scale.item() < self.settings.floor)

    def state_dict(self) -> dict[str, Any]:
        """Scale and growth count; waits for the device."""
        return {"scale": self.scale.item(), "growth": int(self._growth.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved scale and growth count."""
        self.scale.fill_(state["scale"])
        self._growth.fill_(state["growth"])
