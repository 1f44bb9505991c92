"""Fixes within a line: another spelling, a line more, a line less."""

from __future__ import annotations

import re

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.edits import Editor
from halfstep.imagine.fixing.naming import sees


def unscale_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Gradients are unscaled before the statement that looks at them."""
    scaler, optimizer = request.text.split("|")
    if not editor.alone(request.place):
        return None
    prefix = named(editor, scaler, request.place), named(editor, optimizer, request.place)
    if None in prefix:
        return None
    return editor.insert_before(request.place.line, f"{prefix[0]}.unscale_({prefix[1]})")


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
    match = re.match(r"\s*([\w.]+)\.step\(", editor.lines[request.place.line - 1])
    if match is None or not editor.alone(request.place) or f"{match.group(1)}.update(" in editor.source:
        return None
    return editor.insert_after(request.place.line, f"{match.group(1)}.update()")


def delete(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A statement is taken out with its line."""
    line = request.place.line
    if not editor.alone(request.place) or editor.lines[line - 1].strip() != editor.text(request.place):
        return None
    return [Edit(line, 0, line + 1, 0, "")]


def zero_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """Gradients are cleared before the statement that fills them."""
    name = named(editor, request.text, request.place)
    return editor.insert_before(request.place.line, f"{name}.zero_grad()") if name and editor.alone(request.place) else None


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
    line = request.place.line
    indent = editor.indent(line)
    if len(indent) < 4 or not editor.alone(request.place):
        return None
    header = next((n for n in range(line - 1, 0, -1) if editor.lines[n - 1].strip() and len(editor.indent(n)) < len(indent)), 0)
    if not header or not re.match(r"\s*with\b.*:\s*$", editor.lines[header - 1]) or header == line - 1:
        return None
    outer = editor.indent(header)
    edits: list[Edit] = []
    number = line
    while number <= len(editor.lines):
        text = editor.lines[number - 1]
        if text.strip() and not editor.indent(number).startswith(indent):
            break
        if text.strip():
            edits.append(Edit(number, 0, number, len(indent), outer))
        number += 1
    return edits
