"""How often the first module that makes NaN or infinity is named right: faults put into random layers of small models.

`python -m benchmarks.watch_injections [--quick] [--json]`; its row is part of `python -m benchmarks.watch`. Every injection is a
model, a layer and a kind of fault, drawn from one seed; the layer's path is what the probe has to say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Goal, Row, main
from benchmarks.models import Gpt, Shape
from halfstep.measure.stats import summarize
from halfstep.record.probes.numbers import Numbers

NUM_INJECTIONS = 72
GOAL = Goal(bound=95, at_most=False)
"""57 of 60."""


def mlp() -> tuple[nn.Module, Tensor]:
    """Five linear layers."""
    layers = [part for _ in range(5) for part in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(*layers), torch.randn(4, 16)


def cnn() -> tuple[nn.Module, Tensor]:
    """Convolutions with batch normalisation, pooled."""
    body = [part for _ in range(3) for part in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)), torch.randn(3, 4, 6, 6)


def gpt() -> tuple[nn.Module, Tensor]:
    """A transformer with tied embeddings."""
    return Gpt(Shape(layers=2, width=16, heads=2, vocabulary=32, context=8)), torch.randint(32, (2, 8))


class Wrapped(nn.Module):
    """A layer with a fault after it."""

    def __init__(self, layer: nn.Module, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.fault = layer, fault

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(self.layer(x))


class Divided(torch.autograd.Function):
    """Nothing in forward, a division by zero in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 0


def log_of_zero(y: Tensor) -> Tensor:
    return y + (y * 0).log()


def hidden_log_of_zero(y: Tensor) -> Tensor:
    """Finite in forward, for `where` leaves it out; 0 * inf in backward."""
    return y + torch.where(y == y, y, (y * 0).log())


def root_of_zero(y: Tensor) -> Tensor:
    return y + (y * 0).sqrt()


def steep(y: Tensor) -> Tensor:
    """Gradients that leave FP16 between two factors that cancel."""
    return y.half() * 2.0**-14 * 2.0**14


def divided(y: Tensor) -> Tensor:
    made: Tensor = Divided.apply(y)  # type: ignore[no-untyped-call]
    return made


WRAPPED = {
    "log(0) in forward": log_of_zero,
    "log(0) in backward": hidden_log_of_zero,
    "root of 0 in backward": root_of_zero,
    "fp16 overflow in backward": steep,
    "division in a custom backward": divided,
}
KINDS = (*WRAPPED, "NaN weight", "fp16 overflow in forward", "NaN sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A fault, and what was said of it."""

    model: str
    kind: str
    wanted: str
    told: str

    @property
    def right(self) -> bool:
        """Whether the layer, or the wrapper's part that holds it, is the one named."""
        return self.told in (self.wanted, f"{self.wanted}.layer")


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Tensor]]] = {"mlp": mlp, "cnn": cnn, "gpt": gpt}


def inject(seed: int) -> Injection:
    """One fault, the training loop around it, and what the probe names."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    name, kind = draw.choice(list(MODELS)), draw.choice(KINDS)
    if kind == "NaN sample":
        name = draw.choice(["mlp", "cnn"])
    model, batch = MODELS[name]()
    layers = [path for path, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))]
    wanted = draw.choice(layers)
    if kind in WRAPPED:
        parent = model.get_submodule(wanted.rpartition(".")[0])
        setattr(parent, wanted.rpartition(".")[2], Wrapped(model.get_submodule(wanted), WRAPPED[kind]))
    elif kind == "NaN sample":
        wanted = layers[0]
        batch[draw.randrange(len(batch))].flatten()[draw.randrange(16)] = float("nan")
    else:
        weight = model.get_submodule(wanted).get_parameter("weight").data.flatten()
        weight[draw.randrange(weight.numel())] = float("nan") if kind == "NaN weight" else 1e9
    return Injection(model=name, kind=kind, wanted=wanted, told=_told(model, batch, kind))


def _told(model: nn.Module, batch: Tensor, kind: str) -> str:
    """Train for two updates; the module that the probe names first."""
    half = "fp16" in kind
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=half)
    probe = Numbers()
    probe.attach(model, optimizer, scaler)
    for update in range(2):
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            output = model(batch)
        loss = output.float().pow(2).mean()
        probe.backward_begins(scaler.scale(loss), None)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        probe.update_ended(update)
        optimizer.zero_grad()
    probe.detach()
    return probe.first.module if probe.first is not None else "nothing"


def named_right(quick: bool) -> Iterator[Row]:
    """The share of injections whose module is named right."""
    done = [inject(seed) for seed in range(12 if quick else NUM_INJECTIONS)]
    wrong = [f"{i.kind} in {i.model} {i.wanted}: said {i.told}" for i in done if not i.right]
    share = 100 * (len(done) - len(wrong)) / len(done)
    kinds = ", ".join(f"{kind} {sum(i.kind == kind for i in done)}" for kind in KINDS)
    note = f"{len(done) - len(wrong)} of {len(done)} ({kinds}){'; wrong: ' if wrong else ''}{'; '.join(wrong)}"
    yield Row(what="first bad module named right, %", against="-", figure=summarize([share], ""), goal=GOAL, note=note)


if __name__ == "__main__":
    raise SystemExit(main(__doc__ or "", {"injections": named_right}, torch.device("cpu")))
