"""The certificate of one model, from its parts to its lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from halfstep.certify.certificate import Certificate, Line
from halfstep.certify.exact import exact
from halfstep.certify.precisions import precision_lines
from halfstep.certify.ranks import rank_lines
from halfstep.certify.resume import resume_lines
from halfstep.certify.skips import skip_lines
from halfstep.certify.splits import split_lines
from halfstep.certify.stillness import still
from halfstep.certify.subject import Parts, Subject
from halfstep.measure.hardware import describe


def certify(subject: Subject, *, told: Callable[[Line], None] = lambda line: None) -> Certificate:
    """Ask every claim of the subject's own model, loss and data.

    Args:
        subject: what to certify.
        told: hears each line as it is known.

    Raises:
        UsageError: the subject cannot be made or trained.
    """
    started = time.perf_counter()
    parts = subject.make()
    stilled, notes = still(parts)
    lines = []
    with TemporaryDirectory(prefix="halfstep-certify-") as folder:
        for line in _lines(subject, parts, stilled, Path(folder)):
            lines.append(line)
            told(line)
    machine = describe(next(parts.model.parameters()).device)
    return Certificate(
        subject=str(subject),
        machine=f"{machine.name} ({machine.backend}), {machine.cores} cores",
        lines=lines,
        notes=notes,
        seconds=time.perf_counter() - started,
    )


def _lines(subject: Subject, parts: Parts, stilled: Parts, folder: Path) -> Iterator[Line]:
    right = exact(stilled, stilled.batches)
    right.must_say_something()
    yield from split_lines(stilled, right)
    yield from skip_lines(stilled, right)
    yield from precision_lines(stilled)
    yield from rank_lines(subject, stilled, right, folder)
    yield from resume_lines(subject, parts, stilled, right, folder)
