"""One recording: hooks in, the script runs, hooks out."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfstep.record.hooks import backward, data, models, optimizing, ranks
from halfstep.record.patches import Patches
from halfstep.record.probing import Asked, Probing
from halfstep.record.ranks import Meter
from halfstep.record.recorder import Recorder
from halfstep.record.telling import Heard, tell


@dataclass
class Session:
    """Hears everything between `start` and `stop`."""

    recorder: Recorder = field(default_factory=Recorder)
    patches: Patches = field(default_factory=Patches)
    asked: Asked = field(default_factory=Asked)

    def __post_init__(self) -> None:
        self.meter, self.probing = Meter(self.recorder), Probing(self.recorder, self.asked)
        self.recorder.listeners = [self.meter, self.probing]

    def start(self) -> None:
        """Put the hooks in."""
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
        rec, meter = self.recorder, self.meter
        files, measured = frozenset(rec.places.files), self.probing.told()
        return Heard(
            rank=meter.rank,
            size=meter.size,
            stretches=tell(rec),
            files=files,
            updates=rec.updates,
            ending=ending,
            measured=measured,
            shared=meter.shared,
            samples=tuple(self.probing.samples.coverages),
            fault=rec.fault,
            unheard=tuple(rec.unheard.values()),
        )
