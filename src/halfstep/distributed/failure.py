"""When one rank fails, the others say which one and why.

A rank that fails leaves a note in the store through which the ranks met, and ends. Its connections close, so that the others,
which wait for it in some collective, get an error there; they look for the note and end with what it says. (On GPUs a collective
may not notice; there the launcher ends the others, as torchrun does at once.)
"""

from __future__ import annotations

import json
from contextlib import suppress

from halfstep.distributed.whereabouts import missing_ranks
from halfstep.errors import HalfstepError, RunStopped

KEY = "halfstep/failure"
TIMED_OUT = ("Application timeout caused pair closure", "Timed out waiting")
"""What gloo says when the process at the other end has not answered for as long as the group waits."""
LOST = ("Connection closed by peer", "Connection reset by peer")
"""What gloo says when the process at the other end is gone."""


def explain(error: Exception, rank: int, size: int) -> None:
    """Note why this rank fails; or, where its error only comes of another rank's, raise what that one noted.

    Raises:
        RunStopped: another rank failed first.
    """
    first_rank, told = _first(rank, _told_of(error, rank, size))
    if isinstance(error, HalfstepError) or not isinstance(error, RuntimeError):
        return
    if first_rank != rank:
        raise RunStopped(f"Rank {first_rank} failed, and with it the run: {told}") from error
    if any(words in str(error) for words in TIMED_OUT):
        raise RunStopped(told) from error
    if any(words in str(error) for words in LOST):
        raise RunStopped(
            "Another rank is gone without a word: killed, perhaps for want of memory, or ended early. "
            "Look at what the other processes printed last, and at the system's log."
        ) from error


def _first(rank: int, told: str) -> tuple[int, str]:
    """The note of the rank that failed first, which may be this one."""
    from torch.distributed.distributed_c10d import _get_default_store  # only there where torch has process groups

    with suppress(RuntimeError, ValueError):  # the store or the group has ended with the rank that held it
        kept = _get_default_store().compare_set(KEY, "", json.dumps([rank, told]))
        first_rank, told = json.loads(kept)
        return int(first_rank), told
    return rank, told


def _told_of(error: Exception, rank: int, size: int) -> str:
    """What this rank has to tell; after a wait that ran out of time, which rank it waited for, and what that is doing."""
    if isinstance(error, HalfstepError) or not any(words in str(error) for words in TIMED_OUT):
        return _sentence(error)
    from torch.distributed.distributed_c10d import _get_default_store

    with suppress(RuntimeError, ValueError):
        if found := missing_ranks(_get_default_store(), rank, size):
            return found
    return (
        "Another rank has not answered for as long as the process group waits: its machine or the network is gone, or it "
        "hangs. Look at what the other processes printed last."
    )


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, HalfstepError) else f"{type(error).__name__}: {error}"
