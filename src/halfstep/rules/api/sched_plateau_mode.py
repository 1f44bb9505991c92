"""Rule HS406: sched-plateau-mode."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep.events.trace import Story, Trace
from halfstep.events.vocabulary import SchedulerStep
from halfstep.findings.card import Card
from halfstep.findings.finding import FixRequest, Found, Safety, Severity

CARD = Card(
    code="HS406",
    name="sched-plateau-mode",
    severity=Severity.ERROR,
    what="`ReduceLROnPlateau` watches a metric in the wrong direction.",
    why=('With `mode="min"` (the default) a rising accuracy counts as no progress: the rate falls while the model improves.'),
    example="""\
import torch
from torch import nn


def train(model, loader, evaluate, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        accuracy = evaluate(model)
        scheduler.step(accuracy)
""",
    instead="""\
import torch
from torch import nn


def train(model, loader, evaluate, epochs=2):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max")
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        accuracy = evaluate(model)
        scheduler.step(accuracy)
""",
    fix=Safety.UNSAFE,
)


UP = re.compile(
    r"(^|_|\b)(acc|accuracy|f1|iou|miou|auc|auroc|dice|map|precision|recall|psnr|ssim|bleu|rouge|r2|score|top1|top5)($|_|\b|\d)",
    re.I,
)
DOWN = re.compile(r"loss|error|err\b|rmse|mse|mae|perplexity|ppl|nll|wer\b|cer\b|fid\b", re.I)

REST = re.compile(r"-|10*(\.0+)? - ")
"""What is left of a rate, `1 - hits / total`: it falls, whatever it is called."""


def check(trace: Trace, story: Story) -> Iterator[Found]:
    """The name of the metric against the mode."""
    for event in trace.of(SchedulerStep):
        args = trace.fact(event.scheduler, "args")
        if trace.fact(event.scheduler, "class") != "ReduceLROnPlateau" or not isinstance(args, dict) or not event.metric:
            continue
        mode = args.get("mode", "min")
        negated = event.metric.startswith("-")
        name = event.metric.lstrip("-")
        low = DOWN.search(_said(event.measured, name)) is not None
        turned = REST.match(event.measured) is not None
        falling = not negated and turned != low
        rises = ((UP.search(name) is not None and not falling) or (turned and low)) and not DOWN.search(name)
        falls = bool(DOWN.search(name)) and not UP.search(name)
        wanted = "max" if rises != negated else "min"
        if (rises or falls) and mode in ("min", "max") and mode != wanted:
            made = trace.made(event.scheduler)
            fix = FixRequest("keyword", made.place, f'mode="{wanted}"', position=1) if made is not None and made.place else None
            yield Found(event.place, f'`{name}` should be watched with mode="{wanted}", but the scheduler uses "{mode}"', fix)


def _said(measured: str, name: str) -> str:
    """What else is said of a number, but for what it is divided by: that falls where the number rises."""
    return re.sub(r"/ *\w+", "", measured.replace(name.split(" = ")[0], ""))
