"""Python values as JSON and back, exactly: what schedulers, parameter groups and callers keep.

Only these types are known, so that nothing is ever unpickled: numbers, text, None, lists, tuples, dicts with any such keys,
counters, and small tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from halfstep.errors import ModelError


def encode(value: Any, where: str) -> Any:
    """The value as JSON types.

    Args:
        value: what is kept.
        where: whose it is, for the message.

    Raises:
        ModelError: it is of a type that is not known.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [encode(item, where) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, where) for item in value]}
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(key, where), encode(item, where)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor):
        here = value.detach()
        return {"tensor": here.tolist(), "dtype": str(here.dtype).partition(".")[2], "on_host": here.device.type == "cpu"}
    raise ModelError(
        f"{where} holds a {type(value).__name__}, which a checkpoint cannot keep: it keeps numbers, text, lists, tables and "
        "tensors."
    )


def decode(value: Any, device: torch.device) -> Any:
    """The value that was encoded; tensors that were not on the host go to `device`."""
    if isinstance(value, list):
        return [decode(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(value["tensor"], dtype=dtype, device="cpu" if value["on_host"] else device)
    (kind, items), *_ = value.items()
    if kind == "tuple":
        return tuple(decode(item, device) for item in items)
    pairs = {decode(key, device): decode(item, device) for key, item in items}
    return Counter(pairs) if kind == "counter" else pairs
