"""Rule HS125: amp-deprecated-api."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS125",
    name="amp-deprecated-api",
    severity=Severity.STYLE,
    what="`torch.cuda.amp` names are deprecated.",
    why=(
        'They warn on every construction since torch 2.4. `torch.amp.autocast("cuda", ...)` and '
        '`torch.amp.GradScaler("cuda", ...)` mean the same.'
    ),
    example="""\
import torch

scaler = torch.cuda.amp.GradScaler()
with torch.cuda.amp.autocast():
    pass
""",
    instead="""\
import torch

scaler = torch.amp.GradScaler("cuda")
with torch.amp.autocast("cuda"):
    pass
""",
    fix=Safety.SAFE,
)


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """Calls of names below `torch.cuda.amp` and `torch.cpu.amp`, by what the names mean."""
    for fact in story.told("deprecated call"):
        device, name = fact.detail.split(".")[1], fact.detail.rsplit(".", 1)[-1]
        if name in ("autocast", "GradScaler"):
            fix = None if "made later" in fact.values else FixRequest("modernise", fact.place, f"{name}|{device}")
            yield Found(fact.place, f'`{fact.detail}` is deprecated; use `torch.amp.{name}("{device}", ...)`', fix)
