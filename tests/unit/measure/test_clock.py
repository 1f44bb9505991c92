import gc

import pytest
import torch

from halfstep.measure.clock import elapsed_s, garbage_collection_off, interleaved_s

CPU = torch.device("cpu")


def test_elapsed_seconds_are_positive_and_the_work_ran_once() -> None:
    calls: list[int] = []
    assert elapsed_s(lambda: calls.append(1), CPU) > 0
    assert calls == [1]


def test_every_round_runs_all_works_and_every_second_round_backwards() -> None:
    order: list[str] = []
    samples = interleaved_s({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, CPU, rounds=3, warmup_rounds=0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3}


def test_warmup_rounds_run_and_are_not_counted() -> None:
    calls: list[int] = []
    samples = interleaved_s({"a": lambda: calls.append(1)}, CPU, rounds=2, warmup_rounds=3)
    assert (len(calls), len(samples["a"])) == (5, 2)


def test_what_must_come_before_runs_before_each_work() -> None:
    order: list[str] = []
    works = {name: lambda name=name: order.append(name) for name in "ab"}
    interleaved_s(works, CPU, rounds=2, warmup_rounds=0, before=lambda: order.append("-"))
    assert "".join(order) == "-a-b-b-a"


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_inside_and_as_it_was_afterwards_even_after_an_error(was_on: bool) -> None:
    def break_inside() -> None:
        with garbage_collection_off():
            assert not gc.isenabled()
            raise RuntimeError("broken")

    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(RuntimeError, match="broken"):
            break_inside()
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_elapsed_seconds_hold_the_work_of_the_gpu_and_not_its_launch() -> None:
    device = torch.device("cuda")
    matrix = torch.ones(8192, 8192, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def work() -> None:
        start.record()
        _ = matrix @ matrix
        end.record()

    elapsed_s(work, device)
    assert elapsed_s(work, device) * 1e3 >= start.elapsed_time(end)
