"""The loss scaler: made beside the optimizer, in backward, clip, step and schedule, and in the checkpoint."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from halfstep.events.trace import Trace
from halfstep.events.vocabulary import Backward, Clip, Event, GradRead, SchedulerStep, Step
from halfstep.imagine.converting.checkpoints import add_state
from halfstep.imagine.converting.device import device_type
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.places import backward_calls, step_calls
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.reach import Carrier, Home, home_of
from halfstep.imagine.converting.syntax import Block, bound_names, neighbours, read_names


@dataclass(frozen=True, slots=True)
class Names:
    """How the program writes its scaler and its autocast dtype."""

    scaler: str
    dtype: str


def add_scaler(program: Program, patch: Patch, *, auto: bool, device: str = "") -> Names:
    """Scale the loss; with `auto` only where BF16 is not native. The device is the model's where none is named.

    Raises:
        NotSure: the scaler cannot be brought to every place that needs it.
    """
    home = home_of(program)
    device = device or device_type(program, home.function)
    home = _known_there(program, home, device)
    plain = program.syntax.fresh("scaler", "grad_scaler", "loss_scaler")
    dtype = program.syntax.fresh("amp_dtype", "autocast_dtype")
    names = Names(home.prefix + plain, home.prefix + dtype if auto else "torch.float16")
    _make(program, patch, home, names, auto, device)
    carrier = Carrier(program, patch, home, (dtype, plain) if auto else (plain,))
    used = _used(program)
    for event in {e.stack: e for e in [*used, *program.all(Step)]}.values():
        carrier.reach(event)
    places = {backward.place for backward in used}
    for call, backward in backward_calls(program).items():
        if backward.place in places:
            _scale(program, patch, call, names.scaler)
    _unscale(program, patch, home, names.scaler)
    for call in step_calls(program):
        _step(program, patch, call, names.scaler)
    _hold_schedule(program, patch, names.scaler)
    add_state(program, patch, carrier, home, names.scaler)
    carrier.finish()
    return names


def _used(program: Program) -> list[Backward]:
    """The backward passes whose gradients a step uses; others, which only look at gradients, are not scaled."""
    found: list[Backward] = []
    for trace in program.traces:
        waiting: list[Backward] = []
        for event in trace.of(Backward, Step):
            if isinstance(event, Backward):
                waiting.append(event)
            else:
                found += waiting
                waiting = []
    return found


def _known_there(program: Program, home: Home, device: str) -> Home:
    """The home, behind what the device is read from where that is made later."""
    if home.early:
        return home
    block, index = program.syntax.block(home.statement)
    names = read_names(ast.parse(device))
    later = [s for s in block[index + 1 :] if isinstance(s, ast.Assign) and bound_names(s) & names]
    return replace(home, statement=later[-1]) if later else home


def _make(program: Program, patch: Patch, home: Home, names: Names, auto: bool, device: str) -> None:
    if not auto:
        home.put(patch, f"{names.scaler} = torch.amp.GradScaler({device})")
        return
    native, probe = program.syntax.fresh("bf16_is_native"), "torch.cuda.is_bf16_supported(including_emulation=False)"
    home.put(
        patch,
        f"{native} = {probe}" if device == '"cuda"' else f'{native} = {device} != "cuda" or {probe}',
        f"{names.dtype} = torch.bfloat16 if {native} else torch.float16",
        f"{names.scaler} = torch.amp.GradScaler({device}, enabled=not {native})",
    )


def _scale(program: Program, patch: Patch, call: ast.Call, scaler: str) -> None:
    """`loss.backward()` becomes `scaler.scale(loss).backward()`."""
    assert isinstance(call.func, ast.Attribute)
    receiver = call.func.value
    start, _ = patch.span(call)
    _, end = patch.span(call.func)
    patch.replaced_receiver(start, end, f"{scaler}.scale({program.syntax.text(receiver)}).backward")


def _step(program: Program, patch: Patch, call: ast.Call, scaler: str) -> None:
    assert isinstance(call.func, ast.Attribute)
    if call.args or call.keywords:
        raise NotSure("the optimizer's step has arguments", call.lineno)
    statement = program.syntax.statement(call)
    patch.replace(call, f"{scaler}.step({program.syntax.text(call.func.value)})")
    patch.after(statement, f"{scaler}.update()")


def _unscale(program: Program, patch: Patch, home: Home, scaler: str) -> None:
    """Gradients get their true size before the first look at them in each window."""
    for trace in program.traces:
        for event in _first_looks(trace):
            frames = program.frames(event)
            function = next(program.frames(s)[-1].function for s in trace.of(Step))
            frame = next((f for f in reversed(frames) if f.function is function), None)
            if frame is None:
                raise NotSure("gradients are read or clipped in a function that does not hold the optimizer's step")
            patch.before(_simple(program, frame.statement, event), f"{scaler}.unscale_({home.subject})")


def _simple(program: Program, statement: ast.stmt, event: Event) -> ast.stmt:
    if isinstance(statement, (ast.If, ast.While)):
        raise NotSure("gradients are read in a condition", statement.lineno)
    if isinstance(statement, ast.For):
        return statement
    block, index = program.syntax.block(statement)
    return _loop_around(program, block[index])


def _loop_around(program: Program, statement: ast.stmt) -> ast.stmt:
    """The outermost loop over parameters around a statement that looks at gradients."""
    parent = program.syntax.parents.get(statement)
    while isinstance(parent, ast.For) and not any(
        isinstance(n, ast.Attribute) and n.attr == "backward" for n in ast.walk(parent)
    ):
        statement, parent = parent, program.syntax.parents.get(parent)
    return statement


def _first_looks(trace: Trace) -> list[Event]:
    """The first clipping or reading of gradients after each window's last backward pass."""
    found: list[Event] = []
    first: Event | None = None
    for event in trace.of(Backward, Clip, GradRead, Step):
        if isinstance(event, Backward):
            first = None
        elif isinstance(event, Step):
            found += [first] if first is not None else []
            first = None
        elif first is None and event.optimizers:
            first = event
    return list({e.stack: e for e in found}.values())


def _hold_schedule(program: Program, patch: Patch, scaler: str) -> None:
    """A schedule that moves once an update stays where it is when the update was skipped."""
    steps = {program.syntax.statement(c): c for c in step_calls(program)}
    for statement in steps:
        block, index = program.syntax.block(statement)
        moved = [i for i in program.indices(block, SchedulerStep) if i > index]
        if not moved:
            continue
        before = program.syntax.fresh("scale_before")
        patch.before(statement, f"{before} = {scaler}.get_scale()")
        for first, last in neighbours(moved):
            _check_moves(program, block, first, last)
            patch.wrap(block[first], block[last], f"if {scaler}.get_scale() >= {before}:  # the update was not skipped")


def _check_moves(program: Program, block: Block, first: int, last: int) -> None:
    others = program.indices(block, Backward, Step) & set(range(first, last + 1))
    if others:
        raise NotSure("the schedule moves in a statement that also trains", block[first].lineno)
