"""Iterators: what a program takes from something a few at a time, and how far it is."""

from __future__ import annotations

import ast
import contextlib
import re

from halfstep.events.vocabulary import EpochBegin, EpochEnd, Fetch
from halfstep.imagine.state import MICRO_BATCHES, WHOLE_WINDOWS, BreakLoop, State
from halfstep.imagine.values import Items, Stream, Value, items_like

_TRAINS = re.compile(r"\.backward\(|\.step\(")
_ENDLESS = re.compile(r"while (True|1)\b|\bcount\(|cycle\(|repeat\(")


def say_left(state: State, left: int, node: ast.AST, counted: bool) -> None:
    """So many of the values of an iterator are never used; whether only a count of turns says so."""
    state.make("left over", node, left=left, counted=counted)


def say_ends(state: State, node: ast.AST) -> None:
    """What the iterators of a run have left at its end."""
    for cursor in state.memo.get("cursors", []):
        if 0 < cursor.at < len(cursor) and not cursor.endless:
            say_left(state, len(cursor) - cursor.at, node, counted=True)


class Cursor(Items):
    """An iterator over items."""

    at: int = 0

    def take(self, count: int) -> list[Value]:
        """The next values, fewer at the end; asked again after it, it begins anew, since its length may be a guess."""
        if self.endless and self.at + count > len(self):
            self.at = 0
        got = list(self)[self.at : self.at + count]
        self.at = self.at + len(got) if got else 0
        return got

    def rest(self) -> Items:
        """All values that are left."""
        return items_like(self.take(len(self)) if not self.endless else list(self), self)


def cursor_over(state: State, source: Items) -> Cursor:
    """An iterator at the beginning of items."""
    made = Cursor(source)
    state.memo.setdefault("cursors", []).append(made)
    made.loader, made.over, made.tags, made.endless, made.beside = (
        source.loader,
        source.over,
        source.tags,
        source.endless,
        source.beside,
    )
    return made


def collected(state: State, stream: Stream, whole: bool = False) -> Cursor:
    """The values of a generator; of one that trains only the first, again and again, unless it is run to its end at once."""
    if isinstance(stream.cursor, Cursor):
        return stream.cursor
    made = stream.cursor = cursor_over(state, Items())
    text, before = ast.unparse(stream.function.node), len(state.drafts)
    most = 1 if _TRAINS.search(text) and not whole else 2 * WHOLE_WINDOWS + 1

    def take(value: Value) -> Value:
        made.append(value)
        if len(made) >= most:
            raise BreakLoop
        return None

    with contextlib.suppress(BreakLoop):
        state.resume(stream, take)
    made.endless = len(made) >= most or (len(made) >= 2 * MICRO_BATCHES and _ENDLESS.search(text) is not None)
    said = state.drafts[before:]
    passes = [draft.fields["loader"] for draft in said if draft.kind is EpochBegin]
    if len(passes) == 1 and not made.endless:
        made.loader, made.over = passes[0], "loader"
        state.drafts[before:] = [draft for draft in said if draft.kind not in (EpochBegin, EpochEnd, Fetch)]
    if most == 1:
        made *= 2 * state.micro_batches
    return made
