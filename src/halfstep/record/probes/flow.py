"""Follows values that are not finite from operation to operation, forward and backward.

Every operation that gives back a value which is not finite is kept with the operations that made its inputs, so that one can
walk back from a bad result to where it began. Walking back, rather than stopping at the first, is what tells a mask of minus
infinity, which softmax takes away again, from a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.events.vocabulary import Place
from halfstep.record.probes.lines import line_of_script
from halfstep.record.probes.paths import Paths

RERUN = str(Path(__file__).with_name("origin.py"))
"""Whose frames begin a re-run: what called them is not what led to an operation."""
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
"""Operations that write without reading what was there."""
WITHOUT_VALUES = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_"}
"""Operations whose result is whatever the memory held."""


class Kind(Enum):
    """What a tensor holds."""

    FINITE = 0
    INFINITE = 1
    NAN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """What last wrote a tensor: the operation, its plain numbers, and its line."""

    name: str
    scalars: tuple[float, ...]
    place: Place | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input of an operation that gave back what is not finite."""

    kind: Kind
    dtype: torch.dtype
    shape: tuple[int, ...]
    parent: Operation | None
    """The operation that made it not finite; None where it is finite or came from outside."""
    source: str
    """What it is where it came from outside, such as `weight fc.bias`; else empty."""
    maker: Maker | None
    largest: float
    """The greatest magnitude among its finite values; NaN where it has none."""
    zeros: bool
    negative: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation that gave back a value that is not finite.

    Attributes:
        number: how many operations ran before it.
        name: of the operator, such as `mm`.
        node: of the autograd node that runs it in backward, such as `LogBackward0`; empty in forward.
        module: path of the module it belongs to; empty for the model itself.
        place: the line outside torch that led to it; None in backward.
        result: what it gave back.
        dtype: of what it gave back.
        in_fp32: the greatest magnitude that the same inputs give in FP32; None where all inputs are FP32 already or were bad.
        scalars: its plain numbers.
    """

    number: int
    name: str
    node: str
    module: str
    place: Place | None
    inputs: tuple[Input, ...]
    result: Kind
    dtype: torch.dtype
    in_fp32: float | None
    scalars: tuple[float, ...]

    def origin(self) -> tuple[Operation, str]:
        """Where the bad value began: an operation, and what it got from outside if that was bad already."""
        here = self
        while True:
            bad = sorted((i for i in here.inputs if i.kind is not Kind.FINITE), key=here._suspicion)
            if not bad or (bad[0].parent is None and not bad[0].source):
                return here, ""
            if bad[0].parent is None:
                return here, bad[0].source
            here = bad[0].parent

    def _suspicion(self, given: Input) -> tuple[bool, bool, bool]:
        """Buffers last: running statistics hold what the first forward put there. NaN before infinity, which may be a mask.

        In backward, a gradient before what forward has kept.
        """
        return (
            given.source.startswith("buffer"),
            given.kind is not Kind.NAN,
            bool(self.node) and (given.parent is not None and not given.parent.node),
        )


class Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Listens to every operation while it is entered.

    Args:
        outside: what is known of tensors that no operation made, by `key_of`.
        paths: tells which module runs.
    """

    def __init__(self, outside: Mapping[int, str], paths: Paths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside, self._paths = outside, paths
        self._bad: dict[int, Operation] = {}
        self._makers: dict[int, Maker] = {}
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and look at what it gives back."""
        kwargs = kwargs or {}
        self._count += 1
        name = func._schema.name.split("::")[-1]
        read = self._read(func, name, args, kwargs)
        before = [(tensor, kind_of(tensor), self._bad.get(key_of(tensor)), self._makers.get(key_of(tensor))) for tensor in read]
        result = func(*args, **kwargs)
        if _is_view(func):
            return result
        written = [t for t in tree_leaves(result) if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]
        kinds = [Kind.FINITE if name in WITHOUT_VALUES else kind_of(tensor) for tensor in written]
        worst = max(kinds, key=lambda kind: kind.value, default=Kind.FINITE)
        maker = Maker(name=name, scalars=_scalars(args, kwargs), place=None if _node() else line_of_script(until=RERUN))
        operation = self._operation(func, args, kwargs, maker, before, worst, written[0].dtype) if worst.value else None
        for tensor, kind in zip(written, kinds, strict=True):
            self._note(key_of(tensor), maker, operation if kind is not Kind.FINITE else None)
        return result

    def of(self, tensor: Tensor) -> Operation | None:
        """The operation that made `tensor` not finite."""
        return self._bad.get(key_of(tensor))

    def _read(self, func: Any, name: str, args: Any, kwargs: Any) -> list[Tensor]:
        """The floating inputs whose values the operation reads."""
        skipped = args[0] if name in OVERWRITES and args else None
        leaves = (t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t is not skipped)
        return [t for t in leaves if t.is_floating_point() or t.is_complex()] if name not in WITHOUT_VALUES else []

    def _note(self, key: int, maker: Maker, operation: Operation | None) -> None:
        self._makers[key] = maker
        if operation is None:
            self._bad.pop(key, None)
        else:
            self._bad[key] = operation

    def _operation(
        self, func: Any, args: Any, kwargs: Any, maker: Maker, before: list[Any], result: Kind, dtype: torch.dtype
    ) -> Operation:
        node = _node()
        fresh = all(kind is Kind.FINITE for _, kind, _, _ in before)
        return Operation(
            number=self._count,
            name=maker.name,
            node=node.name() if node is not None else "",
            module=self._paths.now(),
            place=maker.place,
            inputs=tuple(self._input(*seen, told=fresh) for seen in before),
            result=result,
            dtype=dtype,
            in_fp32=_in_fp32(func, args, kwargs) if fresh else None,
            scalars=maker.scalars,
        )

    def _input(self, tensor: Tensor, kind: Kind, parent: Operation | None, maker: Maker | None, *, told: bool) -> Input:
        bad = kind is not Kind.FINITE
        return Input(
            kind=kind,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            parent=parent if bad else None,
            source=self._outside.get(key_of(tensor), "") if bad and parent is None else "",
            maker=maker,
            largest=largest(tensor) if told else float("nan"),
            zeros=told and bool((tensor == 0).any()),
            negative=told and not tensor.is_complex() and bool((tensor < 0).any()),
        )


def _node() -> Any:
    """The autograd node that runs; None in forward, whatever torch's stub says."""
    return torch._C._current_autograd_node()


def key_of(tensor: Tensor) -> int:
    """What is the same for all views of one memory."""
    return int(tensor.untyped_storage()._cdata)


def kind_of(tensor: Tensor) -> Kind:
    """The worst value in it."""
    if bool(torch.isfinite(tensor).all()):
        return Kind.FINITE
    return Kind.NAN if bool(torch.isnan(tensor).any()) else Kind.INFINITE


def largest(tensor: Tensor) -> float:
    """The greatest magnitude among the finite values; NaN where there is none."""
    size = tensor.detach().abs().to(torch.float32)
    finite = size[torch.isfinite(size)]
    return float(finite.max()) if finite.numel() else float("nan")


def _scalars(args: Any, kwargs: Any) -> tuple[float, ...]:
    leaves = tree_leaves((args, kwargs))
    plain = [float(v) for v in leaves if isinstance(v, (int, float)) and not isinstance(v, bool)]
    zero_dim = [v for v in leaves if isinstance(v, Tensor) and v.dim() == 0 and v.device.type == "cpu" and v.is_floating_point()]
    return (*plain, *(float(v) for v in zero_dim))


def _is_view(func: Any) -> bool:
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def _in_fp32(func: Any, args: Any, kwargs: Any) -> float | None:
    """The greatest magnitude of what the same inputs give in FP32; infinity where that is not finite either."""
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    half = {torch.float16, torch.bfloat16}
    if func._schema.is_mutable or not ({t.dtype for t in leaves} | {kwargs.get("dtype")}) & half:
        return None

    def wide(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in half else value

    try:
        args, kwargs = torch.utils._pytree.tree_map(wide, (args, kwargs))
        widened = {key: torch.float32 if value in half else value for key, value in kwargs.items()}
        results = [t for t in tree_leaves(func(*args, **widened)) if isinstance(t, Tensor)]
    except RuntimeError:
        return None
    finite = all(kind_of(t) is Kind.FINITE for t in results)
    return max((largest(t) for t in results), default=0.0) if finite else float("inf")
