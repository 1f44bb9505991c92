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
UPDATES = 20
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

    def torchrun(self, host: int) -> subprocess.Popen[str]:
        """The script on one of the hosts, as docs/many-machines.md says."""
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.addresses[0]}:29400", "--rdzv-id", "two-hosts"]
        place = ["--rdzv-conf", f"is_host={str(host == 0).lower()}", "--local-addr", self.addresses[host]]
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *meeting, *place]
        variables = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *words, str(SCRIPT)],
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
    for update in range(UPDATES):
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


def test_two_hosts_train_as_one_and_the_run_ends_when_one_is_cut_off(hosts: Hosts) -> None:
    """The group waits 8 s for a rank; a host that is cut off sends no word, so that nothing else can tell."""
    first, second = hosts.torchrun(0), hosts.torchrun(1)
    try:
        lines = read_until(first, lambda line: f"update {UPDATES}," in line)
        losses = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("rank 0 of 2")]
        assert losses == pytest.approx(by_hand(), rel=1e-5, abs=1e-6)
        hosts.cut_off(1)
        said, _ = first.communicate(timeout=TIMEOUT_S)
        assert first.returncode == 1
        assert LOST in said
    finally:
        hosts.close()
        for process in (first, second):
            process.communicate()
