"""Scripts that are run under watch, and what is heard of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from halfstep.events.vocabulary import Event
from halfstep.findings.finding import Finding
from halfstep.record.running import Ending
from halfstep.record.telling import Heard
from halfstep.record.verdict import Verdict, reach
from halfstep.record.watching import watch
from halfstep.rules.settings import Settings


@dataclass
class Watched:
    """A script that was watched to its end."""

    ending: Ending
    heard: list[Heard]
    verdict: Verdict

    @property
    def events(self) -> tuple[Event, ...]:
        return self.heard[0].stretches[0]

    def findings(self, *severities: str) -> list[Finding]:
        return [f for f in self.verdict.findings if not severities or f.severity.value in severities]

    def rules(self) -> set[str]:
        return {f.rule for f in self.findings("error", "warning")}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Watched]:
    """Watch a script to its end."""

    def watched(text: str, *args: str) -> Watched:
        path = tmp_path / "train.py"
        path.write_text(text)
        kept: list[Watched] = []

        def report(ending: Ending, heard: list[Heard]) -> int:
            kept.append(Watched(ending, heard, reach(heard, Settings())))
            return ending.code

        watch(str(path), list(args), module=False, report=report)
        return kept[0]

    return watched
