"""What each precision means for parameters and for the device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from halfstep.config.options import Precision
from halfstep.errors import DeviceError, ModelError
from halfstep.precision.policy import (
    WindowAutocast,
    allow_tf32,
    check_parameters,
    hold_in_bf16,
    largest_magnitude,
    policy_for,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype", "scaled"),
    [
        (Precision.FP32, None, False),
        (Precision.FP16, torch.float16, True),
        (Precision.BF16, torch.bfloat16, False),
        (Precision.BF16_PURE, None, False),
    ],
)
def test_only_fp16_is_scaled_and_only_mixed_precisions_cast(
    precision: Precision, dtype: torch.dtype | None, scaled: bool
) -> None:
    policy = policy_for(precision, CPU)
    assert (policy.autocast_dtype, policy.scaled, policy.device_type) == (dtype, scaled, "cpu")
    with policy.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (dtype or torch.float32)


def test_fp16_is_refused_on_mps() -> None:
    with pytest.raises(DeviceError) as told:
        policy_for(Precision.FP16, torch.device("mps"))
    assert str(told.value) == (
        '`precision = "fp16"` scales the loss, which torch does not offer on MPS; use "bf16" or "fp32" there.'
    )


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.BF16_PURE])
def test_emulated_bf16_is_refused(precision: Precision, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says by default that a V100 supports BF16; it emulates it."""
    asked: list[bool] = []

    def supported(including_emulation: bool = True) -> bool:
        asked.append(including_emulation)
        return including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    with pytest.raises(DeviceError) as told:
        policy_for(precision, torch.device("cuda", 0))
    assert str(told.value) == 'Tesla V100 has no BF16 arithmetic (it would be emulated); use `precision = "fp16"` or "fp32".'
    assert asked == [False]


def test_there_is_no_tf32_to_choose_on_a_cpu() -> None:
    assert allow_tf32(CPU) == {}


def test_tf32_is_turned_on_where_the_gpu_has_it_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    try:
        (choice,) = allow_tf32(torch.device("cuda", 0)).values()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert str(choice) == ('True (FP32 matmuls round inputs to 10 bits; `set_float32_matmul_precision("highest")` undoes it)')


def test_where_the_gpu_has_no_tf32_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    (choice,) = allow_tf32(torch.device("cuda", 0)).values()
    assert str(choice) == "False (Tesla T4 has no TF32)"


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.BF16, Precision.BF16_PURE])
def test_fp32_and_fp64_parameters_suit_every_precision(precision: Precision) -> None:
    for dtype in (torch.float32, torch.float64):
        check_parameters(policy_for(precision, CPU), nn.Linear(2, 2).to(dtype))


def test_half_parameters_suit_none_but_pure_bf16() -> None:
    line = nn.Linear(2, 2)
    hold_in_bf16(line)
    check_parameters(policy_for(Precision.BF16_PURE, CPU), line)
    with pytest.raises(ModelError, match=r"^Parameter `weight` is bfloat16; "):
        check_parameters(policy_for(Precision.BF16, CPU), line)


def test_holding_in_bf16_keeps_the_parameter_objects_and_leaves_integers() -> None:
    module = nn.BatchNorm1d(3)
    weight = module.weight
    hold_in_bf16(module)
    assert module.weight is weight
    assert (weight.dtype, module.running_mean.dtype) == (torch.bfloat16, torch.bfloat16)
    assert module.num_batches_tracked.dtype == torch.int64


def named(**values: list[float]) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.tensor(value))) for name, value in values.items()]


def test_the_largest_magnitude_is_found_with_its_name() -> None:
    assert largest_magnitude(named(a=[1.0, -3.0], b=[2.0])) == ("a", 3.0)
    assert largest_magnitude(named(a=[], b=[0.5])) == ("b", 0.5)


def test_a_value_that_is_not_finite_is_the_largest() -> None:
    assert largest_magnitude(named(a=[1e30], b=[-math.inf], c=[2.0])) == ("b", math.inf)
    name, value = largest_magnitude(named(a=[math.inf], b=[math.nan], c=[5.0]))
    assert (name, math.isnan(value)) == ("b", True)


@pytest.fixture(params=[True, False], ids=["window-wide", "each forward"])
def cast_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways: as on torch 2.13 and as on older versions."""
    monkeypatch.setattr("halfstep.precision.policy.CAST_CACHE_SURVIVES_NO_GRAD", request.param)
    return bool(request.param)


@pytest.mark.usefixtures("cast_cache")
def test_autocast_is_on_in_forwards_and_off_between_them() -> None:
    autocast = WindowAutocast(policy_for(Precision.BF16, CPU))
    seen = []
    autocast.open()
    for _ in range(2):
        seen.append(torch.is_autocast_enabled("cpu"))
        with autocast:
            seen.append(torch.is_autocast_enabled("cpu"))
    seen.append(torch.is_autocast_enabled("cpu"))
    autocast.close()
    seen.append(torch.is_autocast_enabled("cpu"))
    assert seen == [False, True, False, True, False, False]


@pytest.mark.usefixtures("cast_cache")
def test_an_autocast_of_the_users_own_inside_a_forward_ends_with_itself() -> None:
    autocast = WindowAutocast(policy_for(Precision.BF16, CPU))
    autocast.open()
    with autocast:
        with torch.autocast("cpu", enabled=False):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    autocast.close()


def test_the_cast_weights_of_a_window_are_dropped_when_it_is_closed(cast_cache: bool) -> None:
    """Even inside a context that stays open around it, where torch keeps them."""
    line = nn.Linear(1, 1, bias=False)
    autocast = WindowAutocast(policy_for(Precision.BF16, CPU))
    outputs = []
    with torch.autocast("cpu", torch.bfloat16):
        torch.set_autocast_enabled("cpu", False)
        for value in (1.0, 2.0):
            with torch.no_grad():
                line.weight.fill_(value)
            autocast.open()
            with autocast:
                outputs.append(line(torch.ones(1, 1)).item())
            autocast.close()
    assert outputs == ([1.0, 2.0] if cast_cache else [1.0, 1.0]), "older versions keep one context a forward"


def test_opening_a_window_inside_an_autocast_is_refused() -> None:
    autocast = WindowAutocast(policy_for(Precision.FP32, CPU))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ModelError, match=r"^The engine is used inside a `torch\.autocast`"),
    ):
        autocast.open()


def test_without_a_cast_a_window_opens_nothing() -> None:
    autocast = WindowAutocast(policy_for(Precision.FP32, CPU))
    autocast.open()
    with autocast:
        assert not torch.is_autocast_enabled("cpu")
    autocast.close()
