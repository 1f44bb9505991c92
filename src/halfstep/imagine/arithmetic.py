"""Operators on imagined values: numbers are computed, tensors and unknown values remember what happened to them."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

from halfstep.events.vocabulary import Divisor, Numeric
from halfstep.imagine.state import ACCUMULATION, State
from halfstep.imagine.values import (
    Count,
    Instance,
    Items,
    Ratio,
    Tags,
    Tensor,
    Thing,
    Unknown,
    Value,
    derive,
    items_like,
    tagged,
    tags_of,
)

OPERATORS: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Value, Value], Value]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
MAX_NUMBER = 10**15
RARE, SOON = 50, 6
"""What happens once in as many turns happens once in a few, or it would happen in none that are imagined."""
FP16_SMALLEST = 6e-8
"""Constants below this are zero in FP16 (its smallest subnormal is 5.96e-8)."""
LARGEST_HALF = 65504.0
HUGE = "a constant beyond FP16"
"""Name of a tensor that is one."""


_PARTS = re.compile(
    r"head|task|loss|view|crop|branch|level|class|stage|expert|ensemble|member|layer|frame|channel|exit|dim", re.I
)
"""What people call numbers of parts of one loss, which may be as many as a window has micro-batches."""


def arithmetic(state: State, left: Value, op: ast.operator, right: Value, node: ast.AST) -> Value:
    """The value of `left op right`."""
    left, right = state.unwrap_truth(left), state.unwrap_truth(right)
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return _numbers(state, left, op, right)
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return _tensors(state, left, op, right, node)
    if isinstance(left, (list, tuple, str)) and isinstance(right, (list, tuple, str, int)):
        return _sequences(left, op, right)
    if isinstance(left, str) and isinstance(op, ast.Mod):
        return left
    if isinstance(left, dict) and isinstance(right, dict):
        return {**left, **right}
    if _holds_params(left) and _holds_params(right):
        return [*(left if isinstance(left, list) else [left]), *(right if isinstance(right, list) else [right])]
    return _unknown(state, left, op, right, node)


def _holds_params(value: Value) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_holds_params(item) for item in value[:8])
    return isinstance(value, Thing) and value.kind == "params"


def _units(left: Value, op: ast.operator, right: Value) -> Tags:
    """What a result counts: epochs times some number of which nothing is known are epochs no more."""
    mine, theirs = tags_of(left), tags_of(right)
    other = right if "epochs" in mine else left
    of_one = "epochs" in mine ^ theirs and other != 1
    turns = isinstance(op, ast.Mult) and of_one and "loader" not in mine | theirs
    return (mine | theirs) - {"epochs"} if turns else mine | theirs


def _numbers(state: State, left: int | float, op: ast.operator, right: int | float) -> Value:
    tags = _units(left, op, right)
    try:
        if isinstance(op, (ast.Pow, ast.LShift)) and (abs(right) > 64 or abs(left) > 1e6):
            return Unknown("number", tags)
        value = OPERATORS.get(type(op), operator.add)(left, right)
    except (ArithmeticError, TypeError, ValueError):
        return Unknown("number", tags)
    if isinstance(value, complex) or abs(value) > MAX_NUMBER:
        return Unknown("number", tags)
    if isinstance(op, ast.Mod):
        state.note_window(right, tags)
        tags |= {"modulo"}
        if state.loops and right >= RARE and not tags & {"loader", "accum"}:
            value = _soon(left, right)
    if isinstance(op, (ast.Div, ast.FloorDiv)) and "accum" in tags_of(right):
        tags |= {"/accum"}
    if isinstance(op, ast.Div) and (left == 1 or (isinstance(left, int) and isinstance(right, int))):
        tags |= {"quotient"}
    if isinstance(op, ast.Div) and "batch size" in tags_of(left) & tags_of(right):
        tags |= {"share"}
    if isinstance(op, (ast.Div, ast.FloorDiv)) and "loader" in tags_of(left):
        tags |= {f"/{right}"}
    if isinstance(op, ast.FloorDiv) and left % right:
        tags |= {"floored"}
    return tagged(value, tags - {"modulo"} if isinstance(op, (ast.Add, ast.Mult)) else tags)


def _soon(left: Value, right: Value) -> Value:
    """The place in a long period, as if it were a short one: its last turn is still its last."""
    value = left % SOON
    return right - 1 if value == SOON - 1 else value


def _sequences(left: Value, op: ast.operator, right: Value) -> Value:
    if isinstance(op, ast.Add) and type(left) in (list, Items) and isinstance(right, list):
        joined = [*left, *right][:200]
        source = left if isinstance(left, Items) else right
        return items_like(joined, source) if isinstance(source, Items) else joined
    if isinstance(op, ast.Add) and isinstance(left, tuple) and isinstance(right, tuple):
        return (left + right)[:200]
    if isinstance(op, ast.Add) and isinstance(left, str) and isinstance(right, str):
        return (left + right)[:500]
    if isinstance(op, ast.Mult) and isinstance(right, int) and isinstance(left, (list, tuple)):
        repeated = (left * max(0, min(right, 64)))[:64]
        if isinstance(left, list) and len(left) == 1:
            repeated = Items(repeated)
            repeated.tags = frozenset({"alike"})
        return repeated
    if isinstance(op, ast.Mod) and isinstance(left, str):
        return left
    return Unknown("sequence", tags_of(left) | tags_of(right))


def _unknown(state: State, left: Value, op: ast.operator, right: Value, node: ast.AST) -> Value:
    if isinstance(op, ast.Mod) and isinstance(left, int) and isinstance(right, Unknown) and _is_count(right):
        return arithmetic(state, left, op, small_count(right), node)
    factors: frozenset[str] = frozenset()
    if isinstance(op, ast.Mult):
        factors = _factors(left) | _factors(right)
    elif isinstance(op, ast.Div):
        factors = _factors(left)
    tags = _units(left, op, right)
    if isinstance(op, ast.Mod):
        tags |= {"modulo"}
    if isinstance(op, (ast.Div, ast.FloorDiv)) and "accum" in tags_of(right):
        tags |= {"/accum"}
    if isinstance(op, ast.Div) and left == 1:
        tags |= {"quotient"}
    if isinstance(op, ast.Div) and "batch size" in tags_of(left) & tags_of(right):
        tags |= {"share"}
    if isinstance(op, ast.Div) and "sum of means" in tags_of(left):
        check_average(state, left, right, node)
        tags -= {"sum of means"} if tags_of(right) & {"loader", "dataset"} else set()
    if isinstance(op, ast.Mult) and "batch size" in tags:
        tags -= {"sum of means"}
    loaders = getattr(left, "loaders", frozenset()) | getattr(right, "loaders", frozenset())
    return Unknown(ast.unparse(node)[:80], tags, factors=factors, loaders=loaders)


def check_average(state: State, total: Value, right: Value, node: ast.AST) -> None:
    """A sum of means of batches is divided by the number of samples, or of batches of which the last is shorter."""
    short = [loader for loader in getattr(total, "loaders", ()) if loader.facts.get("short last")]
    if "dataset" in tags_of(right):
        state.emit(Numeric, node, kind="mean over dataset")
    elif "evaluated" in tags_of(total) and any("loader" in tags_of(right) or right == state.batches_of(each) for each in short):
        state.emit(Numeric, node, kind="mean of means")


def _is_count(value: Unknown) -> bool:
    return not value.has_default and not value.tags & {"data", "rank", "world", "loader", "dataset", "batch size"}


def small_count(value: Unknown) -> Value:
    """A count that the program does not say shows by its use that it is one: it is a small number from now on."""
    value.thing = tagged(ACCUMULATION, frozenset({"guessed"}))
    return value.thing


def _factors(value: Value) -> frozenset[str]:
    if isinstance(value, Unknown):
        return value.factors or frozenset({value.name})
    return frozenset()


def _tensors(state: State, left: Value, op: ast.operator, right: Value, node: ast.AST) -> Value:
    parents = [v for v in (left, right) if isinstance(v, Tensor)]
    other = right if isinstance(left, Tensor) else left
    if len(parents) == 2:
        return _two_tensors(state, left, op, right, node)
    tensor = parents[0]
    extra: dict[str, Value] = {"rows": tensor.rows, "tags": tensor.tags | (tags_of(other) & {"rank", "world", "data", "scale"})}
    if isinstance(op, (ast.Mult, ast.Div)) and "scale" in tags_of(other):
        extra["penalty"] = None
    if isinstance(op, ast.Mult) and isinstance(other, float) and LARGEST_HALF < abs(other) < float("inf") and not tensor.grad:
        extra["name"] = HUGE
    divisor = _divisor(state, tensor, left, op, other, node)
    if divisor is not None:
        extra["divisors"] = (*tensor.divisors, divisor)
    if isinstance(op, (ast.Add, ast.Sub)) and _too_small(state, tensor, other):
        return derive(tensor, **extra, guard=state.place(node))
    if isinstance(op, ast.Div) and isinstance(right, Tensor):
        _check_denominator(state, right, node)
    if isinstance(op, ast.Pow):
        check_half_reduction(state, tensor, "**", node)
        if _casts_up(state) and tensor.dtype == "half":
            extra["dtype"] = "float"
    return derive(tensor, **extra)


def _casts_up(state: State) -> bool:
    return state.region is not None and state.region.device != "cpu"


def _two_tensors(state: State, left: Tensor, op: ast.operator, right: Tensor, node: ast.AST) -> Tensor:
    if isinstance(op, ast.Div):
        _check_denominator(state, right, node)
        if (
            not right.grad
            and "several" not in right.tags
            and ("count" in right.tags or (left.reduction == "sum" and "summed" in right.tags))
        ):
            return derive(left, right, reduction="token_mean", grad=left.grad)
    if isinstance(op, ast.MatMult) and state.region is not None:
        return derive(left, right, dtype=region_dtype(state), regions=_with_region(state, left, right))
    made = derive(left, right, rows=left.rows or right.rows)
    if isinstance(op, ast.Add) and left.grad and right.grad and None in (left.scaler, right.scaler):
        made.scaler = None
    if isinstance(op, ast.Add) and not made.grad and left.tags & right.tags & {"count", "summed"}:
        made.tags |= {"several"}
    if "scale" in left.tags | right.tags and isinstance(op, (ast.Mult, ast.Div)):
        made.penalty = None
    return made


def _with_region(state: State, *parents: Tensor) -> tuple[Value, ...]:
    known = tuple(dict.fromkeys(r for p in parents for r in p.regions))
    return known if state.region is None or state.region in known else (*known, state.region)


def region_dtype(state: State) -> str | None:
    """What a matrix product yields in the open autocast region."""
    region = state.region
    if region is None:
        return None
    return {"float16": "half", "bfloat16": "bfloat"}.get(region.dtype or "")


def _divisor(state: State, tensor: Tensor, left: Value, op: ast.operator, other: Value, node: ast.AST) -> Divisor | None:
    place = state.place(node)
    tags = tags_of(other)
    if isinstance(op, ast.Div) and left is tensor and not isinstance(other, (Thing, Instance)):
        if "parts" in tags:
            return None
        if isinstance(node, ast.BinOp) and (_PARTS.search(ast.unparse(node.right)) or _terms(node.left) == other):
            tags |= {"parts"}
        number = float(other) if isinstance(other, (int, float)) else None
        if isinstance(other, Unknown) and _is_count(other):
            other.tags |= {"divisor"}
        return Divisor(number, tags, place)
    if isinstance(op, ast.Mult) and "gradient" in tensor.tags and not tags & {"gradient", "gradnorm", "world"}:
        return Divisor(1 / other if isinstance(other, float) and other else None, tags, place)
    if isinstance(op, ast.Mult) and "share" in tags:
        return Divisor(None, tags, place)
    if isinstance(op, ast.Mult) and _is_loss_scale(other, node):
        return Divisor(1 / other, tags, place)
    if isinstance(op, ast.Mult) and isinstance(other, (Ratio, float)) and 0 < other < 1 and tags & {"accum", "world"}:
        return Divisor(1 / other, tags, place)
    if isinstance(op, ast.Mult) and isinstance(other, float) and 0 < other < 1 and abs(1 / other - round(1 / other)) < 1e-6:
        return Divisor(1 / other, tags, place) if tags & {"/accum", "quotient"} else None
    if isinstance(op, ast.Mult) and isinstance(other, (Unknown, Count)) and tags & {"/accum", "quotient"}:
        return Divisor(None, tags, place)
    return None


def _terms(node: ast.expr) -> int:
    """How many losses a sum is of, as it is written; 0 where there is no sum."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return 0
    return max(_terms(node.left), 1) + max(_terms(node.right), 1)


def _is_loss_scale(factor: Value, node: ast.AST) -> bool:
    """Whether a loss is multiplied by this to lift its gradients in FP16: by its name, or because it is so large."""
    return isinstance(factor, (int, float)) and (factor >= 64 or (factor > 1 and "scale" in ast.unparse(node).lower()))


def _too_small(state: State, tensor: Tensor, other: Value) -> bool:
    return tensor.dtype == "half" and isinstance(other, float) and 0 < other < FP16_SMALLEST


def _check_denominator(state: State, tensor: Tensor, node: ast.AST) -> None:
    if tensor.guard is not None:
        say_small_guard(state, node)


def say_small_guard(state: State, node: ast.AST) -> None:
    """A constant that is zero in FP16 guards a division, root or logarithm."""
    state.emit(Numeric, node, kind="small-guard", region=state.region)


def check_half_reduction(state: State, tensor: Tensor, what: str, node: ast.AST) -> None:
    """FP16 outputs of an autocast region are squared or summed outside of it."""
    if tensor.dtype == "half" and tensor.grad and state.region is None and tensor.regions:
        state.emit(Numeric, node, kind="half-reduction", detail=what, region=tensor.regions[-1])


def evened(value: list[Value] | Unknown | Tensor, tags: Tags) -> Value:
    """Samples cut to a multiple of the ranks; `tags` says whether to those of one rank."""
    if isinstance(value, Tensor):
        return derive(value, tags=value.tags | tags | {"even"}, copied=value.copied)
    if isinstance(value, Unknown):
        return Unknown(value.name, value.tags | tags | {"even"}, loaders=value.loaders)
    made = items_like(list(value), value) if isinstance(value, Items) else Items(value)
    made.tags |= tags | {"even"}
    return made


def compare_numbers(left: Value, op: ast.cmpop, right: Value) -> bool | None:
    """The answer when both sides are known, else None."""
    known = (int, float, str, bool, type(None), list, tuple)
    if not isinstance(left, known) or not isinstance(right, known):
        return None
    if isinstance(left, (list, tuple)) or isinstance(right, (list, tuple)):
        return None
    try:
        return bool(COMPARISONS[type(op)](left, right))
    except (KeyError, TypeError):
        return None
