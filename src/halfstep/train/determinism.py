"""Random numbers that a seed decides, and operations that repeat bitwise where that is asked for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from halfstep.errors import RunStopped

TORCHS_WORDS = "does not have a deterministic implementation"


def seed_ranks_apart(seed: int, rank: int) -> None:
    """Seed Python, NumPy and torch for what a rank draws while it trains: other dropout than its neighbours'."""
    random.seed(seed + rank)
    numpy.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


@contextmanager
def repeatable(asked: bool) -> Iterator[None]:
    """Within it, if asked, torch takes only operations that give the same bits each time.

    Raises:
        RunStopped: the model needs an operation that has none.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    tries_kernels = torch.backends.cudnn.benchmark
    if asked:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    except RuntimeError as error:
        if TORCHS_WORDS not in str(error):
            raise
        operation = str(error).partition(TORCHS_WORDS)[0].strip()
        raise RunStopped(
            f"`run.deterministic = true`, and the model uses {operation}, which on this device has no form that repeats "
            "bitwise. Use false, or another operation."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = tries_kernels
