"""A group of one, devices without process groups, and buckets."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from halfstep import Engine
from halfstep.distributed import Group, World, connect, group, local_device
from halfstep.distributed.buckets import BUCKET_BYTES, buckets_of
from halfstep.distributed.ddp import ddp_in, unwrap, without_sync
from halfstep.distributed.failure import explain
from halfstep.errors import DeviceError, ModelError, RunStopped


def test_a_group_of_one_changes_nothing() -> None:
    alone = Group(World())
    model = nn.BatchNorm1d(2)
    model.weight.grad = torch.ones(2)
    alone.sum_gradients(list(model.parameters()))
    alone.equalise(model)
    alone.broadcast_buffers(model)
    alone.barrier()
    with pytest.raises(ValueError, match="mine"), alone.failures_told():
        raise ValueError("mine")
    assert model.weight.grad.tolist() == [1.0, 1.0]
    assert model.bias.grad is None
    assert alone.max(3.0, -1.0) == [3.0, -1.0]
    assert alone.mean(6.0, 4.0) == 1.5
    assert str(alone.mean(0.0, 0.0)) == "nan"
    item = object()
    assert alone.from_first(item) is item
    tensor = torch.tensor([1.0])
    assert all(pending.wait() is tensor for pending in (alone.start_sum(tensor), alone.start_largest(tensor)))


def test_several_ranks_on_mps_are_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(DeviceError) as told:
        connect(torch.device("mps"))
    assert str(told.value) == (
        "2 ranks were started with the model on MPS, for which torch has no process group. Start one process, or put the model "
        "on the CPU."
    )


def test_one_process_on_mps_needs_no_group() -> None:
    assert connect(torch.device("mps")).alone


@pytest.mark.parametrize(("kind", "device"), [("cuda", "cuda:3"), ("xpu", "xpu:3"), ("mps", "mps"), ("cpu", "cpu")])
def test_ranks_of_one_machine_are_dealt_its_accelerators(monkeypatch: pytest.MonkeyPatch, kind: str, device: str) -> None:
    monkeypatch.setattr(group, "accelerator_device", lambda: torch.device(kind))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device() == torch.device(device)


def test_buckets_hold_one_dtype_and_about_25_mib() -> None:
    quarter = BUCKET_BYTES // 16
    tensors = [torch.empty(quarter), torch.empty(2, dtype=torch.int64), torch.empty(0), *(torch.empty(quarter) for _ in range(5))]
    sizes = [[tensor.numel() for tensor in bucket] for bucket in buckets_of(tensors)]
    assert sizes == [[quarter] * 4, [quarter] * 2, [2]]


def test_a_tensor_larger_than_a_bucket_is_one() -> None:
    large = torch.empty(BUCKET_BYTES // 4 + 1)
    assert [len(bucket) for bucket in buckets_of([torch.empty(1), large, torch.empty(1)])] == [1, 1, 1]


def test_nothing_is_no_bucket() -> None:
    assert list(buckets_of([])) == list(buckets_of([torch.empty(0)])) == []


def test_what_lies_under_compilation_is_found() -> None:
    model = nn.Linear(1, 1)
    compiled = torch.compile(model, backend="eager")
    assert unwrap(compiled) is model
    assert ddp_in(compiled) is ddp_in(model) is None
    with without_sync(compiled):
        pass


def test_an_error_of_this_rank_is_left_as_it_is() -> None:
    for error in (ValueError("mine"), RuntimeError("mine"), ModelError("mine"), RunStopped("mine")):
        explain(error, 0, 2)


@pytest.mark.parametrize(
    "said", ["[pair.cc:553] Connection closed by peer [10.0.0.2]:1", "Read error: Connection reset by peer."]
)
def test_a_lost_connection_is_a_sentence(said: str) -> None:
    lost = RuntimeError(said)
    with pytest.raises(RunStopped) as told:
        explain(lost, 0, 2)
    assert str(told.value) == (
        "Another rank is gone without a word: killed, perhaps for want of memory, or ended early. Look at what the other "
        "processes printed last, and at the system's log."
    )
    assert told.value.__cause__ is lost


def test_a_rank_that_does_not_answer_is_a_sentence() -> None:
    for said in ("Application timeout caused pair closure", "Timed out waiting 8000ms for recv operation to complete"):
        with pytest.raises(RunStopped) as told:
            explain(RuntimeError(said), 0, 2)
        assert str(told.value) == (
            "Another rank has not answered for as long as the process group waits: its machine or the network is gone, or it "
            "hangs. Look at what the other processes printed last."
        )


def test_the_engine_of_one_process_has_no_wrapper() -> None:
    model = nn.Linear(1, 1)
    engine = Engine(model, SGD(model.parameters(), lr=0.1), precision="fp32")
    assert engine.model is engine.module is model
    assert "sampler" not in engine.choices
