"""The conversion: one pass after the other, each on the text that the one before left, each judged before it is kept."""

from __future__ import annotations

from collections.abc import Callable

from halfstep.imagine.converting.accumulating import accumulate
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
    result = Conversion(text)
    try:
        program = Program(text, path)
        refuse(program)
    except NotSure as reason:
        result.left.append(str(reason))
        return result
    for name, change in _passes(wish):
        _run(result, path, name, change, judge)
    return result


def _passes(wish: Wish) -> list[tuple[str, Pass]]:
    passes: list[tuple[str, Pass]] = []
    if wish.accumulate > 1:
        passes.append(("accumulation", lambda program: accumulate(program, wish.accumulate)))
    if wish.precision != "fp32":
        passes.append(("precision", lambda program: add_precision(program, wish.precision)))
    return passes


def _run(result: Conversion, path: str, name: str, change: Pass, judge: Judge) -> None:
    try:
        text, done = change(Program(result.text, path))
    except NotSure as reason:
        result.left.append(f"{name}: {reason}")
        return
    if parse(text) is None:
        result.left.append(f"{name}: the edited text would not be Python")
        return
    faults = judge(text) - judge(result.text)
    if faults:
        result.left.append(f"{name}: it would bring a fault: {min(faults)}")
        return
    result.text = text
    result.done += done
