"""Loops that write gradients by hand, cast their model or end before their first step are understood too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from halfstep.record.places import Places
from halfstep.record.probes.lines import COMMAND, line_of_script

START = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
x = torch.randn(8, 4)
"""
WINDOW = """
for i in range(8):
    model(x).pow(2).mean().backward()
    if (i + 1) % 4 == 0:
        {edit}
        optimizer.step()
        optimizer.zero_grad()
"""
UNSCALE = """
for i in range(3):
    optimizer.zero_grad()
    scaler.scale(model(x).pow(2).mean()).backward()
    {edit}
    optimizer.step()
"""
NESTED = """
for update in range(3):
    for micro in range(4):
        {edit}
        (model(x).pow(2).mean() / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PER_PARAMETER = "for p in model.parameters(): p.grad {}"


@pytest.mark.parametrize(
    ("loop", "edit", "rules"),
    [
        (WINDOW, "pass", {"accum-no-loss-division"}),
        (WINDOW, PER_PARAMETER.format("/= 4"), set()),
        (WINDOW, PER_PARAMETER.format("= p.grad / 4") + "\n        nn.utils.clip_grad_norm_(model.parameters(), 1.0)", set()),
        (UNSCALE, "pass", {"amp-step-bypass"}),
        (UNSCALE, PER_PARAMETER.format(".div_(scaler.get_scale())"), set()),
        (NESTED, "pass", set()),
        (NESTED, "model.zero_grad()", {"accum-zero-grad-each-micro"}),
    ],
)
def test_what_the_script_does_to_gradients_itself_is_heard(
    run: Callable[..., Any], loop: str, edit: str, rules: set[str]
) -> None:
    assert run(START + loop.format(edit=edit)).rules() == rules


def test_parameters_from_a_used_up_filter_are_no_parameters(run: Callable[..., Any]) -> None:
    text = "params = filter(lambda p: p.requires_grad, model.parameters())\noptimizer = torch.optim.SGD(params, lr=0.1)\n"
    loop = "for i in range(2):\n    optimizer.zero_grad()\n    model(x).mean().backward()\n"
    clip = "    nn.utils.clip_grad_norm_(params, 1.0)\n    optimizer.step()\n"
    assert run(START + text + loop + clip).rules() == {"clip-wrong-params"}


def test_low_precision_parameters_are_told_at_the_line_of_the_cast(run: Callable[..., Any]) -> None:
    text = "model = nn.Linear(4, 1).bfloat16()\noptimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
    loop = "for i in range(2):\n    optimizer.zero_grad()\n    model(x.bfloat16()).mean().backward()\n    optimizer.step()\n"
    found = [f for f in run(START + text + loop).findings() if f.rule == "amp-pure-bf16-update-lost"]
    assert [(f.line, f.message.split(":")[0]) for f in found] == [(8, "`model` is trained with parameters stored in bfloat16")]


def test_a_run_that_never_stepped_is_judged_by_its_text(run: Callable[..., Any]) -> None:
    loop = "    scaler.scale(model(x).mean() / 4).backward()\n    if i % 4 == 3:\n        scaler.step(optimizer)\n"
    text = f"{START}for i in range(8):\n{loop}        optimizer.zero_grad()\n    scaler.update()\n"
    watched = run(text)
    assert watched.ending.words.startswith("it raised AssertionError: No inf checks were recorded")
    assert "amp-update-per-microbatch" in watched.rules()


def test_what_called_a_command_of_ours_is_no_line_of_the_users() -> None:
    found: list[object] = []
    called = compile("found.append(line_of_script()); found.append(places.here(depth=1).place)", COMMAND, "exec")
    exec(called, {"found": found, "line_of_script": line_of_script, "places": Places()})
    assert found == [None, None]
