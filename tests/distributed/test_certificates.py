"""Certificates in which two ranks take part: of every model in `examples/configs`, made tiny, and of an engine that is broken."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed.conftest import Both
from examples.test_configs import CONFIGS, RUNS
from halfstep.certify import ranks, resume
from halfstep.certify.certificate import Line
from halfstep.certify.certifying import certify
from halfstep.certify.exact import exact
from halfstep.certify.others import Task
from halfstep.certify.ranks import rank_lines, run_as_rank
from halfstep.certify.resume import begin, go_on, two_ranks
from halfstep.certify.subject import Parts, Subject
from halfstep.checkpoint import Checkpoints
from halfstep.distributed.group import Group
from halfstep.errors import ModelError

PARTS: dict[str, Callable[[Subject, Path], None]] = {
    "ranks": run_as_rank,
    "begin": begin,
    "go-on": go_on,
    "two-ranks": two_ranks,
}
TINY: dict[str, tuple[str, ...]] = {
    "llama_full": ("data.sequence_length=16",),
    "llama_lora": ("data.sequence_length=64",),
    "gpt2": ("data.sequence_length=16", "model.config={n_layer = 2, n_head = 2, n_embd = 16, n_positions = 16}"),
    "bert_classification": (),
    "resnet": (
        'model.config={depths = [1, 1], hidden_sizes = [8, 16], embedding_size = 8, layer_type = "basic"}',
        "data.image_size=16",
    ),
    "vit": (),
    "own_model": ("batch.global=50",),
}
"""The models of the issue, and what makes them smaller still."""
NOT_ASKED = {"tf32", "1 x 8"}
"""A CPU has no TF32, and texts of different lengths do not go into one micro-batch."""

NO_BLOCKS = {"own_model": {"zero3"}}


class Killed(BaseException):
    """In place of the signal, which would end the tests."""


def in_this_process(task: Task) -> tuple[int, str]:
    """What `run_alone` does in another process."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "kill", killed)
            PARTS[task.part](task.subject, Path(task.folder))
    except Killed:
        return -signal.SIGKILL, ""
    return 0, ""


def on_a_rank(task: Task, place: str, sabotage: Callable[[pytest.MonkeyPatch], None] | None) -> None:
    """What each process does that torchrun starts."""
    group = torch.distributed
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(place)
        patch.setenv("RANK", str(group.get_rank()))
        patch.setenv("WORLD_SIZE", str(group.get_world_size()))
        if sabotage is not None:
            sabotage(patch)
        PARTS[task.part](task.subject, Path(task.folder))


@pytest.fixture
def certified(both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the processes of a certificate those of the tests; `sabotage` is what breaks the ranks."""

    def prepare(sabotage: Callable[[pytest.MonkeyPatch], None] | None = None) -> None:
        def run_ranks(task: Task, _: int) -> None:
            both(on_a_rank, task, str(tmp_path), sabotage)

        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(ranks, "run_ranks", run_ranks)
        monkeypatch.setattr(resume, "run_ranks", run_ranks)
        monkeypatch.setattr(resume, "run_alone", in_this_process)

    return prepare


def killed(*_: int) -> None:
    raise Killed


@pytest.mark.parametrize("name", TINY)
def test_the_engine_holds_its_certificate_on_every_model_of_the_examples(
    name: str, certified: Callable[..., Any], tmp_path: Path
) -> None:
    RUNS[name][0](tmp_path)
    certified()
    subject = Subject(config=str(CONFIGS / f"{name}.toml"), settings=("batch.global=8", *TINY[name]))
    lines = certify(subject).lines
    assert [line for line in lines if line.holds is False] == []
    assert {line.claim.split(":")[0] for line in lines if line.holds is None} <= NOT_ASKED | NO_BLOCKS.get(name, set())
    assert sum(line.holds is True for line in lines) >= 17


def make() -> tuple[nn.Module, Any, list[Any]]:
    torch.manual_seed(0)
    batches = [(torch.randn(3, 6), torch.randn(3, 1)) for _ in range(4)]
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(6, 1)), loss, batches


def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y = batch
    return (model(x) - y).square().sum(), len(y)


def found(tmp_path: Path) -> tuple[list[Line], Line]:
    tmp_path.mkdir(exist_ok=True)
    model, loss, batches = make()
    parts = Parts(model=model, loss=loss, batches=batches)
    right, subject = exact(parts, batches), Subject(factory="distributed.test_certificates:make")
    return list(rank_lines(subject, parts, right, tmp_path)), resume._moved(subject, parts, right, tmp_path)


def no_sum_over_ranks(patch: pytest.MonkeyPatch) -> None:
    """Loss and weight of a window stay this rank's."""

    class Own:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def wait(self) -> torch.Tensor:
            return self._tensor

    patch.setattr(Group, "start_sum", lambda _, tensor: Own(tensor))


def refused(patch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ModelError("this model has an odd shape")

    patch.setattr("halfstep.certify.recording.Engine", refuse)
    patch.setattr(resume, "Engine", refuse)


def test_ranks_that_do_not_add_their_weights_do_not_hold(certified: Callable[..., Any], tmp_path: Path) -> None:
    certified()
    lines, moved = found(tmp_path / "right")
    assert [line.holds for line in (*lines, moved)] == [True] * 4
    certified(no_sum_over_ranks)
    lines, _ = found(tmp_path / "broken")
    assert [line.holds for line in lines] == [False] * 3


def test_what_the_engine_refuses_is_not_asked(certified: Callable[..., Any], tmp_path: Path) -> None:
    certified(refused)
    lines, moved = found(tmp_path)
    assert [(line.holds, line.note) for line in (*lines, moved)] == [(None, "this model has an odd shape")] * 4


def test_ranks_that_fail_do_not_hold(certified: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certified()
    for module in (ranks, resume):
        monkeypatch.setattr(module, "run_ranks", lambda *_: "RuntimeError: gloo is gone")
    lines, moved = found(tmp_path)
    assert [(line.holds, line.figure) for line in (*lines, moved)] == [(False, "RuntimeError: gloo is gone")] * 4


def test_a_run_that_was_not_continued_on_one_process_does_not_hold(
    certified: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certified()
    monkeypatch.setattr(Checkpoints, "load", lambda *_: None)
    assert found(tmp_path)[1].holds is False
