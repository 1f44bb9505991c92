"""`with halfstep.watch(model, optimizer): ...`: a part of a program under watch, from inside it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from halfstep.errors import UsageError
from halfstep.findings.finding import Finding
from halfstep.record.hooks.models import model_known
from halfstep.record.probing import Asked
from halfstep.record.running import in_words
from halfstep.record.session import Session
from halfstep.record.verdict import Verdict, reach
from halfstep.report.parts import AnyPart
from halfstep.report.text import to_text
from halfstep.rules.settings import nearest


class watch:  # noqa: N801  # used like a function
    """Hears the training inside a `with` block, and judges it when the block ends.

    Example::

        with halfstep.watch(model, optimizer) as watched:
            train(model, optimizer)
        print(watched.report())

    The block runs bitwise as it would without; an error in it is passed on after it was judged.

    Args:
        objects: the models, optimizers and loss scalers that were made before the block; those made inside it are met there.
        evidence: folder for batches whose numbers are not finite; None to save none.

    Raises:
        UsageError: An object is none of these.
    """

    def __init__(self, *objects: Any, evidence: str | Path | None = None) -> None:
        kinds = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
        for thing in objects:
            if not isinstance(thing, kinds):
                told = f"`halfstep.watch` was given a {type(thing).__name__}"
                raise UsageError(f"{told}; it takes models, optimizers and GradScalers, and hears loaders and schedulers itself.")
        self._objects = objects
        self._session = Session(asked=Asked(evidence=Path(evidence) if evidence is not None else None))
        self._verdict = Verdict()

    def __enter__(self) -> watch:
        """Put the hooks in."""
        recorder = self._session.recorder
        here = recorder.here(depth=2)
        for thing in self._objects:
            if isinstance(thing, nn.Module):
                model_known(recorder, thing, here)
            elif isinstance(thing, torch.optim.Optimizer):
                recorder.optimizer(thing, here)
            else:
                recorder.objects.known(thing, "scaler", here.place)
        self._session.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take the hooks out, and judge."""
        self._session.stop()
        heard = self._session.heard(in_words(error) if error is not None else "")
        self._verdict = reach([heard], nearest(Path.cwd()))

    @property
    def findings(self) -> list[Finding]:
        """What is wrong, the gravest first; empty until the block has ended."""
        return self._verdict.findings

    @property
    def parts(self) -> list[AnyPart]:
        """What was measured."""
        return [part for heard in self._verdict.heard for part in heard.measured.get("parts", ())]

    def report(self) -> str:
        """The findings as text, with their lines."""
        return to_text(self.findings, self._verdict.sources) or "No findings."
