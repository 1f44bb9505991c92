"""What a certificate says of right and of wrong numbers, each on a model made to be so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.certify.certificate import Certificate, Line, Topic
from halfstep.certify.exact import apart, by_hand, exact
from halfstep.certify.page import to_page, to_text
from halfstep.certify.precisions import precision_lines
from halfstep.certify.recording import recorded, update_of
from halfstep.certify.skips import skip_lines
from halfstep.certify.splits import MEAN, split_lines
from halfstep.certify.stillness import still
from halfstep.certify.subject import Parts
from halfstep.engine.loss import LossFunction
from halfstep.errors import ModelError


def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum", ignore_index=-1), int((y != -1).sum())


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, ignore_index=-1)


def parts(loss: LossFunction = summed, *, masked: bool = False, middle: Callable[[], nn.Module] = nn.Tanh) -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), middle(), nn.Linear(16, 3))
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(4)]
    if masked:
        batches[0][1][:3] = -1
    return Parts(model=model, loss=loss, batches=batches)


def splits(given: Parts) -> list[Line]:
    return list(split_lines(given, exact(given, given.batches)))


def skips(given: Parts) -> list[Line]:
    return list(skip_lines(given, exact(given, given.batches)))


def verdicts(lines: Sequence[Line]) -> dict[str, bool | None]:
    return {line.claim.split(":")[0].split(",")[0]: line.holds for line in lines}


def test_every_division_gives_the_update_of_a_sum_with_its_weight() -> None:
    lines = splits(parts(masked=True))
    assert verdicts(lines) == dict.fromkeys(
        ["as it was given", "1 x 16", "16 x 1", "uneven", "ragged", "the last window of an epoch"], True
    )
    assert all("of its norm away" in line.figure and "plain PyTorch" in line.tolerance for line in lines)


def test_a_mean_over_tokens_is_another_update_in_another_division_and_the_certificate_says_so() -> None:
    lines = splits(parts(mean, masked=True))
    found = verdicts(lines)
    assert found["as it was given"] is True
    assert found["1 x 16"] is False
    assert found["uneven"] is None
    assert [line.note for line in lines if line.holds is None] == [MEAN]


def test_tensors_of_different_lengths_are_not_put_into_one_micro_batch() -> None:
    ragged = parts()
    short = [(torch.randn(4, n), torch.randint(3, (4,))) for n in (6, 5)]
    model = nn.Sequential(nn.AdaptiveAvgPool1d(6), ragged.model)
    (whole, *_) = [line for line in splits(Parts(model=model, loss=summed, batches=short)) if line.claim.startswith("1 x 8")]
    assert whole.holds is None
    assert whole.note == "the micro-batches have tensors of different lengths, which do not go into one"


def test_a_gradient_that_was_divided_once_too_often_is_not_held() -> None:
    def halved(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        total, weight = summed(model, batch)
        total.register_hook(lambda gradient: gradient / 2)
        return total, weight

    right = exact(parts(), parts().batches)
    found, _ = update_of(parts(halved), parts().batches)
    assert right.deviation(found)[0] == pytest.approx(0.5, rel=1e-6)


def test_skips_leave_everything_and_the_scheduler_counts_what_was_applied() -> None:
    lines = skips(parts())
    assert [line.holds for line in lines] == [True] * 6
    assert lines[2].figure == "scale 2, then 1; 1 of 2 updates applied"
    assert lines[3].figure == "2 of 2 skipped updates left everything as it was"
    assert lines[4].figure == "4 steps after 4 applied and 2 skipped updates"


def test_half_precisions_are_judged_by_layer() -> None:
    lines = {line.claim.split(":")[0]: line for line in precision_lines(parts())}
    assert {name: line.holds for name, line in lines.items()} == {"fp16": True, "bf16": True, "tf32": None}
    assert lines["tf32"].note == "cpu has no TF32"
    assert "the worst of 4 layers" in lines["bf16"].figure


def test_a_layer_that_half_precision_ruins_is_named() -> None:
    class Cancelling(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 4096 + 1) - x * 4096 if x.dtype is torch.float32 else x * 0

    ruined = parts(middle=Cancelling)
    lines = {line.claim.split(":")[0]: line for line in precision_lines(ruined)}
    assert lines["bf16"].holds is False
    assert "0.weight" in lines["bf16"].figure or "2.weight" in lines["bf16"].figure


def test_dropout_and_batch_statistics_are_switched_off_and_said() -> None:
    stilled, notes = still(parts(middle=lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5))))
    assert [note.split(" ", 1)[1][:15] for note in notes[:2]] == ["dropout modules", "batch norms tak"]
    assert "moves by" in notes[2]
    assert stilled.model.training
    assert {v for k, v in verdicts(splits(stilled)).items()} == {True}


def test_randomness_of_the_models_own_is_found_and_evaluation_mode_taken() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.randn_like(x) if self.training else x

    stilled, notes = still(parts(middle=Noisy))
    assert not stilled.model.training
    assert "`model.eval()`" in notes[0]


def test_batch_norm_without_running_statistics_is_explained_where_divisions_do_not_hold_for_it() -> None:
    stilled, notes = still(parts(middle=lambda: nn.BatchNorm1d(16, track_running_stats=False)))
    assert notes[0] == (
        "1 batch norms keep no running statistics and so take them over a micro-batch always: other divisions do not hold for "
        "that, in any framework. Group norm, or `track_running_stats=True`, is the cure."
    )
    found = {line.claim[:4]: line for line in splits(stilled)}
    assert found["1 x "].holds is False
    assert (found["16 x"].holds, found["ragg"].holds) == (None, None)
    assert found["16 x"].note.startswith(
        "the model takes no such micro-batches: ValueError: Expected more than 1 value per channel"
    )


def test_the_loss_scale_is_asked_of_a_model_that_takes_no_single_sample() -> None:
    stilled, _ = still(parts(middle=lambda: nn.BatchNorm1d(16, track_running_stats=False)))
    found = {line.claim: line.holds for line in skip_lines(stilled, exact(stilled, stilled.batches))}
    assert found["an overflow in the middle of a window halves the loss scale, once, and the next update is applied"] is True


def test_a_gradient_of_zero_certifies_nothing() -> None:
    given = parts(lambda model, batch: (summed(model, batch)[0] * 0, 4))
    with pytest.raises(ModelError) as raised:
        exact(given, given.batches).must_say_something()
    assert str(raised.value) == (
        "The gradient of the global batch has norm 0 and its loss is 0: nothing can be certified by it. Give a batch that the "
        "model learns something from."
    )


def test_by_hand_is_the_sum_over_the_weights() -> None:
    given = parts(masked=True)
    x, y = (torch.cat(column) for column in zip(*given.batches, strict=True))
    total, weight = summed(given.model.double(), (x.double(), y))
    torch.autograd.backward(total / weight)
    expected = {name: p.grad for name, p in given.model.named_parameters() if p.grad is not None}
    found = by_hand(parts(masked=True), given.batches, torch.float64)
    assert apart(expected, found.gradients)[0] < 1e-14
    assert found.loss == pytest.approx(float(total.detach()) / weight, rel=1e-14)


def test_a_missing_gradient_is_infinitely_far_away() -> None:
    assert apart({"a": torch.ones(1)}, {})[0] == float("inf")
    assert apart({"a": torch.ones(1)}, {"a": torch.tensor([float("nan")])})[0] != 0.0


def test_recording_moves_nothing() -> None:
    given = parts()
    engine, optimizer = recorded(given, accumulate=4)
    before = [p.detach().clone() for p in engine.module.parameters()]
    assert engine.update(given.batches).applied
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    assert len(optimizer.heard) == 1


def certificate(*holds: bool | None) -> Certificate:
    lines = [Line(topic=Topic.SPLITS, claim=f"claim {n} <b>", holds=h, figure="1e-7", note="why") for n, h in enumerate(holds)]
    return Certificate(subject="a model", machine="a machine", lines=lines, notes=["`eval`"], seconds=1.0)


@pytest.mark.parametrize(
    ("holds", "headline", "whole"),
    [
        ((True, True), "All 2 claims held.", True),
        ((True, None), "All 1 claims held. 1 could not be asked; each says why.", True),
        ((True, False, None), "1 of 2 claims held. 1 could not be asked; each says why.", False),
    ],
)
def test_headline(holds: tuple[bool | None, ...], headline: str, whole: bool) -> None:
    made = certificate(*holds)
    assert (made.headline, made.holds, made.to_dict()["holds"]) == (headline, whole, whole)
    assert headline in to_text(made)
    page = to_page(made)
    assert headline in page
    assert "claim 0 &lt;b&gt;" in page
