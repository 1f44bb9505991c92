"""Autocast around forward and loss, and a loss scale where FP16 is possible."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import Loss
from halfstep.imagine.converting import scaling
from halfstep.imagine.converting.arrays import keep_arrays
from halfstep.imagine.converting.device import device_type
from halfstep.imagine.converting.imports import ensure
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.places import Site, inline_loss, runs, sites
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.refusals import has_half_parameters, has_mixed_precision
from halfstep.imagine.converting.syntax import end_line, first_line

PROBABILITIES = ("BCELoss", "binary_cross_entropy")
CPU = '"cpu"'
ONE_TYPE = {"index_add", "index_copy", "index_put", "masked_scatter", "scatter", "scatter_add", "scatter_reduce"}
"""Methods that write one tensor into another, and raise where autocast has cast only one of them."""


def add_precision(program: Program, wish: str) -> tuple[str, list[str]]:
    """The text with mixed precision, and what was done.

    Args:
        program: the loop.
        wish: `auto`, `fp16` or `bf16`.

    Raises:
        NotSure: the loop is left; the message says why.
    """
    _refuse(program)
    found = sites(program)
    if wish == "auto" and all(device_type(program, site.function) == CPU for site in found):
        wish = "bf16"
    patch = Patch(program.syntax)
    ensure(patch, "import torch")
    names = scaling.add_scaler(program, patch, auto=wish == "auto") if wish != "bf16" else None
    for site in found:
        _cast(program, patch, site, names.dtype if names else "torch.bfloat16", names.scaler if names else None)
    said = [_said(found, wish)]
    if all(device_type(program, site.function) == CPU for site in found):
        said.append("nothing moves the model to a device, so autocast is for the CPU: change its `device_type` with the device")
    return patch.text(), said + _of_one_type(program)


def _of_one_type(program: Program) -> list[str]:
    """What may raise under autocast: a tensor that is written into another of its own type."""
    calls = (n for n in ast.walk(program.syntax.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    named = {c.lineno: c.func.attr for c in calls if isinstance(c.func, ast.Attribute) and _writes_tensor(c, c.func.attr)}
    needs = "needs both tensors of one type, and autocast may have cast what is written: if so, `.to` the type of the other"
    return [f"look at line {line} of the original: `{name}` {needs}" for line, name in sorted(named.items())]


def _writes_tensor(call: ast.Call, name: str) -> bool:
    return name.rstrip("_") in ONE_TYPE and bool(call.args) and not isinstance(call.args[-1], ast.Constant)


def _refuse(program: Program) -> None:
    if has_mixed_precision(program):
        raise NotSure("the loop has autocast or a loss scaler already")
    if has_half_parameters(program):
        raise NotSure("the parameters themselves are in half precision: keep them in FP32, autocast casts what it multiplies")
    for event in program.all(Loss):
        if event.criterion in PROBABILITIES:
            line = event.place.line if event.place is not None else None
            advice = "give `BCEWithLogitsLoss` what comes before the sigmoid, then convert"
            raise NotSure(f"`{event.criterion}` takes probabilities, which autocast refuses on a GPU: {advice}", line)


def _cast(program: Program, patch: Patch, site: Site, dtype: str, scaler: str | None) -> None:
    header = _header(device_type(program, site.function), dtype)
    found = runs(program, site)
    keep_arrays(program, patch, site, found)
    for first, last in found:
        expression = inline_loss(site, last)
        if first == last and expression is not None:
            _split(program, patch, site.block[last], expression, header, scaler)
        elif last == site.backward or expression is not None:
            raise NotSure("the forward pass cannot be told from the backward pass", site.block[last].lineno)
        else:
            patch.wrap(site.block[first], site.block[last], header)


def _header(device: str, dtype: str) -> str:
    return f"with torch.autocast(device_type={device}, dtype={dtype}):"


def _split(program: Program, patch: Patch, statement: ast.stmt, expression: ast.expr, header: str, scaler: str | None) -> None:
    """`compute(x).backward()` becomes a loss under autocast and its backward pass."""
    name = program.syntax.fresh("loss", "batch_loss", "loss_value")
    if "\n" in program.syntax.text(expression):
        raise NotSure("the loss is made and backpropagated in one statement of several lines", statement.lineno)
    patch.before(statement, header, f"{program.syntax.unit(statement)}{name} = {program.syntax.text(expression)}")
    call = statement.value if isinstance(statement, ast.Expr) else None
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Attribute)
    start, _ = patch.span(statement)
    _, end = patch.span(call.func)
    patch.replaced_receiver(start, end, f"{scaler}.scale({name}).backward" if scaler else f"{name}.backward")


def _said(found: list[Site], wish: str) -> str:
    lines = ", ".join(f"{first_line(s.block[s.first])} to {end_line(s.block[s.backward])}" for s in found)
    word = {
        "bf16": "BF16 autocast around forward and loss",
        "fp16": "FP16 autocast around forward and loss, with a loss scaler",
        "auto": "autocast around forward and loss, BF16 where the device has it natively, else FP16 with a loss scaler",
    }[wish]
    return f"{word} (lines {lines})"
