"""Other processes that a certificate needs: ranks, and runs that are killed and go on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
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


def run_alone(task: Task) -> tuple[int, str]:
    """Do a task in a process of its own; its exit code, negative where a signal ended it, and its last words."""
    return ended([sys.executable, "-m", "halfstep.certify", str(task.write())])


def run_ranks(task: Task, ranks: int) -> str | None:
    """Do a task on several ranks of this machine, under torchrun; why it failed, None where it did not."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launcher, "-m", "halfstep.certify", str(task.write())]
    code, words = ended(command)
    return words if code else None


def ended(command: Sequence[str], limit_s: float = LIMIT_S) -> tuple[int, str]:
    """The exit code of a command, and the last error that it told, or else its last line."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.communicate(timeout=limit_s)[1]
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks before itself
            process.communicate()
            return process.returncode, f"it had not ended after {limit_s:g} s"
    lines = [line.strip() for line in said.splitlines() if line.strip() and "ChildFailed" not in line]
    errors = [line for line in lines if "Error: " in line]
    return process.returncode, (errors or lines or ["it said nothing"])[-1]
