"""A loop that somebody else wrote, run twice with its batch split differently: both must be the same training.

The loop's own arguments say how its batch is split; what they mean only its author knows. Nothing of the script is changed: each
step of an optimizer is heard through torch's own hook.
"""

from __future__ import annotations

import json
import math
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.certify.certificate import Certificate, Line, Topic
from halfstep.certify.others import ended
from halfstep.errors import ConfigError
from halfstep.measure.hardware import describe

UNITS = 128
"""Units in the last place of FP32 that another order of additions may make in a first gradient."""
GROWTH = 100.0
"""How many times larger a difference may be after all updates: each carries that of the one before on."""
LIMIT_S = 3600.0


class Heard:
    """Every step's gradient norm, the first step's gradient, and the last parameters."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.first: list[torch.Tensor] = []
        self._parameters: list[torch.Tensor] = []

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hear a step that is about to be made."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad.detach() for p in held if p.grad is not None]
        self.norms.append(sum(float(g.double().square().sum()) for g in gradients) ** 0.5)
        if len(self.norms) == 1:
            self.first = [g.float().flatten().cpu().clone() for g in gradients]
        known = {id(p) for p in self._parameters}
        self._parameters += [p for p in held if id(p) not in known]

    def found(self) -> dict[str, Any]:
        """What was heard, as tensors and numbers."""
        last = torch.cat([p.detach().float().flatten().cpu() for p in self._parameters]) if self._parameters else torch.empty(0)
        return {"norms": self.norms, "first": torch.cat(self.first) if self.first else torch.empty(0), "last": last}


def run_script(script: str, words: Sequence[str], out: Path) -> None:
    """Run the script as `python script words` would, and leave what was heard in a file, however it ends."""
    heard = Heard()
    handle = register_optimizer_step_pre_hook(heard)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        handle.remove()
        torch.save(heard.found(), out)


def certify_loop(script: Path, ways: Sequence[Sequence[str]], *, told: Callable[[Line], None] = lambda line: None) -> Certificate:
    """Run a script with each of the argument lists and compare every other with the first.

    Args:
        script: the file.
        ways: two argument lists or more, which should be the same training.
        told: hears each line as it is known.

    Raises:
        ConfigError: the script fails, or makes no step of an optimizer.
    """
    started = time.perf_counter()
    runs = [_run(script, words) for words in ways]
    lines: list[Line] = []
    for words, found in zip(ways[1:], runs[1:], strict=True):
        for line in _lines(" ".join(ways[0]), " ".join(words), runs[0], found):
            lines.append(line)
            told(line)
    machine = describe(torch.device("cpu"))
    note = "Seeds and the order of the data are the script's own: where they depend on its arguments, the runs differ for that."
    return Certificate(
        subject=f"the loop of {script}",
        machine=f"{machine.name} ({machine.backend}), {machine.cores} cores",
        lines=lines,
        notes=[note],
        seconds=time.perf_counter() - started,
    )


def _run(script: Path, words: Sequence[str]) -> dict[str, Any]:
    with TemporaryDirectory(prefix="halfstep-loop-") as folder:
        out, task = Path(folder) / "heard.pt", Path(folder) / "loop.json"
        task.write_text(json.dumps({"script": str(script), "words": list(words), "out": str(out)}), encoding="utf-8")
        command = [sys.executable, "-m", "halfstep.certify", str(task)]
        code, said = ended(command, LIMIT_S)
        if code != 0:
            raise ConfigError(f"`{script} {' '.join(words)}` ended with exit code {code}: {said}")
        found: dict[str, Any] = torch.load(out, weights_only=True)
    if not found["norms"]:
        raise ConfigError(f"`{script} {' '.join(words)}` made no step of a torch optimizer: there is nothing to compare.")
    return found


def _lines(one: str, other: str, first: dict[str, Any], second: dict[str, Any]) -> list[Line]:
    pair, small = f"`{one}` and `{other}`", UNITS * torch.finfo(torch.float32).eps
    counts = len(first["norms"]), len(second["norms"])
    source = f"{UNITS} units in the last place of FP32"
    grown = f"{source}, {GROWTH:g} times as much for what updates carry on"
    updates = Line(
        topic=Topic.SPLITS,
        claim=f"{pair} make as many updates",
        holds=counts[0] == counts[1],
        figure=f"{counts[0]} and {counts[1]}",
        tolerance="exact",
    )
    return [
        updates,
        _line(f"{pair} have the same gradient in the first update", _apart(first["first"], second["first"]), small, source),
        _line(f"{pair} have the same gradient norm in every update", _norms_apart(first, second), small * GROWTH, grown),
        _line(f"{pair} end with the same parameters", _apart(first["last"], second["last"]), small * GROWTH, grown),
    ]


def _line(claim: str, away: float, allowed: float, source: str) -> Line:
    return Line(
        topic=Topic.SPLITS,
        claim=claim,
        holds=away <= allowed,
        figure=f"{away:.1e} of its size away",
        tolerance=f"{allowed:.1e}: {source}",
    )


def _norms_apart(first: dict[str, Any], second: dict[str, Any]) -> float:
    """The largest relative difference of two norms of one update; NaN where one of them is."""
    away = [abs(a - b) / a if a else abs(b) for a, b in zip(first["norms"], second["norms"], strict=False)]
    return math.nan if any(map(math.isnan, away)) else max(away)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.numel() != other.numel():
        return float("inf")
    size = float(one.double().norm())
    difference = float((one.double() - other.double()).norm())
    return difference / size if size else difference
