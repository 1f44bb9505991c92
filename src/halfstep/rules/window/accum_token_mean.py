"""Rule HS206: accum-token-mean."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward
from halfstep.findings.card import Card
from halfstep.findings.finding import Found, Severity
from halfstep.rules.listening import accumulation, optimizers

CARD = Card(
    code="HS206",
    name="accum-token-mean",
    severity=Severity.WARNING,
    what="Each micro-batch averages over its own valid tokens before the window's average.",
    why=(
        "Micro-batches with few valid tokens count as much as full ones: the gradient is not that of the "
        "whole batch. Sum the token losses and divide by the window's token count."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y, ignore_index=-100) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
    unfixed=("The tokens of a whole window must be known before its first backward pass, as `halfstep.Engine` knows them."),
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Losses averaged over valid tokens and divided by the window's size."""
    for optimizer in optimizers(trace):
        if accumulation(trace, optimizer) is None:
            continue
        for backward in trace.of(Backward):
            if any("alike" in turn.tags for turn in backward.loops):
                continue  # the same micro-batch again and again
            if optimizer in backward.optimizers and backward.reduction == "token_mean" and backward.divisors:
                yield Found(backward.place, "each micro-batch is averaged over its own valid tokens")
