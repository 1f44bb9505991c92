"""Probes hang into a loop that the recorder hears, each pair of model and optimizer its own; no error of theirs reaches it."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep.events.vocabulary import ScaleRead
from halfstep.record.library import watch
from halfstep.record.probes.numbers import Numbers
from halfstep.record.probing import MOST_PAIRS
from halfstep.record.session import Session
from unit.record.watched import mlp, squares

NAN = float("nan")


def heard(session: Session, loop: object) -> Session:
    session.start()
    try:
        loop()  # type: ignore[operator]
    finally:
        session.stop()
    return session


def train(model: nn.Module, x: Tensor, workers: int = 0) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x, torch.zeros(len(x), 4)), batch_size=4, num_workers=workers)
    for inputs, targets in loader:
        optimizer.zero_grad()
        squares(model(inputs), targets).backward()
        optimizer.step()


def test_a_script_that_knows_nothing_gets_the_samples_of_its_bad_batch_named() -> None:
    x = torch.randn(12, 4)
    x[9, 0] = NAN
    measured = heard(Session(), lambda: train(mlp(), x)).heard().measured
    (finding,) = measured["findings"]
    assert finding.rule == "data-not-finite"
    assert "`args[0]`, sample 1 of 4; update 2, micro-batch 0 (samples 8, 9, 10, 11), rank 0" in finding.message
    assert [part.title for part in measured["parts"]][:2] == ["Loss", "Gradient norm"]
    assert pickle.loads(pickle.dumps(measured)) is not None


def test_each_pair_of_a_gan_has_probes_of_its_own() -> None:
    made, told = mlp(), nn.Linear(4, 1)

    def loop() -> None:
        first = torch.optim.SGD(told.parameters(), lr=0.01)
        second = torch.optim.SGD(made.parameters(), lr=0.01)
        for _ in range(3):
            fake = made(torch.randn(8, 4))
            told(fake.detach()).mean().backward()
            first.step()
            told(fake).mean().backward()
            second.step()
        seen.extend((pair.model() is told, pair.updates) for pair in session.probing.pairs)

    seen: list[tuple[bool, int]] = []
    session = Session()
    heard(session, loop)
    assert seen == [(False, 3), (True, 3)]
    assert session.probing.pairs == [], "models are let go at the end"
    titles = [part.title for part in session.heard().measured["parts"]]
    losses = [part for part in session.heard().measured["parts"] if part.title.startswith("Loss")]
    assert [len(part.series[0].points) for part in losses] == [3, 3]
    assert "Gradient norm" in titles
    assert "Gradient norm, Linear (2)" in titles


def test_an_error_of_a_probe_is_told_and_the_script_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Numbers, *_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(Numbers, "_look", fail)
    model = mlp()
    before = model[0].weight.detach().clone()
    measured = heard(Session(), lambda: train(model, torch.randn(8, 4))).heard().measured
    assert not torch.equal(model[0].weight, before)
    (failed,) = [part for part in measured["parts"] if part.title == "Probes that failed"]
    assert failed.rows == (("Numbers", "RuntimeError: no"),)


def test_probes_say_nothing_on_the_tape_and_leave_no_hook() -> None:
    model, x = mlp(), torch.randn(16, 4)
    x[5] = NAN

    def loop() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        for row in range(0, 16, 4):
            optimizer.zero_grad()
            scaler.scale(squares(model(x[row : row + 4]), torch.zeros(4, 4))).backward()
            scaler.step(optimizer)
            scaler.update()

    session = heard(Session(), loop)
    (events,) = session.heard().stretches
    assert sum(type(event).__name__ == "Forward" for event in events) == 4
    assert not any(isinstance(event, ScaleRead) for event in events)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_models_that_the_script_lets_go_of_are_not_kept_alive_and_still_told_of() -> None:
    def fold() -> tuple[weakref.ref[nn.Module], weakref.ref[torch.optim.Optimizer]]:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
        return weakref.ref(model), weakref.ref(optimizer)

    gc.disable()
    try:
        with watch() as watched:
            alive = [ref() for _ in range(MOST_PAIRS + 1) for ref in fold()]
    finally:
        gc.enable()
    assert set(alive) == {None}
    titles = [part.title for part in watched.parts if part.title.startswith("Loss")]
    assert titles == ["Loss", *(f"Loss, Linear ({number})" for number in range(2, MOST_PAIRS + 2))]
