import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from halfstep.config.choice import Choice
from halfstep.config.options import Precision
from halfstep.measure.dtypes import Arithmetic, cpu_support, cuda_support, mps_support, rocm_support
from halfstep.measure.stats import summarize
from halfstep.precision import select, trial
from halfstep.precision.select import available, candidates, explain_without_model, select_precision, tolerance

CPU = torch.device("cpu")
ONLY_BF16 = cpu_support(frozenset({"avx512_bf16"}))
BOTH_HALVES = cpu_support(frozenset({"avx512_bf16", "avx512_fp16"}))
NO_HALVES = cpu_support(frozenset())


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Says which formats the device has; BF16 alone unless a test says otherwise, so that every machine tries the same."""

    def set_native(table: Any) -> None:
        monkeypatch.setattr(select, "dtype_support", lambda device: table)

    set_native(ONLY_BF16)
    return set_native


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(autouse=True)
def same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 8), torch.randn(16, 8)


def mean_square(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(pair[0]), pair[1])


def sum_and_weight(model: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (model(pair[0]) - pair[1]).square().sum(), pair[1].numel()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8))


def test_every_precision_is_available_or_refused_with_a_reason() -> None:
    answers = available(CPU)
    assert set(answers) == set(Precision)
    assert all(answer.reason for answer in answers.values())
    assert answers[Precision.FP32] == Choice(value=True, reason="native: every CPU")


def test_emulated_fp16_of_a_cpu_may_be_asked_for_and_is_no_candidate() -> None:
    told = "emulated: no amx_fp16, avx512_fp16 or Arm fp16 among the CPU's flags"
    assert available(CPU)[Precision.FP16] == Choice(value=True, reason=told)
    assert candidates(CPU) == [Precision.FP32, Precision.BF16]


def test_fp16_is_refused_on_mps_because_of_its_loss_scale(native: Callable[[Any], None]) -> None:
    native(mps_support("Apple M3", (15, 0)))
    mps = torch.device("mps")
    assert available(mps)[Precision.FP16].value is False
    assert "scales the loss" in available(mps)[Precision.FP16].reason
    assert candidates(mps) == [Precision.FP32, Precision.BF16]


def test_bf16_is_refused_on_a_mac_that_has_none(native: Callable[[Any], None]) -> None:
    native(mps_support("Apple M3", (13, 6)))
    answer = available(torch.device("mps"))[Precision.BF16]
    assert answer == Choice(value=False, reason="absent: Apple M3, macOS 13.6, it needs macOS 14")


def test_bf16_is_refused_on_a_gpu_that_emulates_it(native: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    native(cuda_support((7, 5), bf16_native=False))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    cuda = torch.device("cuda", 0)
    assert available(cuda)[Precision.BF16].value is False
    assert "Tesla T4" in available(cuda)[Precision.BF16].reason
    assert candidates(cuda) == [Precision.FP32, Precision.FP16]


def test_pure_bf16_is_never_a_candidate(native: Callable[[Any], None]) -> None:
    native(BOTH_HALVES)
    assert candidates(CPU) == [Precision.FP32, Precision.BF16, Precision.FP16]


@pytest.mark.parametrize("loss", [mean_square, sum_and_weight])
def test_the_choice_is_a_candidate_with_its_numbers(loss: Any) -> None:
    choice = select_precision(network(), loss, batch(), CPU)
    assert choice.value in candidates(CPU)
    for told in ("fp32", "bf16", "runs)", "times as fast as fp32"):
        assert told in choice.reason


def test_parameters_gradients_buffers_modes_and_random_states_stay_bitwise_untouched() -> None:
    model, pair = network(), batch()
    model[2].eval()
    mean_square(model, pair).backward()
    held = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    gradients = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters() if parameter.grad is not None]
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()

    def noisy(module: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        module.train()
        noise = random.random() + numpy.random.rand() + torch.rand(())
        return mean_square(module, pair) + 1e-6 * noise

    select_precision(model, noisy, pair, CPU)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is held[name][0]
        assert torch.equal(tensor, held[name][1])
    for parameter, (own, content) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is own
        assert torch.equal(own, content)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numpy.array_equal(numpy.random.get_state()[1], states[2])


def test_gradients_that_were_absent_stay_absent() -> None:
    model = network()
    select_precision(model, mean_square, batch(), CPU)
    assert all(parameter.grad is None for parameter in model.parameters())


class Caching(nn.Module):
    """Keeps something in a buffer at its first forward, in whatever dtype that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if not hasattr(self, "first"):
            self.register_buffer("first", out.detach())
        return out


def test_a_buffer_made_in_a_trial_is_gone_afterwards() -> None:
    model = Caching()
    select_precision(model, mean_square, batch(), CPU)
    assert dict(model.named_buffers()) == {}


def test_everything_is_restored_when_the_loss_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "known_or_measured_rates", lambda device: {})
    model, pair = network(), batch()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()

    def broken(module: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        module(pair[0])
        raise RuntimeError("no such op")

    select_precision(model, broken, pair, CPU)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


class OnlyIn(nn.Module):
    """Raises `error` where its product comes out in `dtype`."""

    def __init__(self, dtype: torch.dtype, error: Exception) -> None:
        super().__init__()
        self.linear, self.dtype, self.error = nn.Linear(8, 8), dtype, error

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        if out.dtype == self.dtype:
            raise self.error
        return out


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("tried to allocate 8 GiB"), "bf16 ruled out: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "bf16 ruled out: out of memory"),
        (NotImplementedError('"foo" not implemented for Half\nmore'), 'bf16 ruled out: NotImplementedError: "foo" not'),
    ],
)
def test_a_precision_that_does_not_run_is_ruled_out_with_its_cause(error: Exception, told: str) -> None:
    choice = select_precision(OnlyIn(torch.bfloat16, error), mean_square, batch(), CPU)
    assert choice.value is Precision.FP32
    assert told in choice.reason


def test_where_fp32_does_not_fit_a_half_precision_is_taken_uncompared() -> None:
    model = OnlyIn(torch.float32, torch.OutOfMemoryError("full"))
    choice = select_precision(model, mean_square, batch(), CPU)
    assert choice.value is Precision.BF16
    assert choice.reason.startswith("the model could not be tried in fp32 (out of memory); bf16 forward and backward takes")
    assert choice.reason.endswith("its loss could not be compared")


def test_where_nothing_runs_the_matmul_rates_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {Arithmetic.FP32: summarize([1.0], "TFLOP/s"), Arithmetic.BF16: summarize([2.0], "TFLOP/s")}
    monkeypatch.setattr(select, "known_or_measured_rates", lambda device: rates)

    def broken(module: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        raise TypeError("takes 1 argument")

    choice = select_precision(network(), broken, batch(), CPU)
    assert choice.value is Precision.BF16
    assert choice.reason.startswith("the model could not be tried in fp32 (TypeError: takes 1 argument); matmul: fp32 1.00")


def test_without_native_halves_nothing_is_run_and_fp32_is_taken(native: Callable[[Any], None]) -> None:
    native(NO_HALVES)

    def never(module: nn.Module, pair: Any) -> Tensor:
        raise AssertionError("was run")

    choice = select_precision(network(), never, batch(), CPU)
    assert choice.value is Precision.FP32
    assert choice.reason.startswith("cpu has instructions for no half precision: bf16 emulated (no amx_bf16")


def cancels(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """A difference so small against its parts that BF16 does not see it."""
    return (1e3 + 1e-2 * model(pair[0])).to(model(pair[0]).dtype).float().sub(1e3).square().mean()


def test_a_loss_that_disagrees_is_refused_with_both_losses_and_the_limit() -> None:
    choice = select_precision(nn.Linear(8, 8), cancels, batch(), CPU)
    assert choice.value is Precision.FP32
    assert "bf16 ruled out: loss" in choice.reason
    assert "limit" in choice.reason


@pytest.mark.parametrize(("factor", "not_finite"), [(1e6, True), (1e-12, False)])
def test_fp16_gradients_are_counted_at_the_first_scale(factor: float, not_finite: bool) -> None:
    def scaled(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return factor * mean_square(model, pair)

    model = nn.Linear(8, 8)
    trials = trial.run_trials(model, scaled, batch(), [Precision.FP32, Precision.FP16], CPU, budget_s=1e-9)
    counted, exact = trials[Precision.FP16].gradients, trials[Precision.FP32].gradients
    assert (exact.total, exact.zero, exact.not_finite) == (72, 0, 0)
    assert counted.total == 72
    assert (counted.not_finite > 0) is not_finite
    assert (counted.zero == 72) is not not_finite


def test_a_compiled_model_is_tried_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)

    def backend(graph: Any, inputs: Any) -> Any:
        pytest.fail("compiled")

    choice = select_precision(torch.compile(model, backend=backend), mean_square, batch(), CPU)
    assert choice.reason.endswith("; tried without compilation")


def test_all_ranks_take_what_the_broadcast_gives() -> None:
    first = Choice(value=Precision.FP16, reason="rank 0 said so")
    assert select_precision(network(), mean_square, batch(), CPU, group_broadcast=lambda own: first) is first


def test_frozen_parameters_are_left_out() -> None:
    model = network()
    model[0].requires_grad_(False)
    assert "runs)" in select_precision(model, mean_square, batch(), CPU).reason


@pytest.mark.parametrize(("precision", "roundoff"), [(Precision.BF16, 2.0**-8), (Precision.FP16, 2.0**-11)])
def test_tolerance_is_twice_the_unit_roundoff_times_the_root_of_the_roundings(precision: Precision, roundoff: float) -> None:
    assert tolerance(precision, 15) == 2 * 4 * roundoff


@pytest.mark.parametrize(
    ("bf16", "expected"),
    [([0.30, 0.31, 0.29, 0.30], Precision.BF16), ([0.17, 0.171, 0.17, 0.17], Precision.FP32)],
)
def test_without_a_model_the_faster_matmul_is_likely_to_be_taken(bf16: list[float], expected: Precision) -> None:
    rates = {
        Arithmetic.FP32: summarize([0.168, 0.170, 0.172, 0.17], "TFLOP/s"),
        Arithmetic.BF16: summarize(bf16, "TFLOP/s"),
    }
    choice = explain_without_model(CPU, rates=rates)
    assert choice.value is expected
    assert "bf16 0." in choice.reason
    assert "TFLOP/s" in choice.reason


def test_without_a_model_an_accelerator_takes_bf16_where_it_is_no_slower(native: Callable[[Any], None]) -> None:
    native(rocm_support("gfx942"))
    same = summarize([100.0, 101.0, 99.0, 100.0], "TFLOP/s")
    rates = {Arithmetic.FP32: same, Arithmetic.BF16: same, Arithmetic.FP16: same}
    assert explain_without_model(torch.device("xpu"), rates=rates).value is Precision.BF16


def test_without_a_model_and_without_rates_it_says_so() -> None:
    choice = explain_without_model(CPU, rates={})
    assert choice == Choice(value=Precision.FP32, reason="native: bf16; not measured, the model decides when a run begins")


def test_without_a_model_rates_are_looked_up_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {Arithmetic.FP32: summarize([1.0], "TFLOP/s"), Arithmetic.BF16: summarize([2.0], "TFLOP/s")}
    monkeypatch.setattr(select, "known_or_measured_rates", lambda device: rates)
    assert explain_without_model(CPU) == explain_without_model(CPU, rates=rates)


def test_a_batch_that_takes_long_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    def counted(module: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        passes.append(1)
        return mean_square(module, pair)

    choice = select_precision(nn.Linear(8, 8), counted, batch(), CPU, budget_s=1e-9)
    assert len(passes) == 2
    assert " once" in choice.reason


def test_slow_passes_are_repeated_three_times_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SLOW_PASS_S", 0.0)
    passes: list[int] = []

    def counted(module: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        passes.append(1)
        return mean_square(module, pair)

    trial.run_trials(nn.Linear(8, 8), counted, batch(), [Precision.FP32], CPU, budget_s=60)
    assert len(passes) == 1 + 3


@pytest.mark.parametrize(
    ("bf16_s", "fp16_s", "rounds"), [(0.01, 0.9, 3), (0.099, 0.9, 7), (0.9, 0.9, 3), (0.01, 0.099, 7), (0.04, 0.05, 7)]
)
def test_three_rounds_that_leave_no_doubt_are_the_last(
    bf16_s: float, fp16_s: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doubt is left near FP32, and between two that are both faster than it."""
    seconds = {Precision.FP32: 0.1, Precision.BF16: bf16_s, Precision.FP16: fp16_s}
    monkeypatch.setattr(trial, "SLOW_PASS_S", 1.0)
    monkeypatch.setattr(trial, "HOPELESS", 10)
    monkeypatch.setattr(trial._Bench, "_try", lambda bench, precision: (seconds[precision], 1.0, []))
    found = trial.run_trials(nn.Linear(8, 8), mean_square, batch(), list(seconds), CPU, budget_s=60)
    assert [len(each.seconds) for each in found.values()] == [rounds] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_random_state_and_tf32_setting_stay_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    device = torch.device("cuda", 0)
    model = network().to(device)
    pair = tuple(tensor.to(device) for tensor in batch())
    before, setting = torch.cuda.get_rng_state(device), torch.get_float32_matmul_precision()
    choice = select_precision(model, mean_square, pair, device)
    assert choice.value in candidates(device)
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    assert torch.get_float32_matmul_precision() == setting
