"""`try` and `raise` in the imagined run."""

from __future__ import annotations

import ast
import re

from halfstep.imagine.definitions import Definitions
from halfstep.imagine.project import skipping
from halfstep.imagine.state import Raised, Stopped
from halfstep.imagine.values import Class, Unknown, settled


class Attempts(Definitions):
    """Runs what may raise."""

    def attempt(self, node: ast.Try) -> None:
        """`try`: handlers run for what the program raises itself, and once where one of them skips a backward pass."""
        skips = skipping(node) or self._own_skip(node) if self.loops else None
        try:
            if skips is not None and self.on_data("an exception", False, skips, False):
                self.scope.names[skips.name or "\0caught"] = Unknown("caught", frozenset({"caught"}))
                self.run(skips.body)
                return
            waits = sum(map(_catches_stop, node.handlers))
            self.catching += waits
            try:
                self.run(node.body)
            finally:
                self.catching -= waits
            self.run(node.orelse)
        except Raised as raised:
            fitting = [h for h in node.handlers if not isinstance(raised, Stopped) or _catches_stop(h)]
            if not fitting:
                raise
            self.run(fitting[0].body)
        finally:
            self.run(node.finalbody)

    def _own_skip(self, node: ast.Try) -> ast.ExceptHandler | None:
        """The handler of an exception of the program's own that goes on with the next turn."""
        leaving = [h for h in node.handlers if h.type is not None and isinstance(h.body[-1], ast.Continue)]
        return next((h for h in leaving if h.type is not None and isinstance(settled(self.eval(h.type)), Class)), None)

    def throw(self, node: ast.Raise) -> None:
        """`raise`."""
        raise Raised


def _catches_stop(handler: ast.ExceptHandler) -> bool:
    """Whether a handler is one for the end of an iterator."""
    return handler.type is None or re.search(r"StopIteration|\bException", ast.unparse(handler.type)) is not None
