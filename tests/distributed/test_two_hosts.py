"""Two hosts, each with a network of its own, and torchrun across them; then one is cut off in mid-run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which

import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).with_name("endless.py")
SAVED, LAST = 20, 30
TIMEOUT_S = 90.0
LOST = (
    "halfstep.errors.RunStopped: Another rank has not answered for as long as the process group waits: its machine or the "
    "network is gone, or it hangs. Look at what the other processes printed last."
)

pytestmark = pytest.mark.slow


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


class Hosts:
    """Two network namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = [f"hs{os.getpid()}{letter}" for letter in "ab"]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        for name in self.names:
            ip("netns", "add", name)
        ends = [f"v{name}" for name in self.names]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "link", "set", end, "name", "eth0")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")

    def torchrun(self, host: int, folder: Path, *, restarts: int) -> subprocess.Popen[str]:
        """The script on one of the hosts, as docs/many-machines.md says; where there are restarts, one host is enough."""
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:29400", "--rdzv-id", "two-hosts"]
        conf = f"is_host={str(host == 0).lower()},last_call_timeout=2,keep_alive_interval=1"
        place = ["--rdzv-conf", conf, "--local-addr", self.addresses[host], "--max-restarts", str(restarts)]
        nodes = ["--nnodes", "1:2" if restarts else "2", "--nproc-per-node", "1"]
        words = [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting, *place]
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *words, str(SCRIPT), str(folder)],
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def cut_off(self, host: int) -> None:
        ip("-n", self.names[host], "link", "set", "eth0", "down")

    def close(self) -> None:
        for name in self.names:
            if name in ip("netns", "list"):
                for pid in ip("netns", "pids", name).split():
                    os.kill(int(pid), signal.SIGKILL)
                ip("netns", "del", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if which("ip") is None:
        pytest.skip("there is no `ip` here to make network namespaces with")
    probe = subprocess.run(["ip", "netns", "add", f"hs{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"network namespaces are not permitted here: {probe.stderr.strip()}")
    ip("netns", "del", f"hs{os.getpid()}")
    made = Hosts()
    yield made
    made.close()


def by_hand() -> list[float]:
    """The losses of the script's updates on one host, in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(30, 4), torch.randn(30, 1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.01), []
    for update in range(LAST):
        rows = slice(update % 5 * 6, update % 5 * 6 + 6)
        loss = (model(x[rows]) - y[rows]).square().sum() / 6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def read_until(process: subprocess.Popen[str], wanted: Callable[[str], bool]) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if wanted(line):
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.parametrize("restarts", [0, 1])
def test_two_hosts_train_as_one_and_when_one_is_cut_off_the_run_ends_or_the_other_goes_on(
    hosts: Hosts, restarts: int, tmp_path: Path
) -> None:
    """The group waits 8 s for a rank; a host that is cut off sends no word, so that nothing else can tell."""
    first, second = (hosts.torchrun(host, tmp_path, restarts=restarts) for host in (0, 1))
    wanted = by_hand()
    try:
        lines = read_until(first, lambda line: f"update {SAVED + 1}," in line)
        losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("rank 0 of 2")]
        assert losses == pytest.approx(wanted[: SAVED + 1], rel=1e-5, abs=1e-6)
        hosts.cut_off(1)
        said, _ = first.communicate(timeout=TIMEOUT_S)
        assert LOST in said
        assert first.returncode == (0 if restarts else 1), said
        alone = [line for line in said.splitlines() if line.startswith("rank 0 of 1")]
        assert [float(line.rpartition(" ")[2]) for line in alone] == pytest.approx(wanted[SAVED:] if restarts else [], rel=1e-4)
    finally:
        hosts.close()
        for process in (first, second):
            process.communicate()
