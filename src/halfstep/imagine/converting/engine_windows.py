"""The loop on windows of `halfstep.Engine`: forward and backward stay where they are, the engine does what follows them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from halfstep.events.vocabulary import Backward, Clip, Event, Forward, Place, SchedulerStep, Step, ZeroGrad
from halfstep.imagine.converting.checkpoints import add_state
from halfstep.imagine.converting.imports import ensure
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.places import Site, backward_calls, inline_loss, runs, sites, step_calls
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.reach import Carrier, Home, home_of
from halfstep.imagine.converting.references import at_home
from halfstep.imagine.converting.syntax import Block, end_line, first_line


@dataclass(slots=True)
class _Work:
    """What is known of the loop, and the edits so far."""

    program: Program
    patch: Patch
    sites: list[Site]
    home: Home
    engine: str
    window: str
    dropped: list[ast.stmt]


def use_windows(program: Program, precision: str) -> tuple[str, list[str]]:
    """The text with an update of an engine in place of each step, and what was done.

    Raises:
        NotSure: the loop is left; the message says why.
    """
    found = sites(program)
    for site in found:
        _check_site(program, site)
    _check_windows(program)
    home = _home(program)
    engine, window = program.syntax.fresh("engine", "train_engine"), program.syntax.fresh("window", "update_window")
    work = _Work(program, Patch(program.syntax), found, home, home.prefix + engine, window, [])
    ensure(work.patch, "import halfstep")
    line = _engine(work, precision)
    work.home.put(work.patch, *line)
    for site in found:
        _open_window(work, site)
    _rewrite_backwards(work)
    _drop(work)
    carrier = Carrier(program, work.patch, work.home, (engine,))
    for event in {e.stack: e for e in program.all(Backward)}.values():
        carrier.reach(event)
    add_state(program, work.patch, carrier, work.home, work.engine)
    carrier.finish()
    lines = ", ".join(f"{first_line(s.block[s.first])} to {end_line(s.block[s.backward])}" for s in found)
    return work.patch.text(), [f"forward and backward in a window of halfstep.Engine (lines {lines})", *_kept_schedules(work)]


def _check_site(program: Program, site: Site) -> None:
    for statement in site.block[site.first : _last(program, site) + 1]:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Continue, ast.Break, ast.Return)) and program.syntax.function(node) is site.function:
                raise NotSure("the loop is left between forward and backward, where a window would have no loss", node.lineno)


def _last(program: Program, site: Site) -> int:
    """The last statement of a window: what stands between backward and step still happens before the step."""
    steps = [i for i in program.indices(site.block, Step) if i > site.backward]
    return min(steps) - 1 if steps else site.backward


def _check_windows(program: Program) -> None:
    """See that each step follows the backward passes of its own turn, each of them once."""
    for trace in program.traces:
        passed: list[Backward] = []
        for event in trace.of(Backward, Step) if trace.exception is None else ():
            if isinstance(event, Backward):
                passed.append(event)
                continue
            line = event.place.line if event.place is not None else None
            if not passed or len({b.stack for b in passed}) != len(passed) or any(b.loops != event.loops for b in passed):
                raise NotSure(
                    "the optimizer does not step once in each turn that runs backward: the loop accumulates already", line
                )
            passed = []


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
    line = f"{work.engine} = halfstep.Engine({', '.join(given)})"
    if len(line) <= 110:
        return [line]
    unit = program.syntax.unit(work.sites[0].block[0])
    return [f"{work.engine} = halfstep.Engine(", *(f"{unit}{g}," for g in given), ")"]


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
    forward = next((f for f in program.usual.of(Forward) if f.grad_enabled), None)
    called = program.syntax.call_at(forward.place) if forward is not None else None
    if forward is None or called is None:
        raise NotSure("the model that is trained cannot be seen where the engine would be made")
    return at_home(program, called.func, forward, home)


def _is_parameters(node: ast.Attribute) -> bool:
    return node.attr in ("parameters", "named_parameters")


def _schedule(work: _Work) -> str | None:
    """The schedule that moves once an update and that the engine can move; its own moves are dropped."""
    program = work.program
    if len(work.sites) != 1 or work.home.early:
        return None
    site = work.sites[0]
    moves = {e.place: e for e in program.all(SchedulerStep)}
    loop = program.syntax.parents.get(site.block[0])
    if len(moves) != 1 or not isinstance(loop, (ast.For, ast.While)):
        return None
    event = next(iter(moves.values()))
    call = program.syntax.call_at(event.place)
    statement = program.syntax.statement(call) if call is not None else None
    if call is None or call.args or statement not in site.block or not isinstance(call.func, ast.Attribute):
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
    """What is said of schedules that the script goes on moving with every batch."""
    kept = []
    for place in {e.place for e in work.program.all(SchedulerStep)}:
        statement = work.program.syntax.statement_at(place) if place is not None else None
        inside = statement is not None and any(statement in ast.walk(s) for site in work.sites for s in site.block)
        if statement is not None and inside and statement not in work.dropped:
            kept.append(f"line {statement.lineno}: the schedule still moves with every batch, also when an update was skipped")
    return kept


def _clips(work: _Work) -> list[str]:
    """The engine's arguments for the clips, which are dropped."""
    program = work.program
    found: dict[str, str] = {}
    for event in {e.place: e for e in program.all(Clip)}.values():
        call = program.syntax.call_at(event.place)
        keyword = {"norm": "max_norm", "value": "clip_value"}.get(event.kind)
        statement = program.syntax.statement_at(event.place) if event.place is not None else None
        if call is None or keyword is None or statement is None:
            raise NotSure(
                "gradients are changed in a way that the engine does not know", event.place.line if event.place else None
            )
        limit = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == keyword)]
        others = [k for k in call.keywords if k.arg not in (keyword, "parameters", "foreach", "error_if_nonfinite")]
        if len(limit) != 1 or others or len(call.args) > 2 or event.partial or f"clip_{event.kind}" in found:
            raise NotSure("the clip has options that the engine does not have", call.lineno)
        if not isinstance(statement, ast.Expr):
            raise NotSure("what the clip returns is used", call.lineno)
        text = at_home(program, limit[0], event, work.home)
        found[f"clip_{event.kind}"] = _conditional(work, statement, event, text)
        work.dropped.append(statement)
    return [f"{key}={value}" for key, value in found.items()]


def _conditional(work: _Work, statement: ast.stmt, event: Event, limit: str) -> str:
    """The limit, None where the `if` around the clip is false."""
    blocks = [site.block for site in work.sites]
    parent = work.program.syntax.parents[statement]
    if any(statement in block for block in blocks):
        return limit
    if (
        not isinstance(parent, ast.If)
        or not any(parent in block for block in blocks)
        or parent.body != [statement]
        or parent.orelse
    ):
        raise NotSure("when gradients are clipped cannot be told to the engine", statement.lineno)
    test = at_home(work.program, parent.test, event, work.home)
    return limit if test == f"{limit} is not None" else f"{limit} if {test} else None"


def _open_window(work: _Work, site: Site) -> None:
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
    patch.wrap(site.block[site.first], site.block[_last(program, site)], f"with {work.engine}.window() as {work.window}:")


def _split(work: _Work, statement: ast.stmt, expression: ast.expr) -> None:
    """`compute(x).backward()` becomes a loss under the window's precision and its backward pass."""
    text, syntax = work.program.syntax.text(expression), work.program.syntax
    if "\n" in text:
        raise NotSure("the loss is made and backpropagated in one statement of several lines", statement.lineno)
    name = syntax.fresh("loss", "batch_loss", "loss_value")
    work.patch.before(statement, f"with {work.window}.forward():", f"{syntax.unit(statement)}{name} = {text}", inside=True)


def _rewrite_backwards(work: _Work) -> None:
    """`loss.backward()` becomes `window.backward(loss)`; further losses of a turn do not count as further micro-batches."""
    syntax = work.program.syntax
    for site in work.sites:
        calls = [c for c in backward_calls(work.program) if _index(work, site.block, c) is not None]
        for number, call in enumerate(sorted(calls, key=lambda c: c.lineno)):
            assert isinstance(call.func, ast.Attribute)
            statement = syntax.statement(call)
            if syntax.function(call) is not site.function or (number == 0 and statement not in site.block):
                raise NotSure("backward runs where the window cannot be reached, or only sometimes", call.lineno)
            inline = inline_loss(site, site.block.index(statement)) if statement in site.block else None
            loss = syntax.fresh("loss", "batch_loss", "loss_value") if inline is not None else syntax.text(call.func.value)
            given = [loss, *(["weight=0"] if number else []), *(syntax.text(k) for k in call.keywords)]
            work.patch.replace(call, f"{work.window}.backward({', '.join(given)})")
    known = [c for c in backward_calls(work.program) if any(_index(work, s.block, c) is not None for s in work.sites)]
    if len(known) != len(backward_calls(work.program)):
        raise NotSure("backward runs in another function than the forward pass")


def _index(work: _Work, block: Block, call: ast.Call) -> int | None:
    statement = work.program.syntax.statement(call)
    return next((i for b, i in work.program.syntax.blocks_up(statement) if b is block), None)


def _drop(work: _Work) -> None:
    """Take out what the engine does itself."""
    syntax = work.program.syntax
    work.dropped += [syntax.statement(call) for call in step_calls(work.program)]
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


def _clearing(program: Program, place: Place | None) -> ast.stmt:
    statement = program.syntax.statement_at(place) if place is not None and program.syntax.here(place) else None
    if not isinstance(statement, ast.Expr):
        raise NotSure(
            "gradients are cleared in a way that cannot be left to the engine", place.line if place is not None else None
        )
    return statement
