"""What the launcher says about this process. The only file that reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from halfstep.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The place of this process among all.

    Attributes:
        rank: number of this process, 0 to `size` - 1.
        size: number of processes on all machines.
        local_rank: number of this process on its machine.
        local_size: number of processes on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0


def world() -> World:
    """The world that `torchrun` set up, or a world of one process.

    Raises:
        ConfigError: one of torchrun's variables is set and is not a number.
    """
    return World(
        rank=_number("RANK", 0),
        size=_number("WORLD_SIZE", 1),
        local_rank=_number("LOCAL_RANK", 0),
        local_size=_number("LOCAL_WORLD_SIZE", 1),
    )


def launch_name() -> str | None:
    """A name that all ranks of this launch share, or None where no launcher started this process."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    parts = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return "-".join(os.environ.get(part, "") for part in parts)


def restarts() -> int:
    """How often torchrun has started the ranks again."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise ConfigError(f"The environment variable {name} is {text!r}; torchrun sets it to a whole number.")
    return int(text)
