"""How the processes of a run are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from halfstep.train.launch import SLEEP_SOON, let_waiting_threads_sleep

CODE = """
import json, os, sys
from halfstep.train.launch import let_waiting_threads_sleep
first, second = let_waiting_threads_sleep(), let_waiting_threads_sleep()
names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
print(json.dumps([first.value, second.value, {name: os.environ.get(name) for name in names}, "torch" in sys.modules]))
"""


def apart(**environment: str) -> list[object]:
    kept = {key: value for key, value in os.environ.items() if key not in SLEEP_SOON}
    done = subprocess.run([sys.executable, "-c", CODE], env={**kept, **environment}, capture_output=True, check=True)
    said: list[object] = json.loads(done.stdout)
    return said


def test_threads_sleep_soon_unless_the_user_decided() -> None:
    assert apart() == ["sleeping soon", "sleeping soon", SLEEP_SOON, False]
    theirs = "as the environment says"
    assert apart(OMP_WAIT_POLICY="active")[:3] == [theirs, theirs, {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": None}]


def test_nothing_changes_once_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SLEEP_SOON:
        monkeypatch.delenv(name, raising=False)
    assert let_waiting_threads_sleep().value == "spinning"
    assert not any(name in os.environ for name in SLEEP_SOON)
