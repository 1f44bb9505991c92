"""The course of the learning rate: warm-up, a long stable part, and a decay at the end."""

from __future__ import annotations

import math


def warmup_stable_decay(applied: int, *, warmup: int, decay: int, planned: int, final_share: float) -> float:
    """The share of the learning rate after so many applied updates (Hu et al., arXiv 2404.06395).

    It rises in even steps over the warm-up, stays at 1, and falls over the last `decay` updates to `final_share` as one less
    the root of the way, which falls fast at first (Haegele et al., arXiv 2405.18392). After the plan it stays there.

    Args:
        applied: updates applied before.
        warmup: updates of the warm-up.
        decay: updates of the decay.
        planned: updates of the run.
        final_share: the share at its last update.
    """
    if applied < warmup:
        return (applied + 1) / (warmup + 1)
    falling = applied - (planned - 1 - decay)
    if decay == 0 or falling <= 0:
        return 1.0
    return 1.0 - math.sqrt(min(1.0, falling / decay)) * (1.0 - final_share)
