"""A script converted to several ranks, run in what torchrun sets for two, is the original on batches of twice the size."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from distributed.ranks import Ended
from halfstep.imagine.converting.conversion import convert
from halfstep.imagine.converting.outcome import Wish

SCRIPTS = Path(__file__).parents[1] / "unit" / "imagine" / "test_convert_scripts"


def updates(text: str, folder: Path) -> torch.Tensor:
    """The parameters after each step of the script's optimizer, in a row."""
    heard: list[torch.Tensor] = []

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        heard.append(torch.cat([p.detach().flatten().clone() for g in optimizer.param_groups for p in g["params"]]))

    before = Path.cwd()
    hook = register_optimizer_step_post_hook(after)
    try:
        os.chdir(folder)
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    finally:
        hook.remove()
        os.chdir(before)
    return torch.stack(heard)


@pytest.mark.parametrize(
    ("name", "small", "large", "accumulate"),
    [
        ("phases", "batch_size=8", "batch_size=16", 1),
        ("trainer", "batch_size=8", "batch_size=16", 1),
        ("validated", "batch_size=8", "batch_size=32", 2),
    ],
)
def test_two_ranks_are_one_with_batches_of_twice_the_size(
    name: str, small: str, large: str, accumulate: int, tmp_path: Path, started: Callable[..., list[Ended]]
) -> None:
    text = (SCRIPTS / f"{name}.py").read_text()
    text = text.replace("shuffle=True", "shuffle=False").replace("drop_last=True", "drop_last=False")
    result = convert(text, "script.py", Wish(precision="fp32", ddp=True, accumulate=accumulate), lambda _: frozenset())
    assert result.left == []
    assert ("no_sync" in result.text) == (accumulate > 1)
    # the sampler deals samples out one by one: batch k of both ranks together is batch k of the large loader
    whole = updates(text.replace(small, large), tmp_path)
    first, second = (end.value if end.error is None else end.trace for end in started(updates, result.text, tmp_path))
    assert torch.equal(first, second)
    short = min(len(first), len(whole))
    torch.testing.assert_close(first[:short], whole[:short], rtol=1e-4, atol=1e-6)
    assert len(first) == len(whole)
