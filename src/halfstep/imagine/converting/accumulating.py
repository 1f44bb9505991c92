"""Gradient accumulation: windows of several micro-batches, the last one divided by its own size."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from halfstep.events.vocabulary import (
    AverageUpdate,
    Backward,
    Clip,
    Event,
    Forward,
    GradRead,
    Made,
    ScaleRead,
    ScalerUpdate,
    SchedulerStep,
    Step,
    Unscale,
    ZeroGrad,
)
from halfstep.imagine.converting.batches import BatchLoop, batch_loop
from halfstep.imagine.converting.imports import ensure, put_constant
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.places import backward_calls, sites
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.schedule import shorten
from halfstep.imagine.converting.syntax import Block, bound_names, neighbours, quotient, read_names

ENDING: tuple[type[Event], ...] = (Clip, GradRead, Step, SchedulerStep, ScalerUpdate, Unscale, AverageUpdate, ScaleRead)
"""What happens once a window, after its last backward pass."""
CONSTANT = "ACCUMULATION_STEPS"


@dataclass(frozen=True, slots=True)
class _Words:
    """The names that the new lines use."""

    index: str
    turn: str
    """The number of the turn from 0, by the index."""
    start: str
    size: str
    is_last: str


def accumulate(program: Program, count: int) -> tuple[str, list[str]]:
    """The text with `count` micro-batches in an update, and what was done.

    Raises:
        NotSure: the loop is left; the message says why.
    """
    _refuse(program)
    loop = batch_loop(program)
    if isinstance(loop.source, ast.Call):
        raise NotSure("the loader is made in the head of the loop: give it a name before it, then convert", loop.node.lineno)
    _check_body(program, loop)
    patch = Patch(program.syntax)
    words = _words(program, loop)
    _count(program, patch, loop, words, count)
    _divide(program, patch, words)
    _guard(program, patch, loop.node.body, words)
    _hold_sync(program, patch, loop, words)
    moved = shorten(program, patch, CONSTANT)
    return patch.text(), _said(program, loop, count, moved)


def _refuse(program: Program) -> None:
    for trace in program.traces:
        backwards, steps = len({b.loops for b in trace.of(Backward)}), sum(1 for _ in trace.of(Step))
        if trace.exception is None and backwards > steps:
            raise NotSure("the loop accumulates already: fewer updates than backward passes were heard")
    for event in program.all(Backward):
        line = event.place.line if event.place is not None else None
        if event.reduction == "token_mean":
            raise NotSure(
                "the loss is a mean over the labels that are not ignored, and micro-batches hold different numbers of them, so a "
                "mean of means would be another loss; with `halfstep.Engine` return their sum and their number",
                line,
            )
        if event.reduction not in ("mean", "sum"):
            raise NotSure("whether the loss is a mean or a sum over the micro-batch cannot be seen", line)


def _check_body(program: Program, loop: BatchLoop) -> None:
    body = loop.node.body
    for node in _own(loop.node):
        if isinstance(node, (ast.Continue, ast.Break)):
            word = "continue" if isinstance(node, ast.Continue) else "break"
            raise NotSure(f"`{word}` would leave a window unfinished", node.lineno)
    if body[0].lineno == loop.node.lineno:
        raise NotSure("the body of the loop stands on its head's line", body[0].lineno)
    backward = program.indices(body, Backward)
    both = backward & program.indices(body, Step, ZeroGrad)
    if both:
        raise NotSure(
            "backward and step happen in one statement of the loop over batches, which does not know the window",
            body[min(both)].lineno,
        )
    if not backward:
        raise NotSure("the backward pass does not happen in the loop over batches", loop.node.lineno)


def _own(loop: ast.For) -> list[ast.AST]:
    """The nodes of a loop's body that are not of an inner loop or function."""
    found: list[ast.AST] = []
    todo: list[ast.AST] = list(loop.body)
    while todo:
        node = todo.pop()
        found.append(node)
        if not isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))
    return found


def _words(program: Program, loop: BatchLoop) -> _Words:
    fresh = program.syntax.fresh
    index = loop.index or fresh("i", "batch_index", "micro_batch")
    if loop.index is not None and any(loop.index in bound_names(s) for s in loop.node.body):
        raise NotSure(f"`{loop.index}`, which counts the batches, is changed in the loop", loop.node.lineno)
    return _Words(
        index,
        f"({index} - {loop.start})" if loop.start else index,
        fresh("window_start"),
        fresh("window_size"),
        fresh("is_last", "is_last_of_window"),
    )


def _count(program: Program, patch: Patch, loop: BatchLoop, words: _Words, count: int) -> None:
    """Number the turns, and say in each which window it is in."""
    text = program.syntax.text
    if loop.index is None:
        target = loop.node.target
        inner = text(target)
        bare = isinstance(target, ast.Tuple) and target.elts[0].col_offset == target.col_offset
        patch.replace(target, f"{words.index}, {f'({inner})' if bare else inner}")
        patch.replace(loop.node.iter, f"enumerate({text(loop.node.iter)})")
    patch.before(
        loop.node.body[0],
        f"{words.start} = {words.turn} - {words.turn} % {CONSTANT}",
        f"{words.size} = min({CONSTANT}, {loop.length} - {words.start})",
        f"{words.is_last} = {words.turn} + 1 == {words.start} + {words.size}",
    )
    put_constant(patch, f"{CONSTANT} = {count}")


def _divide(program: Program, patch: Patch, words: _Words) -> None:
    """Each loss counts for its share of the window; a sum is a sum already."""
    for call, event in backward_calls(program).items():
        if event.reduction == "sum":
            continue
        assert isinstance(call.func, ast.Attribute)
        receiver: ast.expr = call.func.value
        scaled = event.scaler is not None or (
            isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Attribute) and receiver.func.attr == "scale"
        )
        if scaled and isinstance(receiver, ast.Call) and len(receiver.args) == 1:
            patch.replace(receiver.args[0], quotient(program.syntax, receiver.args[0], words.size))
            continue
        start, _ = patch.span(call)
        _, end = patch.span(call.func)
        patch.replaced_receiver(start, end, f"({quotient(program.syntax, receiver, words.size)}).backward")


def _guard(program: Program, patch: Patch, body: Block, words: _Words) -> None:
    """Clear at the start of a window; clip, step and move the schedule at its end."""
    last = max(program.indices(body, Backward))
    cleared = program.indices(body, ZeroGrad)
    ending = {i for i in program.indices(body, *ENDING) if i > last} | {i for i in cleared if i > last}
    early = {i for i in cleared if i <= last}
    trained = program.indices(body, Backward, Forward, grad=True)
    for index in sorted(early | ending):
        if index in trained:
            raise NotSure("a statement trains and also ends a window", body[index].lineno)
    _check_names(body, ending)
    for first, end in neighbours(early):
        patch.wrap(body[first], body[end], f"if {words.turn} == {words.start}:")
    for first, end in neighbours(ending):
        patch.wrap(body[first], body[end], f"if {words.is_last}:")


def _check_names(body: Block, ending: set[int]) -> None:
    """What a window's end computes must not be read in turns that do not end a window."""
    made = set().union(*(bound_names(body[i]) for i in ending)) if ending else set()
    for index, statement in enumerate(body):
        shared = read_names(statement) & made if index not in ending else set()
        if shared:
            raise NotSure(f"`{min(shared)}` is made at the end of a window and read for every batch", statement.lineno)


def _hold_sync(program: Program, patch: Patch, loop: BatchLoop, words: _Words) -> None:
    """Ranks exchange gradients once a window: at its last micro-batch."""
    if not any(b.ddp for b in program.all(Backward)):
        return
    model = _wrapper(program)
    ensure(patch, "from contextlib import nullcontext")
    for site in sites(program):
        if site.block is not loop.node.body:
            raise NotSure(
                "forward and backward are not statements of the loop over batches, where `no_sync` must begin",
                site.statement.lineno,
            )
        header = f"with nullcontext() if {words.is_last} else {model}.no_sync():"
        patch.wrap(site.block[site.first], site.block[site.backward], header)


def _wrapper(program: Program) -> str:
    for event in program.all(Forward):
        call = program.syntax.call_at(event.place)
        if event.wrapped and event.grad_enabled and call is not None and isinstance(call.func, (ast.Name, ast.Attribute)):
            return program.syntax.text(call.func)
    raise NotSure("how the loop writes its DDP model cannot be seen, so `no_sync` cannot be written")


def _said(program: Program, loop: BatchLoop, count: int, moved: bool) -> list[str]:
    said = [f"{count} micro-batches in an update, the last window divided by its own size (line {loop.node.lineno})"]
    loaders = [m for m in program.all(Made) if m.what.kind == "loader"]
    if loop.source is not None and not any(m.facts.get("drop_last") is True for m in loaders):
        said.append("a shorter last micro-batch still counts as a whole one; `drop_last=True` avoids it")
    if moved:
        said.append("a schedule that moved once a batch now moves once an update: see that its length is meant in updates")
    return said
