"""The loss scale as it is now."""

from __future__ import annotations

import torch


def scale_of(scaler: torch.amp.GradScaler | None) -> float | None:
    """The scale; None without a scaler. `get_scale` is not asked: scripts call it to see whether a step was skipped."""
    if scaler is None:
        return None
    return float(scaler._init_scale if scaler._scale is None else scaler._scale)
