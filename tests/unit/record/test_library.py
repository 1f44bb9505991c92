import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import UsageError


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, forget: bool) -> None:
    for _ in range(3):
        if not forget:
            optimizer.zero_grad()
        model(torch.randn(4, 2)).pow(2).mean().backward()
        optimizer.step()


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def test_a_block_is_judged_when_it_ends() -> None:
    model, optimizer = parts()
    with halfstep.watch(model, optimizer) as watched:
        train(model, optimizer, forget=True)
    assert [(f.rule, f.path == __file__) for f in watched.findings] == [("grad-zero-missing", True)]
    assert "model(torch.randn(4, 2)).pow(2).mean().backward()" in watched.report()
    assert watched.parts


def test_a_right_block_has_no_findings() -> None:
    model, optimizer = parts()
    with halfstep.watch(model, optimizer) as watched:
        train(model, optimizer, forget=False)
    assert watched.report() == "No findings."


def test_an_error_in_the_block_is_passed_on_after_it_was_judged() -> None:
    model, optimizer = parts()
    watched = halfstep.watch(model, optimizer)

    def failing() -> None:
        with watched:
            train(model, optimizer, forget=True)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        failing()
    assert [f.rule for f in watched.findings] == ["grad-zero-missing"]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(UsageError) as raised:
        halfstep.watch([1])
    expected = (
        "`halfstep.watch` was given a list; it takes models, optimizers and GradScalers, and hears loaders and schedulers itself."
    )
    assert str(raised.value) == expected
