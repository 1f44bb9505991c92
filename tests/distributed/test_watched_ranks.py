"""Ranks under watch: started by the script, or by torchrun; joined, compared, and reported by one of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRAIN = """\
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def train(rank, world, fault):
    if world is not None:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(nn.Linear(4, 1))
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if fault == "drift" and rank == 1:
        with torch.no_grad():
            model.module.weight.add_(0.5)
    if fault == "same":
        torch.manual_seed(5)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).pow(2).mean().backward()
        optimizer.step()
    if fault == "ended" and rank == 1:
        import signal
        import time
        os.kill(os.getppid(), signal.SIGTERM)
        while True:
            time.sleep(0.01)
    if fault == "raise" and rank == 1:
        raise ValueError("rank 1 has no more")
    dist.barrier()
    dist.destroy_process_group()
"""
STARTS = (
    TRAIN
    + """

if __name__ == "__main__":
    import socket
    import torch.multiprocessing as mp
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(s.getsockname()[1])
    mp.start_processes(train, args=(2, sys.argv[2]), nprocs=2, start_method=sys.argv[1])
"""
)
LAUNCHED = TRAIN + "\n\ntrain(None, None, sys.argv[1])\n"
WATCH = ("-m", "halfstep", "watch", "--format", "json")


def watched(folder: Path, text: str, *args: str, launched: bool = False, info: bool = False) -> tuple[int, list[dict[str, Any]]]:
    script = folder / "train.py"
    script.write_text(text)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if launched else ()
    done = subprocess.run(
        [sys.executable, *launcher, *WATCH, str(script), *args],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
    )
    assert done.stdout, done.stderr[-2000:]
    findings = json.loads(done.stdout)["findings"]
    return done.returncode, [f for f in findings if info or f["severity"] in ("error", "warning")]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_replicas_that_differ_are_named_with_their_first_parameter(tmp_path: Path, method: str) -> None:
    code, findings = watched(tmp_path, STARTS, method, "drift")
    assert (code, [f["rule"] for f in findings]) == (1, ["ddp-replicas-differ"])
    assert findings[0]["message"] == "after update 1 rank 0 and rank 1 differ in 1 of 2 parameters, first in `weight`"


def test_the_same_samples_on_two_ranks_are_found_without_a_loader(tmp_path: Path) -> None:
    _, findings = watched(tmp_path, STARTS, "fork", "same", info=True)
    messages = {f["rule"]: f["message"] for f in findings}
    assert messages["ddp-no-sampler"] == "rank 0 and rank 1 got the same samples in each of the first 3 forward passes"


def test_right_ranks_under_torchrun_have_no_fault_and_one_report(tmp_path: Path) -> None:
    assert watched(tmp_path, LAUNCHED, "none", launched=True) == (0, [])


def test_the_page_of_ranks_sets_them_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STARTS)
    page = tmp_path / "report.html"
    command = [sys.executable, "-m", "halfstep", "watch", "--html", str(page), str(tmp_path / "train.py"), "fork", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert "\nhalfstep watch: 3 updates heard on each of 2 ranks. No findings" in done.stdout
    assert "came to its end" in page.read_text()


def test_a_rank_that_raises_under_torchrun_still_gives_a_report(tmp_path: Path) -> None:
    code, _ = watched(tmp_path, LAUNCHED, "raise", launched=True)
    assert code == 1


def test_a_launch_that_is_ended_by_sigterm_gives_a_report_also_where_a_rank_waits_for_another(tmp_path: Path) -> None:
    """Rank 0 stands in the barrier, where no signal handler of Python runs."""
    script, page = tmp_path / "train.py", tmp_path / "page.html"
    script.write_text(LAUNCHED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "halfstep", "watch"]
    done = subprocess.run([*launch, "--html", page, script, "ended"], capture_output=True, text=True, timeout=120, check=False)
    assert "The script did not come to its end: it was ended by SIGTERM." in done.stdout, done.stderr[-2000:]
    assert page.read_text().count("<td>it was ended by SIGTERM</td>") == 2
