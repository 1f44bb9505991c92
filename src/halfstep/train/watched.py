"""`watch = true`: a run heard while it goes, and judged when it ends, however it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.engine import Engine
from halfstep.record.library import watch
from halfstep.report.html import Watched, watched_page
from halfstep.report.json import to_json
from halfstep.train.disk import write_text

PAGE, FINDINGS = "watch.html", "watch.json"


@contextmanager
def watched(engine: Engine, folder: Path | None) -> Iterator[None]:
    """Hear what happens below this on this rank, and leave the findings and a page in the run's folder.

    Args:
        engine: what is trained.
        folder: where the run is kept; None on ranks that write nothing.
    """
    heard = watch(engine.model, *engine.optimizers, evidence=None if folder is None else folder / "evidence")
    try:
        with heard:
            yield
    finally:
        if folder is not None:
            page = Watched(title=f"{folder}, rank 0", findings=heard.findings, parts={0: heard.parts})
            write_text(folder / PAGE, watched_page(page))
            write_text(folder / FINDINGS, to_json(heard.findings) + "\n")
