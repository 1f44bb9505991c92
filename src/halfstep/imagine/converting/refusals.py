"""Loops that are left alone whatever is asked, and why."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import AutocastEnter, Backward, Forward, Made, ScaleLoss, Step
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.places import backward_calls
from halfstep.imagine.converting.program import Program

FRAMEWORKS = "Accelerate, Fabric, Lightning or DeepSpeed runs this loop: ask it for the precision, the accumulation and the ranks"


def refuse(program: Program) -> None:
    """See that a loop is of a kind that can be converted.

    Raises:
        NotSure: it is not; the message says why.
    """
    if any(b.by_framework for b in program.all(Backward)):
        raise NotSure(FRAMEWORKS)
    if any(s.closure for s in program.all(Step)):
        raise NotSure("the optimizer takes a closure, which may run forward and backward several times in a step")
    optimizers = {s.optimizer.place or s.optimizer.number for t in program.traces for s in t.of(Step)}
    if any(len({s.optimizer for s in t.of(Step)}) > 1 for t in program.traces):
        raise NotSure(
            f"{max(len(optimizers), 2)} optimizers step in it: which losses and scales belong to which is for its author to say"
        )
    _refuse_gradients(program)


def refuse_engine(program: Program) -> None:
    """See that an engine can take the place of what a loop does.

    Raises:
        NotSure: it cannot; the message says why.
    """
    if has_mixed_precision(program) or has_ranks(program) or has_half_parameters(program):
        raise NotSure("the loop has a precision or ranks of its own, which the engine would do again")
    for node in ast.walk(program.syntax.tree):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            raise NotSure(
                "gradients are read or written, which the engine holds under its own scale; their norm is in its updates, as "
                "`update.grad_norm`",
                node.lineno,
            )


def _refuse_gradients(program: Program) -> None:
    for node in ast.walk(program.syntax.tree):
        if isinstance(node, ast.ClassDef) and any(
            _ends(base, "autograd.Function") or _ends(base, "Function") for base in node.bases
        ):
            raise NotSure(
                f"`{node.name}` has a backward pass of its own, whose precision is for its author to choose", node.lineno
            )
        if isinstance(node, ast.Call) and _ends(node.func, "autograd.grad"):
            raise NotSure("gradients are taken by `torch.autograd.grad`, which a loss scale would enter", node.lineno)
    for call in backward_calls(program):
        given = [k for k in call.keywords if k.arg != "retain_graph"]
        if call.args or given:
            raise NotSure("`backward` is called with arguments of its own", call.lineno)


def _ends(node: ast.expr, dotted: str) -> bool:
    text = ast.unparse(node)
    return text == dotted or text.endswith(f".{dotted}")


def has_mixed_precision(program: Program) -> bool:
    """Whether the loop casts or scales already."""
    return any(True for _ in program.all(AutocastEnter, ScaleLoss)) or bool(program.made("scaler"))


def has_half_parameters(program: Program) -> bool:
    """Whether the parameters themselves are in half precision."""
    return any(s.half_params or s.bf16_params for s in program.all(Step)) or any(b.half_params for b in program.all(Backward))


def has_ranks(program: Program) -> bool:
    """Whether the program knows of ranks already."""
    wrapped = any(m.facts.get("wrapper") for m in program.all(Made))
    return wrapped or bool(program.made("group")) or any(f.wrapped for f in program.all(Forward))
