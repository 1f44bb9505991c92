"""The conversion: one pass after the other, each on the text that the one before left, each judged before it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from halfstep.imagine.converting.accumulating import accumulate
from halfstep.imagine.converting.distributing import distribute
from halfstep.imagine.converting.engine_loop import use_updates
from halfstep.imagine.converting.engine_windows import use_windows
from halfstep.imagine.converting.outcome import Conversion, NotSure, Wish
from halfstep.imagine.converting.precision import add_precision
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.refusals import refuse
from halfstep.imagine.project import parse

Judge = Callable[[str], frozenset[str]]
"""What is wrong with a text, each fault in words without its line."""
Pass = Callable[[Program], tuple[str, list[str]]]
"""A new text and what was done; raises `NotSure`."""


def convert(text: str, path: str, wish: Wish, judge: Judge) -> Conversion:
    """Convert the loop of one file as far as it is understood; what is not understood stays as it was.

    A pass whose result has a fault that the text before it had not is taken back.
    """
    work = _Work(path, judge, Conversion(text))
    try:
        refuse(work.program())
    except NotSure as reason:
        work.result.left.append(str(reason))
        return work.result
    for name, change in _engine_passes(work.program(), wish) if wish.engine else _passes(wish):
        work.run(name, change)
    return work.result


def _engine_passes(program: Program, wish: Wish) -> list[tuple[str, Pass]]:
    """A loop over the engine's updates where its statements allow that; else windows in it, which may accumulate by then."""
    try:
        done = use_updates(program, wish)
    except NotSure:
        accumulation = [_accumulation(wish)] if wish.accumulate > 1 else []
        return [*accumulation, ("engine", lambda changed: use_windows(changed, wish.precision))]
    return [("engine", lambda _: done)]


def _accumulation(wish: Wish) -> tuple[str, Pass]:
    return "accumulation", lambda program: accumulate(program, wish.accumulate)


def _passes(wish: Wish) -> list[tuple[str, Pass]]:
    passes: list[tuple[str, Pass]] = []
    if wish.ddp:
        passes.append(("ranks", distribute))
    if wish.accumulate > 1:
        passes.append(_accumulation(wish))
    if wish.precision != "fp32":
        passes.append(("precision", lambda program: add_precision(program, wish.precision)))
    return passes


@dataclass(slots=True)
class _Work:
    """The text so far, imagined and judged once."""

    path: str
    judge: Judge
    result: Conversion
    _program: tuple[str, Program] | None = None
    _faults: tuple[str, frozenset[str]] | None = None

    def program(self) -> Program:
        """The text so far as a program."""
        text = self.result.text
        if self._program is None or self._program[0] != text:
            self._program = (text, Program(text, self.path))
        return self._program[1]

    def faults(self) -> frozenset[str]:
        """What is wrong with the text so far."""
        text = self.result.text
        if self._faults is None or self._faults[0] != text:
            self._faults = (text, self.judge(text))
        return self._faults[1]

    def run(self, name: str, change: Pass) -> None:
        """Keep the result of a pass if it is sure and brings no fault, else say why not."""
        try:
            text, done = change(self.program())
        except NotSure as reason:
            self.result.left.append(f"{name}: {reason}")
            return
        faults = self.judge(text) if parse(text) is not None else frozenset({"the edited text is not Python"})
        new = faults - self.faults()
        if new:
            self.result.left.append(f"{name}: it would bring a fault: {min(new)}")
            return
        self.result.text, self._faults = text, (text, faults)
        self.result.done += done
