"""An engine whose state is saved and loaded goes on to the last bit; and what it keeps meanwhile."""

from __future__ import annotations

import gc
import io
import json
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from halfstep import Engine
from halfstep.engine import Cause, Entry
from halfstep.errors import ConfigError, DataError
from halfstep.precision.scaler import ScalerSettings
from parity.by_hand import (
    FUSED,
    UNFUSED,
    Batch,
    as_if_on_a_device,
    assert_bitwise,
    cut,
    mean_loss,
    micro_batches,
    samples,
    state,
    tiny_model,
    weighted_loss,
)

SETTINGS = ScalerSettings(init_scale=2.0**12, growth_interval=3)


class Run:
    """All parts of a run that have a state."""

    def __init__(self, precision: str, *, fused: bool, on_host: bool) -> None:
        self.model = tiny_model(torch.bfloat16 if precision == "bf16-pure" else torch.float32)
        self.optimizer = (FUSED["AdamW fused"] if fused else UNFUSED["SGD"])(self.model.parameters())
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.engine = Engine(
            self.model,
            self.optimizer,
            loss=weighted_loss,
            scheduler=self.scheduler,
            ema=self.ema,
            precision=precision,
            scaler=SETTINGS,
            clip_norm=1.0,
        )
        if not on_host:
            as_if_on_a_device(self.engine)

    @property
    def parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("engine", "model", "optimizer", "scheduler", "ema")}

    def saved(self) -> io.BytesIO:
        """As a file that torch's safe loader reads."""
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in self.parts.items()}, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        kept = torch.load(file, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(kept[name])

    def everything(self) -> dict[str, Any]:
        told = {"engine": self.engine.state_dict(), "rates": self.scheduler.get_last_lr()}
        return {**state(self.model, self.optimizer), **{f"ema{k}": v for k, v in state(self.ema).items()}, **told}


def data(factors: list[float]) -> list[Batch]:
    whole = samples(2 * len(factors), weights=[float(1 + i % 3) for i in range(2 * len(factors))])
    return [b.times(f) for b, f in zip(cut(whole, [2] * len(factors)), factors, strict=True)]


@settings(max_examples=25)
@given(
    factors=st.lists(st.sampled_from([1.0, 1.0, 1.0, 1e38, math.inf]), min_size=2, max_size=8),
    precision=st.sampled_from(["fp32", "fp16", "bf16", "bf16-pure"]),
    fused=st.booleans(),
    on_host=st.booleans(),
    draw=st.data(),
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    factors: list[float], precision: str, fused: bool, on_host: bool, draw: st.DataObject
) -> None:
    batches = data(factors)
    if precision == "bf16-pure":
        batches = [Batch(x=b.x.bfloat16(), y=b.y.bfloat16(), weight=b.weight, factor=b.factor) for b in batches]
    stop = draw.draw(st.integers(0, len(batches)))
    whole, first, second = (Run(precision, fused=fused, on_host=on_host) for _ in range(3))
    for batch in batches:
        whole.engine.update([batch])
    for batch in batches[:stop]:
        first.engine.update([batch])
    second.load(first.saved())
    for batch in batches[stop:]:
        second.engine.update([batch])
    whole_end, resumed_end = whole.everything(), second.everything()
    for end in (whole_end, resumed_end):  # the reason says that it was kept
        end["engine"] = {k: v for k, v in end["engine"].items() if k != "precision_reason"}
    assert json.dumps(whole_end.pop("engine")) == json.dumps(resumed_end.pop("engine"))
    assert_bitwise(whole_end, resumed_end)


def engine_of(precision: str = "fp32", **given: Any) -> Engine:
    model = tiny_model()
    return Engine(model, UNFUSED["SGD"](model.parameters()), loss=mean_loss, precision=precision, **given)


def test_the_state_is_plain_numbers_and_text() -> None:
    engine = engine_of("fp16", scaler=SETTINGS)
    list(engine.updates([*micro_batches(2), micro_batches(1)[0].times(math.inf)]))
    kept = engine.state_dict()
    skips = kept["ledger"].pop("skips")
    assert [(skip["index"], skip["cause"]) for skip in skips] == [(3, "loss not finite")]
    assert sorted(kept.pop("randomness")) == ["numpy", "python", "torch"]
    assert json.loads(json.dumps(kept)) == {
        "version": 1,
        "precision": "fp16",
        "precision_reason": "asked for",
        "scaler": {"scale": 2.0**11, "growth": 0},
        "reference": 1.0,
        "micro_batch_parts": 1,
        "updates_begun": 3,
        "ledger": {"applied": 2, "in_a_row": 1},
        "counters": {"weight": 2.0, "micro_batches": 3, "samples": 6},
        "position": {
            "began": 1,
            "epoch": 1,
            "windows": 0,
            "micro_batches": 0,
            "ranks": 1,
            "accumulate": 1,
            "seed": None,
            "start": None,
            "ahead": None,
            "own": [],
        },
    }


def test_counts_go_on_where_they_were() -> None:
    first, second = engine_of(), engine_of()
    list(first.updates([micro_batches(1)[0].times(math.nan), *micro_batches(2)]))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [skip.index for skip in second.ledger.skips] == [1]
    assert second.ledger.causes() == {"loss not finite": 1}
    assert (second.ledger.applied, len(second.ledger)) == (2, 3)
    assert second.update(micro_batches(1)).index == 4
    assert len(list(second.updates(micro_batches(9), max_updates=5))) == 2


def test_the_precision_is_kept_with_its_reason_whatever_auto_would_choose() -> None:
    first, second = engine_of("bf16"), engine_of("auto")
    first.update(micro_batches(1))
    second.load_state_dict(first.state_dict())
    assert str(second.choices["precision"]) == "bf16 (kept on resume; then: asked for)"


def test_a_precision_that_was_asked_for_is_not_overridden_on_resume() -> None:
    first, second = engine_of("bf16"), engine_of("fp16")
    first.update(micro_batches(1))
    with pytest.raises(ConfigError) as told:
        second.load_state_dict(first.state_dict())
    assert str(told.value) == (
        '`precision = "fp16"` was asked for, and the checkpoint was trained in "bf16": a resumed run keeps its precision. '
        'Ask for "bf16" or "auto".'
    )


def test_a_precision_kept_twice_says_so_once() -> None:
    first, second, third = engine_of("bf16"), engine_of("auto"), engine_of("auto")
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    assert str(third.choices["precision"]) == "bf16 (kept on resume; then: asked for)"


def test_a_state_of_another_version_is_refused() -> None:
    engine = engine_of()
    with pytest.raises(DataError) as told:
        engine.load_state_dict({**engine.state_dict(), "version": 7})
    assert str(told.value) == "The engine state has version 7; this halfstep reads version 1."


def test_the_expected_weight_of_a_micro_batch_is_fixed_by_the_first_that_counts() -> None:
    """A power of two, so that it costs no rounding; masked micro-batches before it fix nothing."""
    model = tiny_model()
    engine = Engine(model, UNFUSED["SGD"](model.parameters()), loss=weighted_loss, precision="fp32")
    seen = []
    for weights in ([0.0, 0.0], [3.0, 2.0], [100.0, 0.0]):
        engine.update(micro_batches(1, weights=weights))
        seen.append(engine.state_dict()["reference"])
    assert seen == [None, 4.0, 4.0]


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
def test_micro_batches_are_let_go_once_their_update_is_settled(on_host: bool) -> None:
    """They are kept that long, to name a bad sample; an update and its ledger entry hold none."""
    model = tiny_model()
    engine = Engine(model, FUSED["AdamW fused"](model.parameters()), loss=loss_on_x, precision="fp32")
    engine = engine if on_host else as_if_on_a_device(engine)
    batch = torch.randn(2, 4)
    watched = weakref.ref(batch)
    update = engine.update([batch])
    del batch
    if not on_host:
        assert watched() is not None
        engine.settle()
    gc.collect()
    assert watched() is None
    assert update.applied


def loss_on_x(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_gradients_are_freed_when_an_update_ends() -> None:
    engine = engine_of()
    engine.update(micro_batches(2))
    assert all(p.grad is None for p in engine.module.parameters())


def test_an_update_shows_itself() -> None:
    engine = engine_of()
    good, bad = micro_batches(2)
    update, skipped = engine.update([good, good]), engine.update([bad.times(math.nan)])
    assert repr(update) == "Update(index=1, applied)"
    assert repr(skipped) == "Update(index=2, loss not finite: the loss is nan)"
    assert (update.scale, update.lr, update.micro_batches, update.weight) == (1.0, 0.05, 2, 2.0)
    assert (update.cause, update.skipped_because) == (None, None)


def test_an_entry_is_json() -> None:
    engine = engine_of()
    entry = engine.update([micro_batches(1)[0].times(math.inf)]).entry
    assert isinstance(entry, Entry)
    assert entry.to_dict() == {
        "index": 1,
        "applied": False,
        "cause": "loss not finite",
        "detail": "the loss is inf",
        "loss": math.inf,
        "grad_norm": pytest.approx(math.nan, nan_ok=True),
        "scale": 1.0,
        "weight": 1.0,
        "micro_batches": 1,
    }
    assert Cause(entry.to_dict()["cause"]) is Cause.LOSS


def test_gradients_that_the_user_left_are_not_added_to_an_update() -> None:
    ends = []
    for dirty in (True, False):
        engine = engine_of()
        if dirty:
            for p in engine.module.parameters():
                p.grad = torch.full_like(p, 1e3)
        engine.update(micro_batches(2))
        ends.append(state(engine.module))
    assert_bitwise(*ends)


def test_an_update_after_a_failed_one_starts_clean() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if batch.factor < 0:
            raise ZeroDivisionError("in the loss")
        return mean_loss(model, batch)

    ends = []
    for fails in (True, False):
        model = tiny_model()
        engine = Engine(model, UNFUSED["SGD"](model.parameters()), loss=loss, precision="bf16")
        good, bad = micro_batches(2)
        if fails:
            with pytest.raises(ZeroDivisionError):
                engine.update([good, bad.times(-1.0)])
            assert not torch.is_autocast_enabled("cpu")
        engine.update([good])
        ends.append(state(model))
        assert engine.ledger.applied == 1
    assert_bitwise(*ends)
