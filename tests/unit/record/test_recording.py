"""The recorder changes nothing, leaves nothing behind, and does not grow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfstep.record.tape as tape
from halfstep.events.vocabulary import Backward, Event, Fetch, Made, RunBegin, RunEnd, Step, ZeroGrad
from halfstep.record.places import Here
from halfstep.record.recorder import Recorder
from halfstep.record.session import Session
from halfstep.record.tape import Tape
from halfstep.record.telling import tell
from halfstep.record.verdict import reach
from halfstep.rules.settings import Settings


def train(*, amp: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", enabled=amp)
    data = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.randint(0, 2, (24,)))
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
            with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                loss = nn.functional.cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scheduler.step()
    return [*(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]


def heard_while(call: Callable[[], Any]) -> tuple[Any, Session]:
    session = Session()
    session.start()
    try:
        return call(), session
    finally:
        session.stop()


@pytest.mark.parametrize("amp", [False, True])
def test_results_are_bitwise_the_same_with_and_without(amp: bool) -> None:
    alone = train(amp=amp)
    watched, session = heard_while(lambda: train(amp=amp))
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert session.recorder.updates == 12
    assert (session.probing.failed, session.recorder.fault) == ({}, "")


WRAPPED = [
    (nn.Module, "__call__"),
    (nn.Module, "train"),
    (torch.autograd, "backward"),
    (torch.Tensor, "item"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.amp.GradScaler, "step"),
    (torch.utils.data.DataLoader, "__iter__"),
    (nn.utils, "clip_grad_norm_"),
    (torch, "save"),
]


def test_every_wrapper_and_hook_is_taken_out() -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer

    before = [vars(owner).get(name) for owner, name in WRAPPED]
    _, session = heard_while(lambda: None)
    assert [vars(owner).get(name) for owner, name in WRAPPED] == before
    hooks = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)
    assert [len(h) for h in (*hooks, module._global_module_registration_hooks)] == [0, 0, 0]
    assert session.patches == type(session.patches)()


def test_a_model_deep_copied_or_saved_while_watched_holds_nothing_of_ours() -> None:
    import copy
    import io

    def call() -> bytes:
        model = nn.Linear(2, 2)
        model(torch.ones(1, 2))
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(model), buffer)
        return buffer.getvalue()

    saved, _ = heard_while(call)
    assert b"halfstep" not in saved


def test_a_fault_of_the_recorder_ends_the_recording_and_not_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(amp=True)
    monkeypatch.setattr(Recorder, "say", lambda *_, **__: 1 / 0)
    watched, session = heard_while(lambda: train(amp=True))
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert session.recorder.fault == "the recording ended early: ZeroDivisionError: division by zero"


HERE = Here(None, (), (), "", False)


def hear(recorder: Recorder, updates: int) -> None:
    for index in range(updates):
        for kind, fields in ((Fetch, {"loader": None, "micro_batch": index}), (Backward, {}), (Step, {"optimizer": None})):
            recorder.say(kind, HERE, **fields)
        recorder.say(ZeroGrad, HERE)


def size(recorder: Recorder) -> int:
    drafts = [*recorder.tape.head, *recorder.tape.ring, *recorder.tape.made]
    return sum(sys.getsizeof(d) + sys.getsizeof(d.fields) for d in drafts)


def test_after_200_000_updates_the_tape_is_no_larger_than_after_10_000() -> None:
    recorder = Recorder()
    hear(recorder, 10_000)
    before = size(recorder)
    hear(recorder, 190_000)
    assert recorder.tape.heard == 800_000
    assert size(recorder) <= before
    assert len(recorder.tape.head) == tape.HEAD
    assert len(recorder.tape.ring) == tape.RING


def test_a_long_run_is_told_in_two_stretches_its_start_and_its_latest_part() -> None:
    recorder = Recorder()
    recorder.say(Made, HERE, what=None, facts={})
    hear(recorder, 10_000)
    first, latest = tell(recorder)
    assert len(first) == tape.HEAD + 1
    assert (type(first[0]), type(latest[0]), type(latest[1]), type(latest[-1])) == (RunBegin, RunBegin, Made, RunEnd)
    assert [e.serial for e in latest] == list(range(len(latest)))
    assert isinstance(latest[2], Fetch), "the latest part begins where an update begins"
    assert isinstance(latest[-2], ZeroGrad)


def test_a_short_run_is_told_whole() -> None:
    tapes = Tape()
    for _ in range(5):
        tapes.add(Event, HERE, {})
    assert [len(part) for part in tapes.parts()] == [5]


def train_long(updates: int, forget_from: int) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for update in range(updates):
        if update < forget_from:
            optimizer.zero_grad()
        model(torch.randn(2, 4)).pow(2).mean().backward()
        optimizer.step()


def test_after_its_start_a_run_is_heard_in_stretches_and_a_late_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "HEAD", 100)
    monkeypatch.setattr("halfstep.record.recorder.STRETCH", 8)
    monkeypatch.setattr("halfstep.record.recorder.REST", 32)
    _, session = heard_while(lambda: train_long(400, forget_from=200))
    assert session.recorder.updates == 400
    assert session.recorder.tape.heard < 600
    assert [f.rule for f in reach([session.heard()], Settings()).findings] == ["grad-zero-missing-branch"]
