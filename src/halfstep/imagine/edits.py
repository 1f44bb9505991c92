"""Text edits at exact places, and the editor that turns what a rule asks for into such edits."""

from __future__ import annotations

import re
from collections.abc import Iterable

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Edit, Fix, FixRequest, Safety


def applied(source: str, edits: Iterable[Edit]) -> str:
    """The source after the edits; edits that overlap an earlier one are left out."""
    starts = _line_starts(source)
    spans = sorted((_offset(starts, e.line, e.column), _offset(starts, e.end_line, e.end_column), e.text) for e in edits)
    out: list[str] = []
    position = 0
    for start, end, text in spans:
        if start < position or end < start:
            continue
        out.append(source[position:start])
        out.append(text)
        position = end
    out.append(source[position:])
    return "".join(out)


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _offset(starts: list[int], line: int, column: int) -> int:
    return min(starts[min(line - 1, len(starts) - 1)] + column, starts[-1])


class Editor:
    """Makes fixes for one source."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines()

    def fix(self, request: FixRequest, safety: Safety) -> Fix | None:
        """The fix that a rule asks for, or None where the text does not allow a sure edit."""
        handler = _ACTIONS.get(request.action)
        edits = handler(self, request) if handler is not None and request.place.line <= len(self.lines) else None
        return Fix(tuple(edits), safety, request.action) if edits else None

    def text(self, place: Place) -> str:
        """The source of a place on one line, else nothing."""
        if place.line != place.end_line or place.line > len(self.lines):
            return ""
        raw = self.lines[place.line - 1].encode()
        return raw[place.column : place.end_column].decode(errors="replace")

    def column(self, line: int, byte_column: int) -> int:
        """The character column of a byte column."""
        return len(self.lines[line - 1].encode()[:byte_column].decode(errors="replace"))

    def alone(self, place: Place) -> bool:
        """Whether the statement at a place has its line for itself."""
        line = self.lines[place.line - 1]
        return place.line == place.end_line and ";" not in line and not line.rstrip().endswith(("\\", ":"))

    def indent(self, line: int) -> str:
        """The white space before a line."""
        text = self.lines[line - 1]
        return text[: len(text) - len(text.lstrip())]

    def insert_before(self, line: int, text: str) -> list[Edit]:
        """A new line before a line, with its indentation."""
        return [Edit(line, 0, line, 0, f"{self.indent(line)}{text}\n")]

    def insert_after(self, line: int, text: str) -> list[Edit]:
        """A new line after a line, with its indentation."""
        end = len(self.lines[line - 1])
        return [Edit(line, end, line, end, f"\n{self.indent(line)}{text}")]


def _unscale_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    scaler, optimizer = request.text.split("|")
    if not editor.alone(request.place):
        return None
    prefix = _prefix(editor, scaler), _prefix(editor, optimizer)
    if None in prefix:
        return None
    return editor.insert_before(request.place.line, f"{prefix[0]}.unscale_({prefix[1]})")


def _prefix(editor: Editor, name: str) -> str | None:
    """How the source writes an object: `name` or `self.name`."""
    own = re.search(rf"\bself\.{re.escape(name)}\b", editor.source)
    plain = re.search(rf"(?<![\w.]){re.escape(name)}\b", editor.source)
    if own and plain:
        return None
    return f"self.{name}" if own else name if plain else None


def _update_after(editor: Editor, request: FixRequest) -> list[Edit] | None:
    match = re.match(r"\s*([\w.]+)\.step\(", editor.lines[request.place.line - 1])
    if match is None or not editor.alone(request.place) or f"{match.group(1)}.update(" in editor.source:
        return None
    return editor.insert_after(request.place.line, f"{match.group(1)}.update()")


def _delete(editor: Editor, request: FixRequest) -> list[Edit] | None:
    line = request.place.line
    if not editor.alone(request.place) or editor.lines[line - 1].strip() != editor.text(request.place):
        return None
    return [Edit(line, 0, line + 1, 0, "")]


def _insert_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    return editor.insert_before(request.place.line, request.text) if editor.alone(request.place) else None


def _insert_after(editor: Editor, request: FixRequest) -> list[Edit] | None:
    return editor.insert_after(request.place.line, request.text) if editor.alone(request.place) else None


def _zero_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    name = _prefix(editor, request.text)
    return editor.insert_before(request.place.line, f"{name}.zero_grad()") if name and editor.alone(request.place) else None


def _scale_loss(editor: Editor, request: FixRequest) -> list[Edit] | None:
    text = editor.text(request.place)
    match = re.fullmatch(r"([\w.]+)\.backward\((.*)\)", text)
    scaler = _prefix(editor, request.text)
    if match is None or scaler is None:
        return None
    new = f"{scaler}.scale({match.group(1)}).backward({match.group(2)})"
    return [_replace(editor, request.place, new)]


def _replace(editor: Editor, place: Place, text: str) -> Edit:
    return Edit(
        place.line,
        editor.column(place.line, place.column),
        place.end_line,
        editor.column(place.end_line, place.end_column),
        text,
    )


def _replace_whole(editor: Editor, request: FixRequest) -> list[Edit] | None:
    return [_replace(editor, request.place, request.text)] if editor.text(request.place) else None


def _wrap_text(editor: Editor, request: FixRequest) -> list[Edit] | None:
    text = editor.text(request.place)
    return [_replace(editor, request.place, request.text.replace("{}", text))] if text else None


def _keyword(editor: Editor, request: FixRequest) -> list[Edit] | None:
    text = editor.text(request.place)
    name = request.text.split("=")[0]
    if not text.endswith(")"):
        return None
    if re.search(rf"\b{name}=", text):
        new = re.sub(rf"\b{name}=[^,()]+(\([^()]*\))?", request.text, text, count=1)
    else:
        comma = "" if text.endswith("(" + ")") else ", "
        new = f"{text[:-1]}{comma}{request.text})"
    return [_replace(editor, request.place, new)]


def _modernise(editor: Editor, request: FixRequest) -> list[Edit] | None:
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
    return [_replace(editor, request.place, f"torch.amp.{name}({inside})")]


def _finfo(editor: Editor, request: FixRequest) -> list[Edit] | None:
    text = editor.text(request.place)
    match = re.fullmatch(r"([\w.]+)\.masked_fill(_?)\((.+), *-\d[\d.e]*\)", text)
    if match is None:
        return None
    subject, mark, mask = match.groups()
    return [_replace(editor, request.place, f"{subject}.masked_fill{mark}({mask}, torch.finfo({subject}.dtype).min)")]


def _dedent_tail(editor: Editor, request: FixRequest) -> list[Edit] | None:
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


def _move_before(editor: Editor, request: FixRequest) -> list[Edit] | None:
    return _move(editor, request, after=False)


def _move_after(editor: Editor, request: FixRequest) -> list[Edit] | None:
    return _move(editor, request, after=True)


def _move(editor: Editor, request: FixRequest, after: bool) -> list[Edit] | None:
    target, place = request.other, request.place
    if target is None or target.path != place.path or not (editor.alone(place) and editor.alone(target)):
        return None
    if editor.lines[place.line - 1].strip() != editor.text(place):
        return None
    if editor.indent(place.line) != editor.indent(target.line) and len(editor.lines) <= place.line:
        return None
    lines = (
        editor.insert_after(target.line, editor.text(place)) if after else editor.insert_before(target.line, editor.text(place))
    )
    return [*lines, Edit(place.line, 0, place.line + 1, 0, "")]


_ACTIONS = {
    "unscale-before": _unscale_before,
    "update-after": _update_after,
    "delete": _delete,
    "insert-before": _insert_before,
    "insert-after": _insert_after,
    "scale-loss": _scale_loss,
    "zero-before": _zero_before,
    "replace": _replace_whole,
    "wrap": _wrap_text,
    "keyword": _keyword,
    "modernise": _modernise,
    "finfo": _finfo,
    "dedent-tail": _dedent_tail,
    "move-before": _move_before,
    "move-after": _move_after,
}
