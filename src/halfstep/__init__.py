"""halfstep: a PyTorch training run as fast and as small as its hardware allows, with the numbers proved right.

Importing this package does not import torch; the engine is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.checkpoint import Checkpoints as Checkpoints
    from halfstep.distributed import local_device as local_device
    from halfstep.engine import Engine as Engine
    from halfstep.engine import Update as Update
    from halfstep.precision.scaler import ScalerSettings as ScalerSettings
    from halfstep.record.library import watch as watch

__version__ = "0.1.0"

_LAZY = {
    "Checkpoints": "halfstep.checkpoint",
    "Engine": "halfstep.engine",
    "ScalerSettings": "halfstep.precision.scaler",
    "Update": "halfstep.engine",
    "local_device": "halfstep.distributed",
    "watch": "halfstep.record.library",
}
__all__ = ["Checkpoints", "Engine", "ScalerSettings", "Update", "__version__", "local_device", "watch"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
