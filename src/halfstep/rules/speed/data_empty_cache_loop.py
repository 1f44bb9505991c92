"""Rule HS610: data-empty-cache-loop."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, MemoryFlush
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS610",
    name="data-empty-cache-loop",
    severity=Severity.PERF,
    what="The allocator's cache or the garbage is cleared in every step.",
    why="`empty_cache` hands memory back that the next step asks for again; `gc.collect` walks all objects.",
    example="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            torch.cuda.empty_cache()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        torch.cuda.empty_cache()
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Flushes in the turns that step or backpropagate, without a modulo around."""
    turns = {t.loop for b in trace.of(Backward) for t in b.loops[-1:]}
    for event in trace.of(MemoryFlush):
        if event.loops and event.loops[-1].loop in turns and not event.guards & {"modulo", "data"}:
            fix = FixRequest("delete", event.place) if event.place else None
            yield Found(event.place, f"`{event.kind}` runs in every step", fix)
