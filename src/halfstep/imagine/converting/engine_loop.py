"""The loop on `halfstep.Engine`: a loss function, an engine, and a loop over its updates."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from halfstep.events.vocabulary import Backward, Clip, EpochBegin, Event, Forward, Loss, SchedulerStep, Step, ZeroGrad
from halfstep.imagine.converting.batches import BatchLoop, batch_loop
from halfstep.imagine.converting.checkpoints import add_state
from halfstep.imagine.converting.imports import ensure
from halfstep.imagine.converting.outcome import NotSure, Wish
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.places import backward_calls, clip_limit, engine_lines, step_calls
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.reach import Carrier, Home
from halfstep.imagine.converting.refusals import refuse_engine
from halfstep.imagine.converting.schedule import shorten
from halfstep.imagine.converting.syntax import Block, bound_names, end_line, first_line, read_names

DONE_BY_ENGINE: tuple[type[Event], ...] = (ZeroGrad, Backward, Clip, Step)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What becomes of the statements of the loop's body."""

    model: str
    loss: ast.expr
    made: list[int]
    """They make the loss, and go into the loss function."""
    dropped: list[int]
    """The engine does what they did."""
    kept: list[int]


def use_updates(program: Program, wish: Wish) -> tuple[str, list[str]]:
    """The text with its loop over the updates of an engine, and what was done.

    Raises:
        NotSure: the loop's statements do not fall into a loss and what the engine does; the message says why.
    """
    refuse_engine(program)
    _refuse(program, wish)
    loop = batch_loop(program)
    parts = _parts(program, loop)
    home = _home(program, loop)
    patch = Patch(program.syntax)
    ensure(patch, "import halfstep")
    name = program.syntax.fresh("engine", "train_engine")
    function = program.syntax.fresh("loss_of", "micro_batch_loss")
    home.put(patch, *_loss_function(program, loop, parts, function), "", *_engine(program, loop, parts, wish, name, function))
    _rewrite(program, patch, loop, parts, name, several=wish.accumulate > 1)
    carrier = Carrier(program, patch, home, (name,))
    add_state(program, patch, carrier, home, name)
    carrier.finish()
    if wish.accumulate > 1 and _schedule(program, loop) is not None:
        shorten(program, patch, str(wish.accumulate))
    said = [f"the loop of line {loop.node.lineno} on halfstep.Engine, its loss in `{function}`"]
    if wish.accumulate > 1 and parts.kept:
        said.append("what is left in the loop now happens once an update, not once a batch")
    return patch.text(), said


def _refuse(program: Program, wish: Wish) -> None:
    for trace in program.traces:
        backwards, steps = sum(1 for _ in trace.of(Backward)), sum(1 for _ in trace.of(Step))
        if trace.exception is None and backwards != steps:
            raise NotSure("the loop does not step once for each backward pass")
    if wish.accumulate > 1 and any(b.reduction != "mean" for b in program.all(Backward)):
        raise NotSure("the loss is not a plain mean over its micro-batch: write a loss function that returns its sum and weight")


def _home(program: Program, loop: BatchLoop) -> Home:
    """Before the outermost loop around the loop over batches."""
    begun = [e for e in program.all(EpochBegin) if e.place is not None and e.place.line == loop.node.lineno]
    outer: ast.stmt = loop.node
    inside = 0
    for block, index in program.syntax.blocks_up(loop.node):
        if isinstance(block[index], (ast.For, ast.While)):
            outer = block[index]
            inside += 1
    if any(len(e.loops) >= inside for e in begun):
        raise NotSure("the epochs are counted in another function, and an engine lives longer than one epoch", loop.node.lineno)
    step = next(iter(step_calls(program)))
    assert isinstance(step.func, ast.Attribute)
    return Home(loop.function, outer, early=True, subject=program.syntax.text(step.func.value))


def _parts(program: Program, loop: BatchLoop) -> _Parts:
    body = loop.node.body
    calls = list(backward_calls(program))
    backward = program.syntax.statement(calls[0])
    if len(calls) != 1 or backward not in body:
        raise NotSure("backward is not one statement of the loop over batches", calls[0].lineno)
    assert isinstance(calls[0].func, ast.Attribute)
    dropped = program.indices(body, *DONE_BY_ENGINE) | (
        program.indices(body, SchedulerStep) if _schedule(program, loop) else set()
    )
    loss = calls[0].func.value
    made = _making(program, body, loss, body.index(backward), dropped)
    for index in dropped:
        if not isinstance(body[index], (ast.Expr, ast.Assign)):
            raise NotSure("the engine does a part of this statement and not all of it", body[index].lineno)
    kept = [i for i in range(len(body)) if i not in made and i not in dropped]
    parts = _Parts(_model(program, loop), loss, made, sorted(dropped), kept)
    _check_kept(program, loop, parts)
    return parts


def _making(program: Program, body: Block, loss: ast.expr, backward: int, dropped: set[int]) -> list[int]:
    needed = read_names(loss)
    heard = program.indices(body, Forward, Loss, grad=True)
    found: list[int] = []
    for index in range(backward - 1, -1, -1):
        if index not in dropped and (index in heard or bound_names(body[index]) & needed):
            found.append(index)
            needed |= read_names(body[index])
    return sorted(found)


def _model(program: Program, loop: BatchLoop) -> str:
    found: set[str] = set()
    for event in program.all(Forward):
        call = program.syntax.call_at(event.place)
        if not event.grad_enabled:
            continue
        lines = range(loop.node.lineno, end_line(loop.node) + 1)
        if call is None or program.syntax.function(call) is not loop.function or call.lineno not in lines:
            raise NotSure("the model is called outside of the loop's own statements, where the engine's cannot take its place")
        found.add(program.syntax.text(call.func))
    if len(found) != 1:
        raise NotSure(f"{len(found)} models are called in the loop")
    return found.pop()


def _check_kept(program: Program, loop: BatchLoop, parts: _Parts) -> None:
    body = loop.node.body
    gone = bound_names(loop.node.target) - ({loop.index} if loop.index else set())
    gone = gone.union(*(bound_names(body[i]) for i in [*parts.made, *parts.dropped]))
    for index in parts.kept:
        reads = [n for n in ast.walk(body[index]) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in gone]
        wrong = [n for n in reads if _reading_of_loss(program, n, parts) is None]
        if wrong:
            raise NotSure(
                f"`{wrong[0].id}` of a micro-batch is read beside its loss, and an update has only that", wrong[0].lineno
            )
        if any(isinstance(n, (ast.Continue, ast.Break)) for n in ast.walk(body[index])) and index < max(parts.made):
            raise NotSure("the loop is left before the loss is made", body[index].lineno)
    shared = {n for i in parts.made for n in bound_names(body[i])} & _read_elsewhere(program, loop, parts)
    if shared:
        raise NotSure(f"`{min(shared)}` is read outside of the loop's loss", loop.node.lineno)


def _read_elsewhere(program: Program, loop: BatchLoop, parts: _Parts) -> set[str]:
    """Names read in the function outside of the loop over batches, apart from readings of the loss."""
    inside = set(ast.walk(loop.node))
    root: ast.AST = loop.function if loop.function is not None else program.syntax.tree
    outside = [n for n in ast.walk(root) if n not in inside and program.syntax.function(n) is loop.function]
    after = [n for n in outside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.lineno > loop.node.lineno]
    stored_again = {
        n.id for n in outside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.lineno > end_line(loop.node)
    }
    return {n.id for n in after if _reading_of_loss(program, n, parts) is None} - stored_again


def _reading_of_loss(program: Program, name: ast.Name, parts: _Parts) -> ast.expr | None:
    """The expression that reads the loss as a number, such as `loss.item()`."""
    if not isinstance(parts.loss, ast.Name) or name.id != parts.loss.id:
        return None
    node: ast.AST = name
    parent = program.syntax.parents[node]
    while isinstance(parent, ast.Attribute) and parent.attr in ("item", "detach", "cpu"):
        call = program.syntax.parents[parent]
        if not isinstance(call, ast.Call) or call.args:
            return None
        if parent.attr == "item":
            return call
        node, parent = call, program.syntax.parents[call]
    if isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "float":
        return parent
    return None


def _schedule(program: Program, loop: BatchLoop) -> str | None:
    """The schedule that moves once a batch, as the loop writes it."""
    for event in program.all(SchedulerStep):
        call = program.syntax.call_at(event.place)
        inside = call is not None and program.syntax.statement(call) in loop.node.body
        if call is not None and inside and isinstance(call.func, ast.Attribute) and not call.args:
            return program.syntax.text(call.func.value)
    return None


def _loss_function(program: Program, loop: BatchLoop, parts: _Parts, name: str) -> list[str]:
    """The lines of the loss function, without the indentation of their place."""
    syntax, body = program.syntax, loop.node.body
    unit = syntax.unit(body[0])
    parameter = parts.model if parts.model.isidentifier() else syntax.fresh("model", "module")
    target: ast.expr = loop.node.target
    if loop.index is not None and isinstance(target, ast.Tuple):
        target = target.elts[1]
    plain = isinstance(target, ast.Name)
    batch = syntax.text(target) if plain else syntax.fresh("batch", "micro_batch")
    lines = [f"def {name}({parameter}, {batch}):"]
    if not plain:
        inner = syntax.text(target)
        lines.append(f"{unit}{inner.removeprefix('(').removesuffix(')') if inner.startswith('(') else inner} = {batch}")
    for index in parts.made:
        lines += _moved(program, body[index], unit, parts.model, parameter)
    return [*lines, f"{unit}return {syntax.text(parts.loss)}".replace(f"{parts.model}(", f"{parameter}(")]


def _moved(program: Program, statement: ast.stmt, unit: str, model: str, parameter: str) -> list[str]:
    """The lines of a statement with the comments right above it, indented as a function's body."""
    syntax = program.syntax
    first = first_line(statement)
    while syntax.lines[first - 2].lstrip().startswith(b"#"):
        first -= 1
    indent = syntax.indent(statement)
    lines: list[str] = []
    for number in range(first, end_line(statement) + 1):
        line = syntax.lines[number - 1].decode()
        if number in syntax.inside_strings:
            raise NotSure("a text of several lines stands in the loop", number)
        lines.append((unit + line.removeprefix(indent)).replace(f"{model}(", f"{parameter}(") if line.strip() else "")
    return lines


def _engine(program: Program, loop: BatchLoop, parts: _Parts, wish: Wish, name: str, function: str) -> list[str]:
    step = next(iter(step_calls(program)))
    assert isinstance(step.func, ast.Attribute)
    schedule = _schedule(program, loop)
    given = [parts.model, program.syntax.text(step.func.value), f"loss={function}"]
    given += [f"scheduler={schedule}"] if schedule else []
    given.append(f'precision="{wish.precision}"')
    given += [f"accumulate={wish.accumulate}"] if wish.accumulate > 1 else []
    given += _clips(program)
    return engine_lines(name, given, program.syntax.unit(loop.node.body[0]))


def _clips(program: Program) -> list[str]:
    found = {f"clip_{event.kind}": program.syntax.text(clip_limit(program, event)) for event in program.all(Clip)}
    return [f"{key}={value}" for key, value in found.items()]


def _loader(loop: BatchLoop) -> ast.expr:
    if loop.source is None:
        raise NotSure("batches do not come from a loader, and an engine takes them from one", loop.node.lineno)
    return loop.source


def _rewrite(program: Program, patch: Patch, loop: BatchLoop, parts: _Parts, name: str, *, several: bool) -> None:
    """The loop runs over updates, and what remains in it reads their loss."""
    body = loop.node.body
    update = program.syntax.fresh("update", "engine_update")
    source = _loader(loop)
    patch.replace(source, f"{name}.updates({program.syntax.text(source)})")
    target = loop.node.target
    patch.replace(target.elts[1] if loop.index is not None and isinstance(target, ast.Tuple) else target, update)
    if not parts.kept:
        patch.before(body[0], "pass")
    for index in [*parts.made, *parts.dropped]:
        patch.drop(body[index])
    root: ast.AST = loop.function if loop.function is not None else program.syntax.tree
    gone = [set(ast.walk(body[i])) for i in [*parts.made, *parts.dropped]]
    for node in ast.walk(root):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not any(node in nodes for nodes in gone):
            reading = _reading_of_loss(program, node, parts) if node.lineno >= loop.node.lineno else None
            if reading is not None and program.syntax.function(node) is loop.function:
                summed = isinstance(program.syntax.statement(node), ast.AugAssign)
                patch.replace(reading, f"{update}.loss * {update}.micro_batches" if summed and several else f"{update}.loss")
