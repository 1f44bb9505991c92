"""Losses of classifiers and masked language models, against plain PyTorch; losses of the user's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.errors import ModelError
from halfstep.train.tasks import LabelLoss, OwnLook


class Head(nn.Module):
    """Logits of five classes, alone or as transformers returns them."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        self.linear, self.wrapped = nn.Linear(3, 5), wrapped

    def forward(self, x: Tensor) -> object:
        logits = self.linear(x)
        return SimpleNamespace(logits=logits) if self.wrapped else logits


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("shape", [(6,), (2, 3)], ids=["a class each", "a token each"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_count_and_gradient_are_those_of_plain_pytorch(wrapped: bool, shape: tuple[int, ...], smoothing: float) -> None:
    model = Head(wrapped)
    x, labels = torch.randn(*shape, 3), torch.randint(5, shape)
    labels.view(-1)[1] = -100
    total, count = LabelLoss(label_smoothing=smoothing)(model, {"x": x, "labels": labels})
    total.backward()
    found = model.linear.weight.grad
    model.zero_grad()
    kept = labels.view(-1) != -100
    plain = F.cross_entropy(model.linear(x).view(-1, 5)[kept], labels.view(-1)[kept], reduction="sum", label_smoothing=smoothing)
    plain.backward()
    assert (total.item(), count.item()) == (pytest.approx(plain.item(), rel=1e-6), 5)
    torch.testing.assert_close(found, model.linear.weight.grad)


def test_a_look_counts_what_is_right_and_leaves_out_what_has_no_label() -> None:
    model, x = Head(True), torch.randn(4, 3)
    best = model.linear(x).argmax(-1)
    labels = torch.stack([best[0], (best[1] + 1) % 5, best[2], torch.tensor(-100)])
    total, count, right = LabelLoss().look(model, {"x": x, "labels": labels})
    assert (count.item(), right.item()) == (3, 2)
    assert total.item() == pytest.approx(F.cross_entropy(model.linear(x[:3]), labels[:3], reduction="sum").item(), rel=1e-6)


def test_a_model_without_logits_is_refused() -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"out": x}

    with pytest.raises(ModelError) as error:
        LabelLoss()(Silent(), {"x": torch.zeros(1), "labels": torch.zeros(1)})
    assert str(error.value) == (
        "The model returned dict; it must return its logits, alone or as `logits`, or `model.loss` must name a loss of your own."
    )


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (torch.tensor(2.0), (2.0, 1.0)),
        (torch.tensor([2.0]), (2.0, 1.0)),
        ((torch.tensor(6.0), 3), (6.0, 3.0)),
        ((torch.tensor(6.0), torch.tensor(3)), (6.0, 3.0)),
    ],
)
def test_a_loss_of_the_users_own_is_looked_at_as_it_is_trained_on(result: object, expected: tuple[float, float]) -> None:
    total, weight = OwnLook(loss=lambda model, batch: result)(Head(False), None)  # type: ignore[arg-type, return-value]
    assert (float(total), float(weight)) == expected
