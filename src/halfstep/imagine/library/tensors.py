"""Tensor functions, layers and losses."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import Loss, Numeric, RandomDraw, Transfer
from halfstep.imagine.arithmetic import HUGE, LARGEST_HALF, check_half_reduction, region_dtype, say_small_guard
from halfstep.imagine.library.formats import LIMITS, dtype_name, take_dtype, write_param
from halfstep.imagine.library.training import edit_gradients, factor
from halfstep.imagine.values import NO_TAGS, Tensor, Thing, Unknown, Value, derive, flat, model_of, settled, tags_of

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

Args = list[Value]
Kwargs = dict[str, Value]

MATMUL = {
    "matmul",
    "mm",
    "bmm",
    "einsum",
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "addmm",
    "baddbmm",
    "scaled_dot_product_attention",
    "chain_matmul",
    "mv",
}
REDUCTIONS = {"sum", "mean", "norm", "var", "std", "cumsum", "pow", "square", "prod", "logsumexp"}
CAST_UP = {
    "softmax",
    "log_softmax",
    "exp",
    "log",
    "pow",
    "sum",
    "norm",
    "cumsum",
    "prod",
    "square",
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "kl_div",
    "smooth_l1_loss",
    "layer_norm",
    "logsumexp",
    "cosine_similarity",
    "normalize",
    "binary_cross_entropy_with_logits",
}
ROOTS = {"log", "sqrt", "rsqrt", "reciprocal", "log2", "log10"}
LOSS_NAMES = re.compile(r"(_loss|cross_entropy|binary_cross_entropy\w*|kl_div|_error)$")


def apply(state: Calls, name: str, inputs: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """A tensor function of this name, whether it was called as a function or as a method."""
    from halfstep.imagine.library.externals import blend

    tensors = [v for v in flat([*inputs, *kwargs.values()]) if isinstance(v, Tensor)]
    if not tensors:
        return blend(state, name, [*inputs, *kwargs.values()], node)
    first = tensors[0]
    if name in ROOTS and first.guard is not None:
        say_small_guard(state, node)
    if name in REDUCTIONS:
        check_half_reduction(state, first, name, node)
    if name in ("masked_fill", "masked_fill_", "where", "full_like"):
        _check_fill(state, tensors, inputs, kwargs, node)
    made = derive(*tensors, tags=frozenset().union(*(t.tags for t in tensors)))
    if isinstance(inputs[0] if inputs else None, (list, tuple)):
        made.retained |= frozenset().union(*(state.memo.get(("list", id(t)), frozenset()) for t in tensors))
    return _typed(state, made, first, name, inputs, kwargs, node)


def _typed(state: Calls, made: Tensor, first: Tensor, name: str, inputs: Args, kwargs: Kwargs, node: ast.AST) -> Tensor:
    if name in MATMUL and state.region is not None:
        made.dtype = region_dtype(state)
        made.regions = tuple(dict.fromkeys((*made.regions, state.region)))
    elif name in CAST_UP and state.region is not None and state.region.device != "cpu":
        made.dtype = "float"
    if name in ("mean", "nanmean"):
        made.reduction = "mean"
    elif name == "sum":
        made.reduction = "sum" if made.grad else made.reduction
        if not made.grad:
            made.tags |= {"summed"}
        if not made.grad and ("mask" in first.name or first.dtype == "bool" or "mask" in first.tags):
            made.tags |= {"count"}
    elif name in (
        "argmax",
        "argmin",
        "argsort",
        "eq",
        "ne",
        "gt",
        "lt",
        "ge",
        "le",
        "isfinite",
        "isnan",
        "isinf",
        "bincount",
        "nonzero",
    ):
        made.grad, made.dtype, made.models = False, "bool" if name[0] in "isegnl" else "int", frozenset()
        made.reduction = None
    if name in ("clamp", "clip", "clamp_min", "clamp_min_", "clamp_", "maximum"):
        low = next((v for v in [*inputs[1:], kwargs.get("min")] if isinstance(v, float)), None)
        if low is not None and 0 < low < 6e-8 and first.dtype == "half":
            made.guard = state.place(node)
    return made


def _finfo(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    """The limits of a dtype that the program names."""
    name = dtype_name(args[0]) if args else None
    if name not in LIMITS:
        return Unknown("finfo")
    made = state.make("context", None, what="finfo")
    made.attrs.update(zip(("min", "max", "tiny", "eps"), LIMITS[name], strict=True))
    return made


def _check_fill(state: Calls, tensors: list[Tensor], inputs: Args, kwargs: Kwargs, node: ast.AST) -> None:
    numbers = [v for v in [*inputs, *kwargs.values()] if isinstance(v, (int, float)) and not isinstance(v, bool)]
    huge = any(abs(n) > LARGEST_HALF and n not in (float("inf"), float("-inf")) for n in numbers)
    huge = huge or any(isinstance(v, Tensor) and v.name == HUGE for v in inputs)
    if huge and any(t.dtype == "half" for t in tensors):
        state.emit(Numeric, node, kind="mask-overflow", region=state.region)


def _function(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    name = path.rsplit(".", 1)[-1]
    if path.startswith("torch.nn.functional.") and LOSS_NAMES.search(name):
        return loss(state, name, args, kwargs, node)
    if name in ("isfinite", "isnan", "isinf"):
        value = settled(args[0]) if args else None
        return Unknown(
            f"{name}({_name(value)})",
            tags_of(value) | {"data"},
            normal=name == "isfinite",
            loaders=getattr(value, "loaders", frozenset()),
        )
    if name == "dropout":
        state.emit(RandomDraw, node)
    if name.startswith("_foreach_") and name.endswith("_"):
        for params in (v for v in flat(args[:1]) if isinstance(v, Thing) and v.kind in ("param", "params")):
            write_param(state, params, node)
        owners = {m for t in flat(args[:1]) if isinstance(t, Tensor) and "gradient" in t.tags for m in t.models}
        by = settled(args[1]) if len(args) > 1 else None
        if owners:
            edit_gradients(state, owners, factor(state, name, by, node), node)
    return apply(state, name, args, kwargs, node)


def _name(value: Value) -> str:
    return getattr(value, "name", "") or "value"


NO_SUCH_TARGET = -1
"""The `ignore_index` that nanoGPT's loops have on data of one length, in which no target is -1."""


def loss(state: Calls, name: str, args: Args, kwargs: Kwargs, node: ast.AST) -> Value:
    """A named criterion."""

    summed = kwargs.get("size_average") is False
    reduction = kwargs.get("reduction", "sum" if summed else "mean") if kwargs.get("reduce") is not False else "none"
    reduction = reduction if isinstance(reduction, str) else None
    state.emit(Loss, node, criterion=name, reduction=reduction, region=state.region)
    tensors = [v for v in flat([*args, *kwargs.values()]) if isinstance(v, Tensor)]
    made = derive(*tensors) if tensors else Tensor(grad=state.grad_enabled)
    made.divisors = ()
    made.reduction = {"batchmean": "mean"}.get(reduction or "", reduction)
    if kwargs.get("ignore_index") not in (None, NO_SUCH_TARGET) and reduction == "mean":
        made.reduction = "token_mean"
    if state.region is not None:
        made.dtype = "float"
    return made


def _module(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    name = path.rsplit(".", 1)[-1]
    if name.endswith("Loss"):
        made = state.make("context", None, what="criterion", criterion=name, options=kwargs)
        made.kind = "criterion"
        return made
    if name in ("Parameter", "Buffer", "UninitializedParameter"):
        return Tensor(grad=name != "Buffer" and kwargs.get("requires_grad") is not False, dtype="float", name="parameter")
    if name in ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict"):
        held = settled(args[0]) if args else {} if name.endswith("Dict") else []
        state.memo["registers", id(held)], state.memo["alive", id(held)] = True, held
        return held
    return layer(state, node, name, args, kwargs)


def layer(state: Calls, node: ast.AST, name: str, args: Args, kwargs: Kwargs) -> Thing:
    """A module of torch.nn."""
    parts = [settled(a) for a in (args[0].values() if args and isinstance(args[0], dict) else args)]
    facts: dict[str, Value] = {"class": name}
    made = state.make("model", node, **facts)
    if name == "Sequential":
        made.facts["layers"] = parts
        for part in parts:
            child = model_of(part)
            if child is not None:
                child.parents.append(made)
                for fact in ("mode_dependent", "buffers"):
                    made.facts[fact] = made.facts.get(fact) or child.facts.get(fact)
    if re.search(r"Dropout|BatchNorm|InstanceNorm", name):
        made.facts["mode_dependent"] = True
    if re.search(r"BatchNorm", name):
        made.facts["buffers"] = True
    made.facts.setdefault("mode_dependent", False)
    made.facts.setdefault("buffers", False)
    if kwargs.get("dtype") is not None:
        made.dtype = dtype_name(kwargs["dtype"])
        made.facts["cast at"] = state.place(node)
    elif name == "Sequential":
        take_dtype(made, None)
    return made


def _random(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    made, generator = _fresh(state, node, args, kwargs, path), settled(kwargs.get("generator"))
    if generator is None:
        state.emit(RandomDraw, node)
    elif isinstance(generator, Thing) and generator.facts.get("constant") and not path.endswith(("randperm", "multinomial")):
        state.emit(RandomDraw, node, own=True)
        state.memo[mark := f"draw {state.number('draw')}"] = state.drafts[-1]
        made.tags |= {mark}
    return made


def _fresh(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    tags = frozenset().union(*(tags_of(a) for a in [*args, *kwargs.values()])) if args or kwargs else NO_TAGS
    tags &= {"rank", "world", "data", "synced", "accum"}
    made = Tensor(tags=tags, dtype="int" if path.endswith(("randint", "arange", "randperm")) else "float")
    made.grad = kwargs.get("requires_grad") is True
    if (
        path.endswith((".tensor", ".full"))
        and args
        and isinstance(args[-1], (int, float))
        and LARGEST_HALF < abs(args[-1]) < float("inf")
    ):
        made.name = HUGE
    made.rows = _first_dim(args, path)
    made.device = device_name(kwargs.get("device"))
    if made.device == "cuda" and state.in_worker:
        state.emit(Transfer, node, to="cuda", blocking=True, loader=None, in_worker=True)
    return made


def _first_dim(args: Args, path: str) -> int | None:
    numbers = [settled(a) for a in args]
    if path.endswith("_like"):
        return numbers[0].rows if numbers and isinstance(numbers[0], Tensor) else None
    if path.endswith("randint"):
        numbers = [n for n in numbers if isinstance(n, (tuple, list))]
    first = numbers[0] if numbers else None
    first = settled(first[0]) if isinstance(first, (tuple, list)) and first else first
    if isinstance(first, bool) or "guessed" in tags_of(first) or path.endswith(("tensor", "from_numpy")):
        return None
    return first if isinstance(first, int) else None


def device_name(value: Value) -> str | None:
    """`cuda`, `cpu`, ... of a device value."""
    value = settled(value)
    if isinstance(value, str):
        return value.split(":")[0]
    if isinstance(value, Thing) and value.kind == "device":
        name = value.facts.get("type")
        return name if isinstance(name, str) else None
    if isinstance(value, int) and not isinstance(value, bool):
        return "cuda"
    if isinstance(value, Unknown) and "rank" in value.tags:
        return "cuda"
    if isinstance(value, Unknown) and value.name.startswith("'cuda"):
        return "cuda"
    return None


def usual_device(value: Value) -> str | None:
    """The same, or what a parameter or an option is without the user's word."""
    known, value = device_name(value), settled(value)
    if known is None and isinstance(value, Unknown) and value.has_default and isinstance(value.default, str):
        return value.default.split(":")[0]
    return known


def _device(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    value = args[0] if args else kwargs.get("type")
    made = state.make("device", node, type=device_name(value) or (value if isinstance(value, Unknown) else None))
    index = args[1] if len(args) > 1 else kwargs.get("index")
    text = settled(value)
    made.facts["indexed"] = index is not None or (isinstance(text, str) and ":" in text) or not isinstance(text, str)
    return made


def _autograd_grad(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:

    outputs = args[0] if args else kwargs.get("outputs")
    tensors = [v for v in flat([outputs]) if isinstance(v, Tensor)]
    state.emit(Numeric, node, kind="gradients of inputs")
    kept = kwargs.get("create_graph")
    made = derive(*tensors) if tensors else Tensor()
    made.grad = isinstance(settled(kept), Unknown) or (kept is not None and state.truth(kept, node))
    if made.scaler is not None:
        made.penalty, made.scaler = state.place(node), None
    made.divisors, made.dtype = (), None
    return (made,)


def _item_like(state: Calls, node: ast.AST, args: Args, kwargs: Kwargs, path: str) -> Value:
    from halfstep.imagine.library.python import read_on_host

    value = settled(args[0]) if args else None
    return read_on_host(state, value, node, "array") if isinstance(value, Tensor) else value


TABLE: dict[str, Callable[..., Value]] = {
    **{
        f"torch.{n}": _random
        for n in (
            "rand",
            "randn",
            "randint",
            "randperm",
            "normal",
            "rand_like",
            "randn_like",
            "bernoulli",
            "multinomial",
            "randint_like",
        )
    },
    **{
        f"torch.{n}": _fresh
        for n in (
            "zeros",
            "ones",
            "empty",
            "full",
            "arange",
            "tensor",
            "as_tensor",
            "from_numpy",
            "linspace",
            "eye",
            "zeros_like",
            "ones_like",
        )
    },
    "torch.device": _device,
    "torch.finfo": _finfo,
    "torch.autograd.grad": _autograd_grad,
    "numpy.asarray": _item_like,
    "numpy.array": _item_like,
    "torch.compile": lambda s, n, a, k, p: a[0] if a else None,
    "torch.jit.script": lambda s, n, a, k, p: a[0] if a else None,
}
"""Handlers by path."""
PATTERNS: tuple[tuple[re.Pattern[str], Callable[..., Value]], ...] = (
    (re.compile(r"^torch\.nn\.functional\.\w+$"), _function),
    (re.compile(r"^torch\.nn\.(utils\.)?[A-Z]\w*$"), _module),
    (re.compile(r"^torch\.(linalg\.|special\.|_foreach_)?[a-z]\w*$"), _function),
)
"""Handlers by pattern of the path, tried last."""
