"""Every operation between two moments: its module, number format, matrix work, time and line, added up by kind.

Two of torch's modes listen together. The function mode sees what the script calls, above autocast, so it knows whether
autocast was on; the dispatch mode sees what really ran, below autocast, so it knows in which format.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from halfstep.events.vocabulary import Place
from halfstep.record.probes.lines import line_of_script
from halfstep.record.probes.paths import Paths

LOW = (torch.float16, torch.bfloat16)
FUNCTION_FILE = sys.modules[torch.autograd.Function.__module__].__file__ or ""


@dataclass(frozen=True, slots=True)
class Kind:
    """What operations are added up by.

    Attributes:
        module: path of the module.
        name: of the operator with its namespace, `aten::` left out.
        dtype: of its first floating input for matrix products, else of its first floating output; None without one.
        why: why it did not run in low precision inside an autocast region; empty where it did, or where there is none.
        place: the line outside torch; None in backward.
        backward: whether autograd ran it.
        shape: of the matrices, for matrix products: rows, inner, columns as far as they are known.
        moved: `cast`, or from where to where a copy went between devices and whether that can run beside computation.
    """

    module: str
    name: str
    dtype: torch.dtype | None
    why: str
    place: Place | None
    backward: bool
    shape: tuple[int, ...] = ()
    moved: str = ""


@dataclass(slots=True)
class Tally:
    """How often, how long on the host, how many floating operations and bytes written."""

    count: int = 0
    seconds: float = 0.0
    flops: int = 0
    nbytes: int = 0


class Asked(TorchFunctionMode):
    """What the script calls now, and whether autocast is on there."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.autocast = self.seen_on = torch.is_autocast_enabled(device_type)
        self.upcast = False
        """Whether the call has already turned low precision into FP32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call with a note of autocast's state."""
        before = self.autocast, self.upcast
        self.autocast, self.upcast = torch.is_autocast_enabled(self._device_type), False
        self.seen_on = self.seen_on or self.autocast
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.autocast, self.upcast = before


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up every operation while it is entered.

    Args:
        paths: tells which module runs.
        asked: the function mode that is entered with it; None leaves `why` empty.
    """

    def __init__(self, paths: Paths, asked: Asked | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths, self._asked = paths, asked
        self.tallies: dict[Kind, Tally] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and add it up."""
        kwargs = kwargs or {}
        start = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - start
        kind, flops = self._kind(func, args, kwargs, result)
        tally = self.tallies.setdefault(kind, Tally())
        tally.count += 1
        tally.seconds += seconds
        tally.flops += flops
        tally.nbytes += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor))
        return result

    def _kind(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Kind, int]:
        given, made = _floating((args, kwargs)), _floating(result)
        count = flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None and given else 0
        first = (given if flops else made or given)[:1]
        dtype = first[0].dtype if first else None
        backward = bool(torch._C._current_autograd_node())
        name = func._schema.name.removeprefix("aten::")
        if self._asked is not None and name == "_to_copy" and dtype is torch.float32 and given and given[0].dtype in LOW:
            self._asked.upcast = True
        why = "" if backward or dtype is not torch.float32 or name == "_to_copy" else self._why(name)
        place = None if backward else line_of_script()
        shape = _matrix(given) if flops else ()
        moved = _moved(given, made, kwargs) if name == "_to_copy" and given and made else ""
        return Kind(self._paths.now(), name, dtype, why, place, backward, shape, moved), flops

    def _why(self, name: str) -> str:
        """Why an operation runs in FP32 where autocast has been on."""
        if self._asked is None or not self._asked.seen_on:
            return ""
        function = custom_function()
        if function:
            return f"custom autograd.Function {function}"
        if "::" in name:
            return f"custom operation {name}"
        if not self._asked.autocast:
            return "autocast is off here"
        return "on autocast's FP32 list" if self._asked.upcast else "its inputs are FP32"


def custom_function() -> str:
    """The name of the `autograd.Function` whose forward runs now; empty where none does."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == FUNCTION_FILE and frame.f_code.co_name == "apply":
            return str(getattr(frame.f_locals.get("cls"), "__name__", ""))
        frame = frame.f_back
    return ""


def _moved(given: list[Tensor], made: list[Tensor], kwargs: Any) -> str:
    source, target = given[0], made[0]
    if source.device == target.device:
        return "cast" if source.dtype != target.dtype else ""
    pinned = "pinned" if source.device.type != "cpu" or source.is_pinned() else "not pinned"
    waits = "beside computation" if kwargs.get("non_blocking") else "blocking"
    return f"{source.device.type} to {target.device.type}, {pinned}, {waits}"


def _floating(nested: Any) -> list[Tensor]:
    return [t for t in tree_leaves(nested) if isinstance(t, Tensor) and t.is_floating_point()]


def _matrix(given: list[Tensor]) -> tuple[int, ...]:
    """Rows, inner and columns of the last two matrices given."""
    matrices = [t for t in given if t.dim() >= 2][-2:]
    return (*matrices[0].shape[-2:], matrices[1].shape[-1]) if len(matrices) == 2 else ()
