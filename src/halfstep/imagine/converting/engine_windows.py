"""The loop on windows of `halfstep.Engine`: forward and backward stay where they are, the engine does what follows them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from halfstep.events.vocabulary import Backward, Clip, Event, Forward, Place, SchedulerStep, Step, ZeroGrad
from halfstep.imagine.converting.checkpoints import add_state
from halfstep.imagine.converting.engine_extents import Extent, Quotient, divisor, extent_of, has_shorter, quotients
from halfstep.imagine.converting.imports import ensure
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.places import (
    Site,
    backward_calls,
    clip_limit,
    engine_lines,
    inline_loss,
    runs,
    sites,
    step_calls,
)
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.reach import Carrier, Home, home_of
from halfstep.imagine.converting.references import at_home
from halfstep.imagine.converting.refusals import refuse_engine
from halfstep.imagine.converting.syntax import Block, end_line, first_line, is_plain


@dataclass(slots=True)
class _Work:
    """What is known of the loop, and the edits so far."""

    program: Program
    patch: Patch
    sites: list[tuple[Site, Extent]]
    quotients: dict[ast.Call, Quotient]
    """Where the losses of an update are divided by their number, where it has several."""
    home: Home
    engine: str
    window: str
    dropped: list[ast.stmt]
    norms: list[str]
    """The names of the gradient's norm."""

    @property
    def steps(self) -> list[ast.stmt]:
        """The statements that step the optimizer."""
        return [self.program.syntax.statement(call) for call in step_calls(self.program)]

    @property
    def blocks(self) -> list[Block]:
        """Where the statements of an update stand."""
        return [*(site.block for site, _ in self.sites), *(self.program.syntax.block(step)[0] for step in self.steps)]


def use_windows(program: Program, precision: str) -> tuple[str, list[str]]:
    """The text with an update of an engine in place of each step, and what was done.

    Raises:
        NotSure: the loop is left; the message says why.
    """
    refuse_engine(program)
    found = [(site, extent_of(program, site)) for site in sites(program)]
    divided = quotients(program, found[0][0])
    if len(found) > 1 and (divided or any(extent.outermost for _, extent in found)):
        raise NotSure("an update takes several turns, and forward and backward meet in several places")
    home = _home(program)
    engine, window = program.syntax.fresh("engine", "train_engine"), program.syntax.fresh("window", "update_window")
    work = _Work(program, Patch(program.syntax), found, divided, home, home.prefix + engine, window, [], [])
    ensure(work.patch, "import halfstep")
    line = _engine(work, precision)
    work.home.put(work.patch, *line)
    for site, extent in found:
        _open_window(work, site, extent)
    _rewrite_backwards(work)
    _drop(work)
    carrier = Carrier(program, work.patch, work.home, (engine,))
    for event in {e.stack: e for e in program.all(Backward)}.values():
        carrier.reach(event)
    add_state(program, work.patch, carrier, work.home, work.engine)
    carrier.finish()
    return work.patch.text(), [_said(work), *_kept_schedules(work)]


def _said(work: _Work) -> str:
    lines = ", ".join(f"{first_line(s.block[s.first])} to {end_line(s.block[s.backward])}" for s, _ in work.sites)
    shorter = bool(work.quotients) and has_shorter(work.program)
    own = "; an update of fewer micro-batches is now divided by their number" if shorter else ""
    return f"forward and backward in a window of halfstep.Engine (lines {lines}){own}"


def _home(program: Program) -> Home:
    """Where the optimizer is made, or behind it where its schedule is made or its model is moved."""
    home = home_of(program)
    if home.early:
        return home
    block, index = program.syntax.block(home.statement)
    trains = min((i for i in (program.index_in(block, b) for b in program.all(Backward)) if i is not None), default=len(block))
    schedules = {i for i in (program.index_in(block, m) for m in program.made("scheduler").values()) if i is not None}
    moved = {i for i in range(index, min(trains, len(block))) if _moves(block[i])}
    last = max([index, *(i for i in schedules | moved if index < i < trains)])
    return replace(home, statement=block[last])


def _moves(statement: ast.stmt) -> bool:
    """Whether a statement moves something to a device in place."""
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda")


def _engine(work: _Work, precision: str) -> list[str]:
    """The lines that make the engine."""
    program, home = work.program, work.home
    step_call, step = next(iter(step_calls(program).items()))
    assert isinstance(step_call.func, ast.Attribute)
    given = [_model(program, home), at_home(program, step_call.func.value, step, home)]
    schedule = _schedule(work)
    given += [f"scheduler={schedule}"] if schedule is not None else []
    given += [f'precision="{precision}"', *_clips(work)]
    return engine_lines(work.engine, given, program.syntax.unit(work.blocks[0][0]))


def _model(program: Program, home: Home) -> str:
    """The model whose parameters the optimizer was given, as it is written where the engine is made."""
    made = program.usual.made(next(program.usual.of(Step)).optimizer)
    call = program.syntax.call_at(made.place) if made is not None else None
    if made is not None and call is not None:
        owners = {ast.unparse(n.value): n.value for n in ast.walk(call) if isinstance(n, ast.Attribute) and _is_parameters(n)}
        if len(owners) > 1:
            raise NotSure(f"the optimizer holds the parameters of {len(owners)} models", call.lineno)
        for owner in owners.values():
            return at_home(program, owner, made, home)
    forwards = [f for f in program.usual.of(Forward) if f.grad_enabled]
    forward = next(iter(forwards), None)
    called = program.syntax.call_at(forward.place) if forward is not None else None
    several = {ast.unparse(c.func) for c in (program.syntax.call_at(f.place) for f in forwards) if c is not None}
    if len(several) > 1 and called is not None:
        raise NotSure(f"{len(several)} models are called, and which of them the optimizer holds cannot be seen", called.lineno)
    if forward is None or called is None:
        raise NotSure("the model that is trained cannot be seen where the engine would be made")
    return at_home(program, called.func, forward, home)


def _is_parameters(node: ast.Attribute) -> bool:
    return node.attr in ("parameters", "named_parameters")


def _schedule(work: _Work) -> str | None:
    """The schedule that moves once an update and that the engine can move; its own moves are dropped."""
    program = work.program
    steps = work.steps
    if len(steps) != 1 or work.home.early:
        return None
    moves = {e.place: e for e in program.all(SchedulerStep)}
    loop = program.syntax.loop_around(steps[0])
    if len(moves) != 1 or loop is None:
        return None
    event = next(iter(moves.values()))
    call = program.syntax.call_at(event.place)
    statement = program.syntax.statement(call) if call is not None else None
    if (
        call is None
        or call.args
        or statement not in program.syntax.block(steps[0])[0]
        or not isinstance(call.func, ast.Attribute)
    ):
        return None
    made, home = program.usual.made(event.scheduler), work.home
    block, index = program.syntax.block(home.statement)
    at = program.index_in(block, made) if made is not None else None
    if at is None or at > index:
        return None
    text = at_home(program, call.func.value, event, home)
    work.dropped.append(statement)
    work.patch.after(loop, f"{work.engine}.settle()")
    return text


def _kept_schedules(work: _Work) -> list[str]:
    """What is said of schedules that the script goes on moving."""
    kept = []
    for place in {e.place for e in work.program.all(SchedulerStep)}:
        statement = work.program.syntax.statement_at(place) if place is not None else None
        inside = statement is not None and any(statement in ast.walk(s) for block in work.blocks for s in block)
        if statement is not None and inside and statement not in work.dropped:
            kept.append(f"line {statement.lineno}: the schedule still moves where it did, also when an update was skipped")
    return kept


def _clips(work: _Work) -> list[str]:
    """The engine's arguments for the clips, which are dropped."""
    program = work.program
    found: dict[str, str] = {}
    for event in {e.place: e for e in program.all(Clip)}.values():
        limit = clip_limit(program, event)
        statement = program.syntax.statement(limit)
        if f"clip_{event.kind}" in found:
            raise NotSure("gradients are clipped in several places", limit.lineno)
        if not isinstance(statement, ast.Expr):
            _keep_norm(work, statement, event)
        text = at_home(program, limit, event, work.home)
        found[f"clip_{event.kind}"] = _conditional(work, statement, event, text)
        work.dropped.append(statement)
    return [f"{key}={value}" for key, value in found.items()]


def _conditional(work: _Work, statement: ast.stmt, event: Event, limit: str) -> str:
    """The limit, None where the `if` around the clip is false."""
    parent = work.program.syntax.parents[statement]
    if any(statement in block for block in work.blocks):
        return limit
    at_once = isinstance(parent, ast.If) and parent.body == [statement] and not parent.orelse
    if not isinstance(parent, ast.If) or not at_once or not any(parent in block for block in work.blocks):
        raise NotSure("when gradients are clipped cannot be told to the engine", statement.lineno)
    test = at_home(work.program, parent.test, event, work.home)
    return limit if test == f"{limit} is not None" else f"{limit} if {test} else None"


def _keep_norm(work: _Work, statement: ast.stmt, event: Clip) -> None:
    """`norm = clip_grad_norm_(...)` becomes a reading of the update, after it."""
    syntax = work.program.syntax
    target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
    step = max(work.steps, key=lambda s: s.lineno)
    if event.kind != "norm" or not isinstance(target, ast.Name) or not any(statement in block for block in work.blocks):
        raise NotSure("what the clip returns is used in a way that cannot be followed", statement.lineno)
    nodes = ast.walk(syntax.function(statement) or syntax.tree)
    read = [n for n in nodes if isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Load)]
    for node in read:
        if statement.lineno < node.lineno <= step.lineno:
            raise NotSure(f"`{target.id}` is read before the step, and an engine knows it after", node.lineno)
        reading = syntax.parents[node]
        if isinstance(reading, ast.Attribute):
            call = syntax.parents[reading]
            if reading.attr != "item" or not isinstance(call, ast.Call):
                raise NotSure(f"`{target.id}` is read as a tensor, and an engine gives a number", node.lineno)
            work.patch.replace(call, target.id)
    work.norms += [target.id] if read else []


def _open_window(work: _Work, site: Site, extent: Extent) -> None:
    """A window around forward and backward, and its precision around the forward passes."""
    program, patch = work.program, work.patch
    for first, last in runs(program, site):
        expression = inline_loss(site, last)
        if first == last and expression is not None:
            _split(work, site.block[last], expression)
        elif last == site.backward or expression is not None:
            raise NotSure("the forward pass cannot be told from the backward pass", site.block[last].lineno)
        else:
            patch.wrap(site.block[first], site.block[last], f"with {work.window}.forward():")
    opened = f"{work.engine}.window()"
    if extent.outermost is None:
        patch.wrap(extent.block[extent.first], extent.block[extent.last], f"with {opened} as {work.window}:")
        return
    ensure(patch, "from contextlib import ExitStack")
    update, start = _update(work), site.block[site.first]
    patch.before(extent.outermost, f"{update} = ExitStack()", f"{work.window} = None")
    entered = f"{work.window} = {update}.enter_context({opened})"
    patch.before(start, f"if {work.window} is None:", f"{program.syntax.unit(start)}{entered}")


def _update(work: _Work) -> str:
    """The name of what holds a window open over several turns."""
    return work.program.syntax.fresh("open_update", "open_window")


def _split(work: _Work, statement: ast.stmt, expression: ast.expr) -> None:
    """`compute(x).backward()` becomes a loss under the window's precision and its backward pass."""
    text, syntax = work.program.syntax.text(_undivided(work, expression)), work.program.syntax
    if "\n" in text:
        raise NotSure("the loss is made and backpropagated in one statement of several lines", statement.lineno)
    name = _loss(work)
    work.patch.before(statement, f"with {work.window}.forward():", f"{syntax.unit(statement)}{name} = {text}", inside=True)


def _loss(work: _Work) -> str:
    return work.program.syntax.fresh("loss", "batch_loss", "loss_value")


def _undivided(work: _Work, loss: ast.expr) -> ast.expr:
    """A loss without the division by the number of micro-batches, which is the engine's to make."""
    return loss.left if isinstance(loss, ast.BinOp) and loss in work.quotients.values() else loss


def _rewrite_backwards(work: _Work) -> None:
    """`loss.backward()` becomes `window.backward(loss)`; further losses of a turn do not count as further micro-batches."""
    syntax = work.program.syntax
    for site, _ in work.sites:
        made = {site.block[last] for _, last in runs(work.program, site) if inline_loss(site, last) is not None}
        calls = [c for c in backward_calls(work.program) if _index(work, site.block, c) is not None]
        for number, call in enumerate(sorted(calls, key=lambda c: c.lineno)):
            assert isinstance(call.func, ast.Attribute)
            statement = syntax.statement(call)
            if syntax.function(call) is not site.function or (number == 0 and statement not in site.block):
                raise NotSure("backward runs where the window cannot be reached, or only sometimes", call.lineno)
            loss = _undivided(work, call.func.value)
            given = [_loss(work) if statement in made else syntax.text(loss), *_weight(work, call, first=number == 0)]
            given += [syntax.text(k) for k in call.keywords]
            work.patch.replace(call, f"{work.window}.backward({', '.join(given)})")
    known = [c for c in backward_calls(work.program) if any(_index(work, s.block, c) is not None for s, _ in work.sites)]
    if len(known) != len(backward_calls(work.program)):
        raise NotSure("backward runs in another function than the forward pass")


def _weight(work: _Work, call: ast.Call, *, first: bool) -> list[str]:
    """How much of the window's mean a loss is: what was divided by the number of micro-batches is one part of so many."""
    assert isinstance(call.func, ast.Attribute)
    if not first:
        return ["weight=0"]
    quotient = work.quotients.get(call)
    if quotient is None or call.func.value is quotient:
        return []
    number = divisor(quotient)
    text = work.program.syntax.text(number)
    return [f"weight=1 / {text}" if is_plain(number) else f"weight=1 / ({text})"]


def _index(work: _Work, block: Block, call: ast.Call) -> int | None:
    statement = work.program.syntax.statement(call)
    return next((i for b, i in work.program.syntax.blocks_up(statement) if b is block), None)


def _drop(work: _Work) -> None:
    """Take out what the engine does itself."""
    syntax = work.program.syntax
    for step in work.steps:
        _end_window(work, step)
    for place in {e.place for e in work.program.all(ZeroGrad)}:
        work.dropped.append(_clearing(work.program, place))
    gone = list(dict.fromkeys(work.dropped))
    for statement in list(gone):
        parent = syntax.parents[statement]
        while isinstance(parent, ast.If) and not parent.orelse and all(s in gone for s in parent.body):
            gone = [parent, *(s for s in gone if s not in parent.body)]
            statement, parent = parent, syntax.parents[parent]
    for statement in gone:
        block, index = syntax.block(statement)
        if all(s in gone for s in block) and index == 0:
            work.patch.replace(statement, "pass")
        else:
            work.patch.drop(statement)


def _end_window(work: _Work, step: ast.stmt) -> None:
    """What stands where the optimizer stepped: the end of a window that is open over turns, and readings of the update."""
    open_over_turns = any(extent.outermost is not None for _, extent in work.sites)
    lines = [f"{norm} = {work.window}.update.grad_norm" for norm in work.norms]
    if open_over_turns:
        lines = [f"{_update(work)}.close()", *lines, f"{work.window} = None"]
    if lines:
        work.patch.replace(step, f"\n{work.program.syntax.indent(step)}".join(lines))
    else:
        work.dropped.append(step)


def _clearing(program: Program, place: Place | None) -> ast.stmt:
    statement = program.syntax.statement_at(place) if place is not None and program.syntax.here(place) else None
    if not isinstance(statement, ast.Expr):
        raise NotSure(
            "gradients are cleared in a way that cannot be left to the engine", place.line if place is not None else None
        )
    return statement
