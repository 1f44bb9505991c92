"""Fixes within a line: another spelling, a line more, a line less."""

from __future__ import annotations

import ast
import re

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.converting.syntax import end_line, first_line
from halfstep.imagine.edits import Editor
from halfstep.imagine.fixing.naming import sees


def unscale_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Gradients are unscaled before the statement that looks at them."""
    scaler, optimizer = (named(editor, name, request.place) for name in request.text.split("|"))
    statement = editor.simple(request.place)
    if statement is None or scaler is None or optimizer is None:
        return None
    return [editor.before(statement, f"{scaler}.unscale_({optimizer})")]


def named(editor: Editor, name: str, place: Place) -> str | None:
    """How the source writes an object at a place: `name` or `self.name`; None where it cannot be read there."""
    own = re.search(rf"\bself\.{re.escape(name)}\b", editor.source)
    plain = re.search(rf"(?<![\w.]){re.escape(name)}\b", editor.source)
    if own and plain:
        return None
    text = f"self.{name}" if own else name if plain else None
    statement = editor.syntax.statement_at(place)
    return text if text is not None and statement is not None and sees(editor, text, statement) else None


def update_after(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The scale is updated after the step through the scaler."""
    statement, call = editor.simple(request.place), editor.call(request.place)
    if statement is None or call is None or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return None
    update = f"{editor.syntax.text(call.func.value)}.update("
    return [editor.after(statement, f"{update})")] if update not in editor.source else None


def delete(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A statement is taken out with its line."""
    statement = editor.simple(request.place)
    whole = isinstance(statement, ast.Expr) and statement.value in editor.syntax.nodes_at(request.place)
    return [editor.cut(statement)] if statement is not None and whole else None


def zero_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Gradients are cleared before the statement that fills them."""
    name, statement = named(editor, request.text, request.place), editor.simple(request.place)
    return [editor.before(statement, f"{name}.zero_grad()")] if name is not None and statement is not None else None


def scale_loss(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """`loss.backward()` becomes `scaler.scale(loss).backward()`."""
    text = editor.text(request.place)
    match = re.fullmatch(r"([\w.]+)\.backward\((.*)\)", text)
    scaler = named(editor, request.text, request.place)
    if match is None or scaler is None:
        return None
    new = f"{scaler}.scale({match.group(1)}).backward({match.group(2)})"
    return [replaced(editor, request.place, new)]


def replaced(editor: Editor, place: Place, text: str) -> Edit:
    """Another text for a place."""
    return Edit(
        place.line,
        editor.column(place.line, place.column),
        place.end_line,
        editor.column(place.end_line, place.end_column),
        text,
    )


def modernise(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The spelling of `torch.amp`, with the device as its first argument."""
    name, device = request.text.split("|")
    text = editor.text(request.place)
    match = re.fullmatch(r"([\w.]+)\((.*)\)", text, re.S)
    if match is None or not re.search(r"^\s*import torch\b(?!\.)", editor.source, re.M):
        return None
    arguments = match.group(2).strip()
    first = re.match(r"[^,=]+(?=,|$)", arguments)
    if first and arguments and "=" not in arguments.split(",")[0]:
        if name == "GradScaler":
            return None
        arguments = f"enabled={arguments}"
        if arguments.count(",") and "=" not in arguments.split(",", 1)[1]:
            return None
    inside = f'"{device}"' + (f", {arguments}" if arguments else "")
    return [replaced(editor, request.place, f"torch.amp.{name}({inside})")]


def finfo(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The number that masks becomes the lowest one of the dtype."""
    text = editor.text(request.place)
    match = re.fullmatch(r"([\w.]+)\.masked_fill(_?)\((.+), *-\d[\d.e]*\)", text)
    if match is None:
        return None
    subject, mark, mask = match.groups()
    return [replaced(editor, request.place, f"{subject}.masked_fill{mark}({mask}, torch.finfo({subject}.dtype).min)")]


def dedent_tail(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Move the last statements of a `with` block out of it."""
    statement = editor.statement(request.place)
    held = editor.syntax.parents.get(statement) if statement is not None else None
    if statement is None or not isinstance(held, ast.With) or statement not in held.body[1:]:
        return None
    inner, outer = editor.syntax.indent(statement), editor.syntax.indent(held)
    lines = [n for n in range(first_line(statement), end_line(held) + 1) if editor.lines[n - 1].startswith(inner)]
    moved = [n for n in lines if n not in editor.syntax.inside_strings]
    return [Edit(number, 0, number, len(inner), outer) for number in moved]
