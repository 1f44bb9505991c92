"""Programs that are right in a way of their own have no fault under watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

SCALED_LIMIT = """\
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for x, y in [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        output = model(x)
    scaler.scale(nn.functional.mse_loss(output.float(), y)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
"""
HALF_AND_FROZEN = """\
import torch
from torch import nn


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 8).half().requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        with torch.no_grad():
            seen = self.encoder(x.half())
        return self.head(seen.float())


model = Probe()
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
for x, y in [(torch.randn(8, 4), torch.zeros(8).long()) for _ in range(3)]:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
OWN_EPOCHS = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Counting(DistributedSampler):
    def __iter__(self):
        order = super().__iter__()
        self.epoch += 1
        return order


data = TensorDataset(torch.randn(16, 4), torch.zeros(16).long())
loader = DataLoader(data, batch_size=4, sampler=Counting(data, 2, 0))
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    "text", [SCALED_LIMIT, HALF_AND_FROZEN, OWN_EPOCHS], ids=["scaled limit", "half and frozen", "own epochs"]
)
def test_a_right_program_has_no_fault(run: Callable[..., Any], text: str) -> None:
    watched = run(text)
    assert watched.ending.words == ""
    assert watched.findings("error", "warning") == []


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        (SCALED_LIMIT, SCALED_LIMIT.replace("0.5 * scaler.get_scale()", "0.5"), "amp-clip-before-unscale"),
        (
            SCALED_LIMIT,
            SCALED_LIMIT.replace("init_scale=512.0", "init_scale=65536.0").replace(
                "    nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale())",
                "    print(scaler.get_scale())\n    nn.utils.clip_grad_norm_(model.parameters(), 100.0)",
            ),
            "amp-clip-before-unscale",
        ),
        (
            HALF_AND_FROZEN,
            HALF_AND_FROZEN.replace(".half().requires_grad_(False)", ".half()").replace("torch.no_grad()", "torch.enable_grad()"),
            "amp-half-params",
        ),
        (OWN_EPOCHS, OWN_EPOCHS.replace("self.epoch += 1", "pass"), "ddp-no-set-epoch"),
    ],
    ids=["limit", "large limit", "trained", "one order"],
)
def test_the_fault_that_it_looks_like_is_found(run: Callable[..., Any], before: str, after: str, rule: str) -> None:
    assert before != after
    assert rule in run(after).rules()
