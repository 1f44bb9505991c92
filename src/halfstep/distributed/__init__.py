"""Process groups, wrapping and agreement over ranks, on `torch.distributed`."""

from halfstep.distributed.env import World, world
from halfstep.distributed.group import Group, connect, local_device

__all__ = ["Group", "World", "connect", "local_device", "world"]
