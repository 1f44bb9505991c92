"""Rule HS205: accum-off-by-one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Backward, Place, Ref, Step
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import accumulation, optimizers

CARD = Card(
    code="HS205",
    name="accum-off-by-one",
    severity=Severity.ERROR,
    what="The first window has another size than the others.",
    why=(
        "A zero-based index needs `(i + 1) % n == 0`, a one-based one `i % n == 0`: otherwise the first step "
        "comes after one micro-batch, or one early."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, accumulate=4, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if i % accumulate == 0 or i + 1 == len(loader):
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
            loss = nn.functional.mse_loss(model(x), y) / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
""",
    fix=Safety.UNSAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A first window that differs from the second, which is full."""
    if trace.exception is not None:
        return
    for optimizer in optimizers(trace):
        way = accumulation(trace, optimizer)
        sizes = _gaps(trace, optimizer)
        if way is None or not way.guarded or len(sizes) < 2 or not sizes[0] or sizes[1] != way.size or sizes[0] == way.size:
            continue
        if sizes[0] in (1, way.size - 1, way.size + 1):
            step = next(s for s in trace.of(Step) if s.optimizer == optimizer)
            fix = FixRequest("count-from-one", step.place) if step.place is not None and sizes[0] == 1 else None
            yield Found(step.place, f"the first window has {sizes[0]} micro-batches, the second {sizes[1]}", fix)


def _gaps(trace: Trace, optimizer: Ref) -> list[int]:
    """Micro-batches before each of the first steps; repeats of one line count, not lines."""
    sizes: list[int] = []
    places: Counter[tuple[Place, ...]] = Counter()
    for event in trace.of(Backward, Step):
        if isinstance(event, Backward) and optimizer in event.optimizers:
            places[event.stack] += 1
        elif isinstance(event, Step) and event.optimizer == optimizer:
            sizes.append(max(places.values(), default=0))
            places.clear()
    return sizes[:3]
