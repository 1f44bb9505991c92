"""One recording: hooks in, the script runs, hooks out."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfstep.record.hooks import backward, data, models, optimizing, ranks
from halfstep.record.patches import Patches
from halfstep.record.probing import Asked, Probing
from halfstep.record.recorder import Listener, Recorder
from halfstep.record.telling import Heard, tell


class _Group(Listener):
    """Remembers which rank this process is."""

    rank: int | None = None
    size: int = 1

    def joined_group(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@dataclass
class Session:
    """Hears everything between `start` and `stop`."""

    recorder: Recorder = field(default_factory=Recorder)
    patches: Patches = field(default_factory=Patches)
    group: _Group = field(default_factory=_Group)
    asked: Asked = field(default_factory=Asked)

    def __post_init__(self) -> None:
        self.probing = Probing(self.recorder, self.asked)

    def start(self) -> None:
        """Put the hooks in."""
        self.recorder.listeners += [self.group, self.probing]
        for hooks in (models, optimizing, backward, data, ranks):
            hooks.install(self.patches, self.recorder)
        self.probing.install(self.patches)

    def stop(self) -> None:
        """Take every hook out."""
        self.recorder.on = False
        self.probing.stop()
        self.patches.undo()

    def heard(self, ending: str = "") -> Heard:
        """What this process heard until now."""
        rec, group = self.recorder, self.group
        files, measured = frozenset(rec.places.files), self.probing.told()
        return Heard(group.rank, group.size, tell(rec), files, rec.updates, ending, measured)
