"""Each line of a certificate falls when the engine is broken where it looks: a claim that cannot fail proves nothing."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.certify import precisions, resume, skips, splits
from halfstep.certify.certificate import Line
from halfstep.certify.exact import exact
from halfstep.certify.others import Task
from halfstep.certify.recording import update_of
from halfstep.certify.resume import begin, go_on
from halfstep.certify.subject import Parts, Subject
from halfstep.checkpoint import Checkpoints
from halfstep.engine import Engine, engine, finish, window
from halfstep.engine.finish import Finish, norm_on_host
from halfstep.engine.loss import sum_and_weight
from halfstep.engine.reading import Reader
from halfstep.engine.update import Update
from halfstep.precision.scaler import LossScaler

Break = Callable[[pytest.MonkeyPatch], None]
SUBJECT = Subject(factory="unit.certify.test_sabotage:make")


def summed(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum", ignore_index=-1), int((y != -1).sum())


def make() -> tuple[nn.Module, Any, list[Any]]:
    """Tokens are masked, so that micro-batches differ in what counts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(4)]
    batches[0][1][:3] = -1
    return model, summed, batches


def parts() -> Parts:
    model, loss, batches = make()
    return Parts(model=model.eval(), loss=loss, batches=batches)


def split_lines() -> list[Line]:
    return list(splits.split_lines(parts(), exact(parts(), parts().batches)))


def skip_lines() -> list[Line]:
    return list(skips.skip_lines(parts(), exact(parts(), parts().batches)))


def precision_lines() -> list[Line]:
    return list(precisions.precision_lines(parts()))


def fallen(lines: list[Line]) -> list[str]:
    return [line.claim for line in lines if line.holds is False]


def means_of_means(patch: pytest.MonkeyPatch) -> None:
    """A micro-batch counts as one, whatever is in it."""

    def mean(result: Any, share: float = 1.0) -> tuple[torch.Tensor, float]:
        total, weight = sum_and_weight(result, share)
        return total / max(float(weight), 1.0), 1.0

    for name in ("halfstep.engine.accumulation.sum_and_weight", "halfstep.engine.window.sum_and_weight"):
        patch.setattr(name, mean, raising=False)


def a_wrong_loss_reported(patch: pytest.MonkeyPatch) -> None:
    true = Update.loss.fget  # type: ignore[attr-defined]
    patch.setattr(Update, "loss", property(lambda update: true(update) / 4))


def a_tail_over_a_whole_window(patch: pytest.MonkeyPatch) -> None:
    """The last window is divided by what a whole one counts."""
    true = window.Window.totals

    def totals(self: Any, *, on_host: bool) -> Any:
        loss, weight = true(self, on_host=on_host)
        return loss, weight * 4 if self.micro_batches == 1 else weight

    patch.setattr(window.Window, "totals", totals)


def clipping_of_scaled_gradients(patch: pytest.MonkeyPatch) -> None:
    def by_host(self: Any, gradients: list[torch.Tensor], unit: float) -> Any:
        norm = norm_on_host(gradients)
        if self._clip_norm is not None:
            unit *= min(1.0, self._clip_norm / norm)
        self._multiply(gradients, unit)
        self._step(None, None)
        return finish.Outcome(grad_norm=norm, skipped=False)

    patch.setattr(Finish, "_by_host", by_host)


def clipping_of_the_largest_layer_only(patch: pytest.MonkeyPatch) -> None:
    """The norm is what was asked for, the direction is not."""
    true = Finish._multiply

    def multiply(self: Any, gradients: list[torch.Tensor], multiplier: Any) -> None:
        before = norm_on_host(gradients) * float(multiplier)
        true(self, gradients, multiplier)
        gradients[0].zero_()
        torch._foreach_mul_(gradients, before / norm_on_host(gradients))

    patch.setattr(Finish, "_multiply", multiply)


def no_overflow_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(finish, "math", type("Math", (), {"isfinite": lambda _: True, "fsum": sum, "sqrt": math.sqrt}))


def gradients_left_behind(patch: pytest.MonkeyPatch) -> None:
    """A skipped window leaves gradients for the next one to be added to."""
    true = Finish.clear

    def clear(self: Any) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        overflowed = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        if overflowed:
            for gradient in gradients:
                gradient.fill_(1.0)
        elif not getattr(self, "keeps", False):
            true(self)
        self.keeps = overflowed

    patch.setattr(Finish, "clear", clear)


def a_scheduler_that_steps_always(patch: pytest.MonkeyPatch) -> None:
    class Stepping(Engine):
        def update(self, micro_batches: Any) -> Update:
            made = super().update(micro_batches)
            if not made.applied:
                self.schedulers[0].step()
            return made

    patch.setattr(skips, "Engine", Stepping)


def a_scale_that_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossScaler, "update", lambda *_: None)


def fp32_whatever_is_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(precisions, "update_of", lambda parts, batches, **_: update_of(parts, batches))


def a_backward_that_halves(patch: pytest.MonkeyPatch) -> None:
    true = window.backward
    patch.setattr(window, "backward", lambda total, root, **given: true(total, root * 0.5, **given))


DIVISIONS = ["as it was given", "1 x 16", "16 x 1", "uneven", "ragged", "the last window"]
CLIPPED, CLIPPED_FP16 = "clipping at half of the true norm:", "clipping at half of the true norm under"
HALVED, SKIPPED = "an overflow in the middle of a window halves", "an overflow in the middle of a window:"
SCHEDULER, AFTER = "the scheduler moves", "the update after a skipped one"


@pytest.mark.parametrize(
    ("sabotage", "lines", "claims"),
    [
        (means_of_means, split_lines, ["as it was given", "16 x 1", "uneven", "ragged"]),
        (a_wrong_loss_reported, split_lines, DIVISIONS),
        (a_backward_that_halves, split_lines, DIVISIONS),
        (a_tail_over_a_whole_window, split_lines, ["1 x 16", "the last window"]),
        (clipping_of_scaled_gradients, skip_lines, [CLIPPED, CLIPPED_FP16, HALVED, SKIPPED, SCHEDULER, AFTER]),
        (clipping_of_the_largest_layer_only, skip_lines, [CLIPPED, CLIPPED_FP16, AFTER]),
        (no_overflow_check, skip_lines, [CLIPPED_FP16, HALVED, SKIPPED, SCHEDULER, AFTER]),
        (gradients_left_behind, skip_lines, [AFTER]),
        (a_scheduler_that_steps_always, skip_lines, [SCHEDULER]),
        (a_scale_that_stays, skip_lines, [CLIPPED_FP16, HALVED]),
        (fp32_whatever_is_asked, precision_lines, ["fp16", "bf16"]),
    ],
    ids=lambda given: given.__name__ if callable(given) else "",
)
def test_a_broken_engine_does_not_hold(
    sabotage: Break, lines: Callable[[], list[Line]], claims: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fallen(lines()) == []
    sabotage(monkeypatch)
    found = fallen(lines())
    assert [claim for claim in found if not claim.startswith(tuple(claims))] == []
    assert [claim for claim in claims if not any(each.startswith(claim) for each in found)] == []


def test_a_claim_about_fp16_is_not_asked_of_a_model_without_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return model(batch[0]).square().sum(), len(batch[1])

    lines = {line.claim[:4]: line for line in precisions.precision_lines(Parts(model=Scale(), loss=loss, batches=make()[2]))}
    assert (lines["bf16"].holds, lines["fp16"].holds) == (None, None)
    assert lines["bf16"].note == "no operator of this model is rounded to bf16 by autocast"


def in_this_process(task: Task) -> tuple[int, str]:
    """What `run_alone` does, without another process: a run that would be killed ends with the signal's number."""
    try:
        {"begin": begin, "go-on": go_on}[task.part](task.subject, Path(task.folder))
    except ZeroDivisionError:
        return -signal.SIGKILL, ""
    return 0, ""


def killed(tmp_path: Path, patch: pytest.MonkeyPatch) -> Line:
    tmp_path.mkdir()
    patch.setattr(resume, "run_alone", in_this_process)
    patch.setattr(os, "kill", lambda *_: 1 / 0)
    model, loss, batches = make()
    return resume._killed(SUBJECT, Parts(model=model, loss=loss, batches=batches), tmp_path)


def without_randomness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "set_randomness", lambda *_: None)


def without_optimizer(patch: pytest.MonkeyPatch) -> None:
    true = Checkpoints.load

    def load(self: Checkpoints, engine: Engine) -> None:
        true(self, engine)
        engine.optimizers[0].state.clear()

    patch.setattr(Checkpoints, "load", load)


def without_scheduler(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.optim.lr_scheduler.LambdaLR, "load_state_dict", lambda *_: None)


def without_position(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reader, "go_to", lambda *_: None)


@pytest.mark.parametrize("sabotage", [without_randomness, without_optimizer, without_scheduler, without_position])
def test_a_resume_that_forgets_something_does_not_hold(sabotage: Break, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert killed(tmp_path / "right", monkeypatch).holds
    sabotage(monkeypatch)
    line = killed(tmp_path / "broken", monkeypatch)
    assert line.holds is False
    assert "the first that differs is" in line.figure
