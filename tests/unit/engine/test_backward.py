"""The short way into autograd's engine computes what the public way does, and hides nothing from those who listen there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from halfstep import Engine
from halfstep.engine.backward import backward


def graph() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return model, model(torch.randn(5, 4)).square().sum()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_are_bitwise_those_of_the_public_way() -> None:
    root = torch.tensor(0.3)
    short, total = graph()
    backward(total, root, retain_graph=False)
    public, total = graph()
    torch.autograd.backward(total, grad_tensors=root)
    assert len(gradients(short)) == 4
    assert all(torch.equal(a, b) for a, b in zip(gradients(short), gradients(public), strict=True))


def test_a_kept_graph_adds_its_gradients_again_and_a_freed_one_is_refused() -> None:
    model, total = graph()
    backward(total, torch.tensor(1.0), retain_graph=True)
    once = [gradient.clone() for gradient in gradients(model)]
    backward(total, torch.tensor(1.0), retain_graph=False)
    assert all(torch.equal(twice, 2 * first) for twice, first in zip(gradients(model), once, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        backward(total, torch.tensor(1.0), retain_graph=False)


def test_someone_in_the_place_of_the_public_backward_hears_every_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[float] = []
    original = torch.autograd.backward

    def listening(tensors: Any, *args: Any, **kwargs: Any) -> None:
        heard.append(tensors.item())
        original(tensors, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", listening)
    model = nn.Linear(2, 1)
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda m, x: m(x).square().mean(), precision="fp32", accumulate=2
    )
    update = engine.update([torch.randn(3, 2) for _ in range(2)])
    assert len(heard) == 2
    assert update.loss == pytest.approx(sum(heard) / 2)


def test_a_function_mode_sees_backward() -> None:
    seen: list[Any] = []

    class Listening(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    _, total = graph()
    with Listening():
        backward(total, torch.tensor(1.0), retain_graph=False)
    assert torch.autograd.backward in seen


def test_the_log_of_the_graph_is_still_written(caplog: pytest.LogCaptureFixture) -> None:
    _, total = graph()
    with caplog.at_level(logging.DEBUG, logger="torch.autograd.graph"):
        backward(total, torch.tensor(1.0), retain_graph=False)
    assert any("SumBackward" in record.getMessage() for record in caplog.records)
