"""The parameters that an optimizer trains, in at most a few dozen groups that a person can look at: layers."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from halfstep.record.probes.rerun import inner

MOST_LAYERS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Parameters by layer.

    Attributes:
        held: the parameters of the model that the optimizer holds, none of which is kept alive.
        paths: the name of each.
        owner: for each parameter, the index of its layer in `names`.
        names: the path of each layer, in the order of the model.
    """

    held: tuple[weakref.ref[nn.Parameter], ...]
    paths: tuple[str, ...]
    owner: tuple[int, ...]
    names: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Layers:
        """The parameters of `model` that `optimizer` trains."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(name, p) for name, p in inner(model).named_parameters() if id(p) in held]
        paths = tuple(name for name, _ in named)
        layers = grouped([path.rpartition(".")[0] for path in paths])
        names = tuple(dict.fromkeys(layers))
        place = {name: number for number, name in enumerate(names)}
        owner = tuple(place[layer] for layer in layers)
        return Layers(held=tuple(weakref.ref(p) for _, p in named), paths=paths, owner=owner, names=names)

    def parameters(self) -> Iterator[tuple[int, nn.Parameter]]:
        """The parameters that live, each with its index."""
        return ((index, parameter) for index, held in enumerate(self.held) if (parameter := held()) is not None)


def grouped(paths: Sequence[str]) -> list[str]:
    """Each module's path, cut short until at most a few dozen differ: `blocks.3.attention.key` becomes `blocks.3`."""
    depth = max((path.count(".") + 1 for path in paths), default=1)
    while depth > 1 and len({_cut(path, depth) for path in paths}) > MOST_LAYERS:
        depth -= 1
    return [_cut(path, depth) or "(model)" for path in paths]


def norms_of(layers: Layers) -> list[float]:
    """The norm of each layer's gradient, in FP32; 0 where it has none. One read of the gradients, one wait for the device."""
    owner, gradients = [], []
    for index, parameter in layers.parameters():
        if parameter.grad is not None:
            owner.append(layers.owner[index])
            gradients.append(values(parameter.grad))
    squares = [0.0] * len(layers.names)
    for layer, norm, gradient in zip(owner, _read(gradients), gradients, strict=True):
        norm = norm if math.isfinite(norm) else wide_norm(gradient)
        squares[layer] += norm * norm
    return list(map(math.sqrt, squares))


def _read(gradients: list[Tensor]) -> list[float]:
    if not gradients:
        return []
    norms = torch._foreach_norm(gradients, 2, torch.float32)
    device = norms[0].device
    read: list[float] = torch.stack([norm if norm.device == device else norm.to(device) for norm in norms]).tolist()
    return read


def wide_norm(gradient: Tensor) -> float:
    """The norm where the squares of finite values may have left FP32."""
    return float(gradient.double().norm()) if gradient.device.type != "mps" else float(gradient.float().norm())


def values(tensor: Tensor) -> Tensor:
    """What a tensor holds on this rank: of a sparse one the values that are there, of a sharded one its own shard."""
    held = tensor.detach()
    if held.is_sparse:
        return held._values()
    return held.to_local() if hasattr(held, "to_local") else held


def _cut(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth])
