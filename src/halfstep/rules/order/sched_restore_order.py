"""Rule HS409: sched-restore-order."""

from __future__ import annotations

from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import Load, Made, Ref
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity
from halfstep.rules.listening import call_site

CARD = Card(
    code="HS409",
    name="sched-restore-order",
    severity=Severity.WARNING,
    what="A scheduler is built after the optimizer's state was loaded.",
    why=(
        "LambdaLR, OneCycleLR, CyclicLR and those that warm up write their first rate over the loaded one when they are built; "
        "others keep the rate and start their count at zero."
    ),
    example="""\
import torch
from torch import nn


def train(model, loader, path, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = torch.load(path)
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, path, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    checkpoint = torch.load(path)
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        scheduler.step()
""",
    fix=Safety.UNSAFE,
)


KEEP_THE_RATE = {"StepLR", "MultiStepLR", "CosineAnnealingLR", "PolynomialLR"}
"""Schedulers whose constructor leaves a rate that was loaded as it is (torch 2.13: each was built over a loaded state)."""
NEED_NO_COUNT = {"ExponentialLR", "MultiplicativeLR", "ReduceLROnPlateau"}
"""Schedulers of which the same holds, and that go on from any rate."""


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """A scheduler made after a load into its optimizer, without telling it where it is."""
    loaded: dict[Ref, Load] = {}
    made: list[tuple[Ref, Made, Load]] = []
    for event in trace.of(Load, Made):
        if isinstance(event, Load) and event.target is not None:
            loaded[event.target] = event
            made = [m for m in made if m[0] != event.target and not (m[1].what == event.target and _keeps(m[1]))]
        elif isinstance(event, Made) and event.what.kind == "scheduler":
            args, optimizer = event.facts.get("args"), event.facts.get("optimizer")
            if optimizer in loaded and isinstance(optimizer, Ref) and not (isinstance(args, dict) and "last_epoch" in args):
                made.append((optimizer, event, loaded[optimizer]))
    for _, late, load in made:
        if late.facts.get("class") in NEED_NO_COUNT or late.facts.get("overwritten") or _steps_each_time(late):
            continue
        fix = None  # where a count is lost: no order of lines brings it back
        if late.place is not None and load.place is not None and not _keeps(late):
            fix = FixRequest("move-before", late.place, other=load.place)
        what = "starts its count at zero after a resume" if _keeps(late) else "writes its first learning rate over the loaded one"
        inside = late.stack[: len(load.stack) - 1] == load.stack[:-1]
        place = call_site(late, load) if inside else late.place
        yield Found(place, f"this scheduler is built after the optimizer's state was loaded: it {what}", fix)


def _keeps(made: Made) -> bool:
    return made.facts.get("class") in KEEP_THE_RATE


def _steps_each_time(made: Made) -> bool:
    args = made.facts.get("args")
    return made.facts.get("class") == "StepLR" and isinstance(args, dict) and args.get("step_size") == 1
