"""Checkpoints: everything that a run needs to go on, saved while it goes."""

from halfstep.checkpoint.store import Checkpoints, Restored

__all__ = ["Checkpoints", "Restored"]
