"""A small training with everything that has a state, for the tests of checkpoints."""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, MultiStepLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

from distributed.ranks import PRELOADED
from halfstep import Checkpoints, Engine
from halfstep.checkpoint.tensor_file import bytes_of
from halfstep.precision.scaler import ScalerSettings

EPOCHS = 3
UPDATES = 12


class Noisy(Dataset[Tensor]):
    """Fourteen samples, each with noise of its own on every look, some of which make FP16 overflow."""

    def __init__(self, *, overflows: bool) -> None:
        self.overflows = overflows

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> Tensor:
        sample = torch.randn(4) + index + random.random() + float(np.random.rand())
        return sample * (3e2 if self.overflows and index % 4 == 0 else 1.0)


class Net(nn.Module):
    """Dropout draws numbers, batch norm keeps statistics, and two names share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.second, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.last.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.drop(torch.tanh(self.norm(self.first(x.to(self.first.weight.dtype)))))))


def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch).square().sum() * batch.abs().max().clamp(min=1.0), len(batch)


def scheduler_of(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "several":
        warm = LinearLR(optimizer, 0.1, 1.0, 3)
        return SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, 9)], milestones=[3])
    if kind == "steps":
        return [MultiStepLR(optimizer, [2, 5]), ReduceLROnPlateau(optimizer)]
    return LambdaLR(optimizer, lambda applied: 1 / (1 + applied))


def optimizer_of(kind: str, model: nn.Module) -> Any:
    make = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
        "Adam, learning rate a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    }
    if kind == "two":
        return [torch.optim.SGD(model.first.parameters(), lr=0.1), make["AdamW"]([*model.norm.parameters(), model.last.weight])]
    return make[kind](model.parameters())


class Run:
    """A training that can be saved, resumed and compared."""

    def __init__(
        self,
        precision: str = "fp32",
        *,
        optimizer: str = "AdamW",
        scheduler: str = "lambda",
        workers: int = 0,
        seed: int = 0,
        epochs: int = EPOCHS,
        net: Any = Net,
        **given: Any,
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.epochs = epochs
        self.model = net()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        made = optimizer_of(optimizer, self.model)
        self.optimizers = made if isinstance(made, list) else [made]
        self.schedulers = scheduler_of(scheduler, self.optimizers[0])
        self.engine = Engine(
            self.model,
            made,
            loss=loss,
            scheduler=self.schedulers,
            ema=self.average,
            precision=precision,
            accumulate=2,
            clip_norm=1.0,
            **{"scaler": ScalerSettings(init_scale=2.0**12, growth_interval=2), "max_skips": 1000, **given},
        )
        data = Noisy(overflows=precision == "fp16")
        self.loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=workers, worker_init_fn=seed_worker)

    def updates(self) -> Iterator[Any]:
        return self.engine.updates(self.loader, epochs=self.epochs)

    def until(self, stop: int, checkpoints: Checkpoints) -> None:
        """Train, save after update `stop`, and train one update more, which is lost."""
        for update in self.updates():
            if update.index == stop:
                checkpoints.save(self.engine, extra={"note": (stop, [math.inf])})
            if update.index == stop + 1:
                break
        checkpoints.wait()

    def finish(self) -> Run:
        for _ in self.updates():
            pass
        return self

    def everything(self) -> dict[str, Any]:
        kept = {k: v for k, v in self.engine.state_dict().items() if k != "precision_reason"}
        optimizers = [
            [*optimizer.state_dict()["state"].items(), optimizer.state_dict()["param_groups"]] for optimizer in self.optimizers
        ]
        schedulers = self.schedulers if isinstance(self.schedulers, list) else [self.schedulers]
        return {
            "engine": kept,
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": optimizers,
            "schedulers": [scheduler.state_dict() for scheduler in schedulers],
        }


def seed_worker(number: int) -> None:
    seed = torch.initial_seed() % 2**32
    random.seed(seed)
    np.random.seed(seed)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """The same types and bits, however deep."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype, where
        assert one.shape == other.shape, where
        assert bytes_of(one) == bytes_of(other), where
    else:
        assert one == other or (one != one and other != other), where


def forked(work: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that runs `work(*args)`, forked from a server that has imported torch once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=work, args=args)
    process.start()
    return process


def saved(folder: Path, stop: int = 2, **given: Any) -> Path:
    """A folder with checkpoints after each update up to `stop`."""
    run = Run(**given)
    with Checkpoints(folder, keep=9) as checkpoints:
        for update in run.updates():
            checkpoints.save(run.engine)
            if update.index == stop:
                break
    return folder
