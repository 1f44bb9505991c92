"""Other processes that a certificate needs: ranks, and runs that are killed and go on."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from halfstep.certify.subject import Subject

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What another process is asked to do.

    Attributes:
        part: which part of the certificate.
        subject: what is certified.
        folder: where it leaves what it finds.
    """

    part: str
    subject: Subject
    folder: str

    def write(self) -> Path:
        """Write it down for the other process."""
        path = Path(self.folder) / f"{self.part}.json"
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @staticmethod
    def read(path: Path) -> Task:
        """The task that was written down."""
        data = json.loads(path.read_text(encoding="utf-8"))
        subject = {**data["subject"], "settings": tuple(data["subject"]["settings"])}
        return Task(**{**data, "subject": Subject(**subject)})


def run_alone(task: Task) -> int:
    """Do a task in a process of its own; its exit code, negative where a signal ended it."""
    command = [sys.executable, "-m", "halfstep.certify", str(task.write())]
    return subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False).returncode


def run_ranks(task: Task, ranks: int) -> str | None:
    """Do a task on several ranks of this machine, under torchrun; why it failed, None where it did not."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, "-m", "halfstep.certify", str(task.write())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return None if ended.returncode == 0 else _last_words(ended.stderr)


def _last_words(said: str) -> str:
    """The line of an error among what the launcher says."""
    errors = [line for line in said.splitlines() if "Error:" in line and "ChildFailed" not in line]
    return errors[-1].strip() if errors else "the ranks failed without an error"
