"""Plain PyTorch, as one writes it by hand: what the engine is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer, RMSprop

from halfstep import Engine

INPUTS, OUTPUTS = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A micro-batch: inputs, wanted outputs, what each sample counts, and what its loss is multiplied by."""

    x: Tensor
    y: Tensor
    weight: Tensor
    factor: float = 1.0

    def times(self, factor: float) -> Batch:
        """The same micro-batch with its loss multiplied: by infinity, to make gradients overflow."""
        return Batch(x=self.x, y=self.y, weight=self.weight, factor=factor)


def weighted_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Squared errors, summed over the samples that count, and how many those are."""
    errors = (model(batch.x) - batch.y).square().sum(dim=1).to(batch.weight.dtype)
    return (errors * batch.weight).sum() * batch.factor, batch.weight.sum()


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean over a micro-batch."""
    return F.mse_loss(model(batch.x).float(), batch.y.float()) * batch.factor


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Two layers and a normalisation: weights, biases, scalars."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, OUTPUTS)).to(dtype)


def blocks_model(seed: int = 0) -> nn.Sequential:
    """Three blocks of several layers and a head."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.LayerNorm(INPUTS), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(INPUTS, OUTPUTS))


def samples(count: int, *, weights: Sequence[float] | None = None, dtype: torch.dtype = torch.float32, seed: int = 1) -> Batch:
    """So many samples in one batch."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.ones(count) if weights is None else torch.tensor(weights)
    x, y = torch.randn(count, INPUTS, generator=generator), torch.randn(count, OUTPUTS, generator=generator)
    return Batch(x=x.to(dtype), y=y.to(dtype), weight=counts.to(dtype))


def cut(whole: Batch, sizes: Sequence[int]) -> list[Batch]:
    """A batch in micro-batches of these sizes."""
    parts = (tensor.split(list(sizes)) for tensor in (whole.x, whole.y, whole.weight))
    return [Batch(x=x, y=y, weight=weight) for x, y, weight in zip(*parts, strict=True)]


def micro_batches(count: int, size: int = 2, **given: Any) -> list[Batch]:
    """So many micro-batches of one size."""
    return cut(samples(count * size, **given), [size] * count)


def in_windows(batches: Sequence[Batch], size: int) -> Iterator[Sequence[Batch]]:
    """Runs of `size` micro-batches; the last may be shorter."""
    return (batches[i : i + size] for i in range(0, len(batches), size))


MakeOptimizer = Callable[[Any], Optimizer]

UNFUSED: dict[str, MakeOptimizer] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": partial(AdamW, lr=0.01, foreach=False),
    "AdamW foreach": partial(AdamW, lr=0.01, foreach=True),
    "Adagrad": partial(Adagrad, lr=0.05),
    "RMSprop": partial(RMSprop, lr=0.01, momentum=0.5),
    "Adafactor": partial(Adafactor, lr=0.05),
}
FUSED: dict[str, MakeOptimizer] = {
    "SGD fused": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "AdamW fused": partial(AdamW, lr=0.01, fused=True),
    "Adagrad fused": partial(Adagrad, lr=0.05, fused=True),
}
OPTIMIZERS = {**UNFUSED, **FUSED}


@dataclass(kw_only=True)
class ByHand:
    """A loop as the guides write it, with their mistakes corrected: clear, accumulate, unscale, clip, step, update."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    dtype: torch.dtype | None = None
    scaler: GradScaler | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    mean: bool = False

    def update(self, window: Sequence[Batch]) -> bool:
        """One update; whether a scaler let it happen."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        count = float(len(window)) if self.mean else float(sum(batch.weight.sum() for batch in window))
        for batch in window:
            with self._autocast():
                loss = mean_loss(self.model, batch) if self.mean else weighted_loss(self.model, batch)[0]
            self._scaled(loss.float() if loss.dtype != torch.float64 else loss, count).backward()
        return self.step()

    def step(self) -> bool:
        """The end of an update."""
        self._clip()
        if self.scaler is None:
            for optimizer in self.optimizers:
                optimizer.step()
            return True
        scale = self.scaler.get_scale()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= scale

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype is None else torch.autocast("cpu", self.dtype)

    def _scaled(self, loss: Tensor, count: float) -> Tensor:
        return loss / count if self.scaler is None else self.scaler.scale(loss / count)

    def _clip(self) -> None:
        clips = self.clip_norm is not None or self.clip_value is not None
        if clips and self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        held = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if self.clip_norm is not None:
            clip_grad_norm_(held, self.clip_norm)
        if self.clip_value is not None:
            clip_grad_value_(held, self.clip_value)


def as_if_on_a_device(engine: Engine) -> Engine:
    """The engine, ending its updates as it does where reading a tensor makes the host wait."""
    engine._performer.finish.on_host = False
    return engine


def state(model: nn.Module, *optimizers: Optimizer) -> dict[str, Any]:
    """Everything that an update may change, copied."""
    parts = {"model": model.state_dict(), **{f"optimizer {i}": o.state_dict() for i, o in enumerate(optimizers)}}
    return {name: _whole(value) if isinstance(value, Tensor) else value for name, value in _flat(parts)}


def _whole(tensor: Tensor) -> Tensor:
    """A copy; of a sharded tensor the whole of it, which all ranks must ask for."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def assert_bitwise(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """The two states are the same to the last bit; which differ is said."""
    assert ours.keys() == theirs.keys()
    differing = [name for name in ours if not _same(ours[name], theirs[name])]
    assert not differing


def assert_near(ours: dict[str, Any], theirs: dict[str, Any], *, rtol: float, atol: float) -> None:
    """The two states are the same to rounding."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, theirs[name], rtol=rtol, atol=atol, msg=lambda said, name=name: f"{name}: {said}")
        else:
            assert value == theirs[name], name


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))
    return bool(a == b)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else None
    if items is None:
        yield path, value
        return
    for key, one in items:
        yield from _flat(one, f"{path}/{key}")
