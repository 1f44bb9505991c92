"""Whole processes from beginning to end, as torchrun starts them: on two nodes, on one, and with a group of the script's own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed.ranks import environment

SCRIPT = Path(__file__).with_name("script.py")
TIMEOUT_S = 240.0
NOISE = ("terminate called", "Traceback", "Warning", "Exception ignored")

pytestmark = pytest.mark.slow


def start(*words: str, **given: str) -> subprocess.Popen[str]:
    """A Python process in which every warning is an error."""
    variables = {key: value for key, value in os.environ.items() if key not in environment(0, 1, 0)}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", **given}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([sys.executable, *words], env=variables, text=True, **pipes)


def end(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """How they ended, and what they said."""
    try:
        said = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, words) for process, words in zip(processes, said, strict=True)]


def torchrun(*words: str) -> subprocess.Popen[str]:
    # torchrun itself warns in some versions; what it starts is told to take warnings for errors by the script's options
    return start("-W", "ignore", "-m", "torch.distributed.run", *words, PYTHONWARNINGS="")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def ended_well(processes: list[subprocess.Popen[str]]) -> None:
    for code, words in end(processes):
        assert code == 0, words
        assert not any(noise in words for noise in NOISE), words


def found(folder: Path, rank: int, size: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"rank-{rank}-of-{size}.json").read_text()))


def assert_two_ranks_did_what_one_process_does(folder: Path, alone: dict[str, Any]) -> None:
    first, second = found(folder, 0, 2), found(folder, 1, 2)
    assert first["digest"] == second["digest"]
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert first["weights"] == pytest.approx(alone["weights"], rel=1e-5, abs=1e-6)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process does."""
    folder = tmp_path_factory.mktemp("alone")
    ended_well([start(str(SCRIPT), str(folder), "plain")])
    return found(folder, 0, 1)


def test_torchrun_on_two_nodes(tmp_path: Path, alone: dict[str, Any]) -> None:
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two-nodes"]
    words = ["--nnodes", "2", "--nproc-per-node", "1", *meeting, "--local-addr", "127.0.0.1", str(SCRIPT), str(tmp_path), "plain"]
    ended_well([torchrun(*words), torchrun(*words)])
    assert_two_ranks_did_what_one_process_does(tmp_path, alone)
    assert [json.loads((tmp_path / f"threads-of-{rank}.json").read_text()) for rank in range(2)] == [[], []], (
        "the group's threads end before the interpreter"
    )


@pytest.mark.parametrize("mode", ["own group, destroyed", "own group, left"])
def test_a_group_of_the_scripts_own(tmp_path: Path, alone: dict[str, Any], mode: str) -> None:
    port = free_port()
    ended_well([start(str(SCRIPT), str(tmp_path), mode, **environment(rank, 2, port)) for rank in range(2)])
    assert_two_ranks_did_what_one_process_does(tmp_path, alone)


def test_torchrun_ends_when_one_rank_fails(tmp_path: Path) -> None:
    ((code, words),) = end([torchrun("--standalone", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path), "fail")])
    assert code == 1
    assert "ValueError: sample 17 has no label" in words
    assert "terminate called" not in words
