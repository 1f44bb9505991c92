"""A folder of checkpoints: saved while training goes on, the last ones kept, read with care.

::

    FOLDER/
    ├── lock                        held by the run that saves here
    ├── update-00000100/            after 100 updates
    │   ├── manifest.json           files with checksums, and where each tensor lies
    │   └── rank-00000.safetensors  what rank 0 wrote
    └── update-00000150.partial/    being written, or left by a run that was killed: never read
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from torch import nn

from halfstep.checkpoint import state
from halfstep.checkpoint.disk import writing
from halfstep.checkpoint.lock import lock
from halfstep.checkpoint.manifest import Manifest, check_files, read_manifest
from halfstep.checkpoint.storage import PARTIAL, Buffers, Staged, Writer, save, set_aside
from halfstep.distributed import Group
from halfstep.engine import Engine
from halfstep.errors import CheckpointError, ConfigError, HalfstepError

PREFIX = "update-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A checkpoint that a run goes on from.

    Attributes:
        update: updates that were made before it, applied or not.
        ranks: ranks that made it.
        extra: what was given to `save`.
        folder: where it is.
    """

    update: int
    ranks: int
    extra: Any
    folder: Path


class Checkpoints:
    """Saves the whole state of a run, so that it can go on as if it had never stopped.

    Nothing is ever unpickled. A checkpoint is written beside its place by a thread of its own, put on the disk, and then renamed:
    what is there is whole, whenever the process is killed. Every rank makes one of these and calls it alike.

    Args:
        folder: where they are; all ranks must reach it.
        keep: how many of the last ones are kept.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"`keep = {keep}` keeps no checkpoint: it must be at least 1.")
        self.folder, self._keep = Path(folder), keep
        self._lock: IO[str] | None = None
        self._group: Any = None
        self._is_open = False
        self._buffers: Buffers = {}
        self._writing: _Writing | None = None

    @property
    def updates(self) -> list[int]:
        """The updates after which there is a checkpoint, the oldest first."""
        names = [path.name.removeprefix(PREFIX) for path in self.folder.glob(f"{PREFIX}*")]
        return sorted(int(name) for name in names if name.isdigit())

    def save(self, engine: Engine, extra: Any = None, *, wait: bool = False) -> Path:
        """Save after an update; training may go on when this returns, with the state copied and its writing begun.

        Every rank calls it. It waits for the checkpoint before, if that is still being written.

        Args:
            engine: what is trained.
            extra: what else the caller wants back: numbers, text, lists, tables, small tensors.
            wait: return when the checkpoint is on the disk.

        Returns:
            Where it will be.

        Raises:
            UsageError: the checkpoint before could not be written, or this one where it was waited for.
            ModelError: something has a state that a checkpoint cannot keep.
        """
        self.open(engine.group)
        self.wait()
        engine.settle()
        staged = Staged(state.tensors_of(engine, extra), self._buffers)
        update, group = len(engine.ledger), engine.group
        folder = self._path(update)
        writer = Writer(folder, rank=group.rank, ranks=group.size, update=update)
        self._writing = _Writing(lambda: self._write(staged, writer, folder, group))
        if wait:
            self.wait()
        return folder

    def load(self, engine: Engine, update: int | None = None) -> Restored | None:
        """Put the state of a checkpoint into an engine that has not trained yet; its next `updates` goes on from there.

        Every rank calls it, also if there are more or fewer than wrote it.

        Args:
            engine: made as that which was saved, of the same model and optimizers.
            update: the update after which it was saved. None for the newest. Those after an earlier one are put aside.

        Returns:
            What was loaded; None where there is no checkpoint yet.

        Raises:
            CheckpointError: it is damaged, foreign or of another model; the message names it, and the one before.
            ConfigError: the engine was asked for another precision.
            UsageError: another run is using the folder.
        """
        self.open(engine.group)
        chosen = _on_first(engine.group, lambda: self._choose(update))
        if chosen is None:
            return None
        folder = self._path(chosen)
        manifest = read_manifest(folder)
        extra = state.restore(engine, folder, manifest)
        engine.group.barrier()
        if engine.group.rank == 0:
            self._leave_later(chosen)
        return Restored(update=manifest.update, ranks=manifest.ranks, extra=extra, folder=folder)

    def load_weights(self, module: nn.Module, update: int | None = None, *, averaged: bool = False) -> Path:
        """Put the weights alone of a checkpoint into a model, in one process, whatever number of ranks saved it.

        The folder may be in use by the run that saves there.

        Args:
            module: the model, or with `averaged` its `AveragedModel`.
            update: the update after which it was saved. None for the newest.
            averaged: whether the averaged weights are wanted.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: there is none, or it is damaged or of another model.
        """
        chosen = self._choose(update)
        if chosen is None:
            raise CheckpointError(f"{self.folder} holds no checkpoint.")
        folder = self._path(chosen)
        state.restore_module(module, folder, read_manifest(folder), averaged=averaged)
        return folder

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            UsageError: it could not be written.
        """
        writing_now, self._writing = self._writing, None
        if writing_now is not None:
            writing_now.result()

    def close(self) -> None:
        """Wait for the last checkpoint, and let go of the folder."""
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.close()
            self._lock, self._is_open = None, False

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _path(self, update: int) -> Path:
        return self.folder / f"{PREFIX}{update:08d}"

    def open(self, group: Group) -> None:
        """Take the folder, and remove what a killed run has left half done; `save` and `load` do it where nobody has.

        Every rank calls it.

        Raises:
            UsageError: another run is using the folder.
        """
        if self._is_open:
            return
        _on_first(group, self._take)
        self._group = group.another()
        self._is_open = True

    def _take(self) -> None:
        self._lock = lock(self.folder)
        for path in [*self.folder.glob(f"{PREFIX}*{PARTIAL}"), *self.folder.glob(f"{PREFIX}*.old")]:
            shutil.rmtree(path, ignore_errors=True)

    def _write(self, staged: Staged, writer: Writer, folder: Path, group: Group) -> None:
        try:
            save(staged, writer, self._group)
        except BaseException:
            shutil.rmtree(folder.with_name(folder.name + PARTIAL), ignore_errors=True)
            raise
        if group.rank == 0:
            with writing(folder):
                for update in self.updates[: -self._keep]:
                    set_aside(self._path(update))

    def _choose(self, asked: int | None) -> int | None:
        """The checkpoint that is loaded, whole; its number."""
        found = self.updates
        if asked is not None and asked not in found:
            there = ", ".join(map(str, found)) or "none"
            raise CheckpointError(f"{self.folder} holds no checkpoint after update {asked}. There are: {there}.")
        if not found:
            return None
        chosen = found[-1] if asked is None else asked
        try:
            manifest = _whole(self._path(chosen))
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._before(chosen)}") from None
        if manifest.update != chosen:
            raise CheckpointError(f"{self._path(chosen)} is a checkpoint after update {manifest.update}: it was renamed.")
        return chosen

    def _before(self, damaged: int) -> str:
        """The whole checkpoint before a damaged one, in words."""
        for update in reversed([update for update in self.updates if update < damaged]):
            try:
                _whole(self._path(update))
            except CheckpointError:
                continue
            return f"The one before it, after update {update}, is whole: ask for it (`update={update}`, or `--from {update}`)."
        return "There is no whole one before it."

    def _leave_later(self, chosen: int) -> None:
        """Put aside what came after the checkpoint that the run goes on from: the run will make others."""
        with writing(self.folder):
            for update in self.updates:
                if update > chosen:
                    aside = self.folder / f"left-{self._path(update).name}"
                    shutil.rmtree(aside, ignore_errors=True)
                    os.replace(self._path(update), aside)


class _Writing:
    """A checkpoint on its way to the disk, in a thread of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="halfstep checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # whatever it is, it is raised where somebody waits for the checkpoint
            self._error = error

    def result(self) -> None:
        """Wait for the end, and raise what went wrong."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _whole(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


def _on_first(group: Group, work: Callable[[], Any]) -> Any:
    """What rank 0 finds, on every rank; its error too."""
    answer: tuple[Any, HalfstepError | None] = (None, None)
    if group.rank == 0:
        try:
            answer = work(), None
        except HalfstepError as error:
            answer = None, error
    found, failed = group.from_first(answer)
    if failed is not None:
        raise failed
    return found
