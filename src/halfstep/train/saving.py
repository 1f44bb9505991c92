"""Saves a run while it goes, and puts it back."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halfstep.checkpoint import Checkpoints
from halfstep.config.run import CheckpointRun
from halfstep.engine import Engine
from halfstep.errors import CheckpointError
from halfstep.train.book import Book
from halfstep.train.early_stop import EarlyStop
from halfstep.train.judge import Judge
from halfstep.train.own import OwnSamples
from halfstep.train.record import EvaluationRecord
from halfstep.train.samples import Samples

LOOKED_AT = 64
"""Samples that must be the same when a run goes on: as many as are read in no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """From where a run goes on: the checkpoint after `update`, or the newest where that is `None`."""

    update: int | None


@dataclass(slots=True, kw_only=True)
class Saver:
    """Saves the state of engine, book, judge and patience together, and puts it back.

    Attributes:
        checkpoints: where to.
        settings: how often.
        engine: what is trained.
        book: what is counted.
        judge: looks at the held-out data.
        early: patience; `None` where the limits alone end the run.
        data: what is trained on, by `told_by`.
        clock: seconds, ever growing.
    """

    checkpoints: Checkpoints
    settings: CheckpointRun
    engine: Engine
    book: Book
    judge: Judge
    early: EarlyStop | None
    data: dict[str, int]
    clock: Callable[[], float] = time.monotonic
    _last: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether so many minutes have passed since the last save; each rank has its own clock."""
        if self._last is None:
            self._last = self.clock()
        return self.settings.every_minutes > 0 and self.clock() - self._last >= 60 * self.settings.every_minutes

    def is_due(self, update: int) -> bool:
        """Whether the run is to be saved after this update."""
        return self.settings.every_updates > 0 and update % self.settings.every_updates == 0

    def save(self) -> None:
        """Save the run; every rank must call it.

        Raises:
            UsageError: the checkpoint before could not be written.
        """
        with self.book.pause():
            looks = None if self.early is None else self.early.looks_since
            best = None if self.early is None or self.early.best is None else asdict(self.early.best)
            early = {"best": best, "looks_since": looks}
            extra = {"book": self.book.state(), "judge": self.judge.state(), "early": early, "data": self.data}
            self.checkpoints.save(self.engine, extra)
        self._last = self.clock()

    def resume(self, update: int | None) -> int:
        """Go on from a checkpoint, the newest or that after an update; every rank must call it.

        Returns:
            Updates that were made before it; 0 where none has been saved yet.

        Raises:
            CheckpointError: it is damaged, or of a run on other data.
        """
        restored = self.checkpoints.load(self.engine, update)
        if restored is None:
            return 0
        extra: dict[str, Any] = restored.extra
        _check_data(restored.folder, extra["data"], self.data)
        self.book.resume(extra["book"])
        self.judge.resume(extra["judge"])
        early = extra["early"]
        if self.early is not None and early["looks_since"] is not None:
            best = None if early["best"] is None else EvaluationRecord(**early["best"])
            self.early.resume(best, early["looks_since"])
        return restored.update


def told_by(samples: Samples) -> dict[str, int]:
    """By what data are known again: how many samples and tokens, and a checksum of some of them.

    Of the user's own data only how many: nobody knows whether they are the same when they are looked at twice.
    """
    if isinstance(samples, OwnSamples):
        return {"samples": len(samples), "tokens": 0, "crc32": 0}
    indices = np.unique(np.linspace(0, len(samples) - 1, LOOKED_AT).astype(int)).tolist()
    crc32 = 0
    for index in indices:
        for tensor in samples.__getitems__([index]).values():
            crc32 = zlib.crc32(tensor.numpy().tobytes(), crc32)
    return {"samples": len(samples), "tokens": getattr(samples, "num_predicted", 0), "crc32": crc32}


def _check_data(folder: Path, then: dict[str, int], now: dict[str, int]) -> None:
    if then["samples"] != now["samples"] or then["tokens"] != now["tokens"]:
        raise CheckpointError(
            f"{folder} was trained on {then['samples']:,} samples of {then['tokens']:,} tokens, and the data are now "
            f"{now['samples']:,} samples of {now['tokens']:,} tokens. A run goes on with the data that it began with."
        )
    if then != now:
        raise CheckpointError(
            f"{folder} was trained on other samples than the data hold now, though as many. A run goes on with the data that it "
            "began with."
        )
