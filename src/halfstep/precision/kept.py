"""The precision that "auto" found, kept from one run to the next of the same model on the same data.

What is kept holds only for the very same weights, micro-batch, loss, device and versions, so that nothing is concluded from
one model about another. As with rates, a file that is damaged or cannot be written means that it is measured again, and is
never an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import __version__
from halfstep.config.choice import Choice
from halfstep.config.options import Precision
from halfstep.measure.cache_folder import cache_dir
from halfstep.measure.checksums import checksums
from halfstep.measure.rate_cache import machine_of, write_whole


def key_of(model: nn.Module, batch: Mapping[str, Tensor], loss: object, device: torch.device) -> str:
    """A digest of all that a trial depends on, but for how busy the machine is; tensors count by the sums of their bits.

    Args:
        model: on its device.
        batch: the micro-batch that it is tried on, by name.
        loss: whose `repr` says all of it.
        device: where the model is.
    """
    tensors: list[Tensor] = [*model.parameters(), *model.buffers(), *batch.values()]
    asked = [parameter.requires_grad for parameter in model.parameters()]
    machine = (machine_of(device), __version__)
    shapes = [(tuple(each.shape), str(each.dtype)) for each in tensors]
    about = (machine, repr(model), _attention(model), repr(loss), list(batch), shapes, asked, checksums(tensors))
    return hashlib.sha256(repr(about).encode()).hexdigest()[:32]


def kept_precision(key: str) -> Choice[Precision] | None:
    """What an earlier run measured, with its date in the reason; `None` where none did or the file is not to be trusted."""
    try:
        kept = json.loads(_path(key).read_text(encoding="utf-8"))
        reason, day = kept["reason"], date.fromisoformat(kept["measured"])
        if not isinstance(reason, str):
            return None
        return Choice(value=Precision(kept["precision"]), reason=f"{reason}; measured on {day}, on the same weights and data")
    except (OSError, RuntimeError, ValueError, TypeError, LookupError):
        return None


def keep_precision(key: str, choice: Choice[Precision]) -> None:
    """Keep what was measured today."""
    record = {"precision": str(choice.value), "reason": choice.reason, "measured": date.today().isoformat()}
    with suppress(OSError, RuntimeError):
        write_whole(_path(key), json.dumps(record, indent=2) + "\n")


def _attention(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None))


def _path(key: str) -> Path:
    return cache_dir() / "precision" / f"{key}.json"
