"""Problem 3: the number format in which operations really ran, and what took them out of low precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from halfstep.record.probes.dtypes import Dtypes
from halfstep.report.parts import Table
from unit.record.watched import mlp, pairs, watched

BF16 = torch.bfloat16


class Exact(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class ByFunction(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        made: Tensor = Exact.apply(input, self.weight)
        return made


class SwitchedOff(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.float())


class Listed(nn.Module):
    """An operation that autocast computes in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.mse_loss(x, x * 2, reduction="none")


def rows(probe: Dtypes) -> dict[str, tuple[str, ...]]:
    (part,) = probe.measurements()
    assert isinstance(part, Table)
    return {row[0]: row[1:] for row in part.rows}


def test_a_model_under_autocast_multiplies_in_low_precision() -> None:
    probe = watched(Dtypes(), mlp(), pairs(2), dtype=BF16)
    assert probe.findings() == []
    assert rows(probe) == {"0": ("BF16 (1)", "", ""), "1": ("", "BF16 (1)", ""), "2": ("BF16 (1)", "", "")}


def test_a_model_without_autocast_is_fp32_for_no_reason_that_needs_telling() -> None:
    assert rows(watched(Dtypes(), mlp(), pairs(1)))["0"] == ("FP32 (1)", "", "")


def test_a_custom_function_that_asks_for_fp32_is_named() -> None:
    probe = watched(Dtypes(), mlp(ByFunction(4, 4)), pairs(1), dtype=BF16)
    assert rows(probe)["2"] == ("FP32 (1)", "", "mm: custom autograd.Function Exact")
    (finding,) = probe.findings()
    assert finding.message == (
        "33% of the forward's matrix work ran in FP32, limit 5%. custom autograd.Function Exact: `2` (mm) 33%"
    )
    assert "x @ weight.t()" in Path(__file__).read_text().splitlines()[finding.line - 1]


def test_a_region_that_is_switched_off_is_told() -> None:
    probe = watched(Dtypes(), mlp(SwitchedOff(4, 4)), pairs(1), dtype=BF16)
    assert rows(probe)["2"] == ("FP32 (1)", "", "addmm: autocast is off here")


def test_an_operation_on_autocasts_list_is_told_from_one_with_fp32_inputs() -> None:
    probe = watched(Dtypes(), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), Listed()), pairs(1), dtype=BF16)
    told = rows(probe)
    assert told["2"][2] == "mse_loss: on autocast's FP32 list"
    assert told["0"] == ("", "FP32 (1)", "native_layer_norm: its inputs are FP32")


def test_a_custom_operation_is_named() -> None:
    with torch.library._scoped_library("halfstep_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x.float() * 2, "CompositeExplicitAutograd")
        library.impl("twice", lambda x: x.float() * 2, "Autograd")

        class Twice(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    torch.ops.halfstep_test.twice(x)
                return x

        told = rows(watched(Dtypes(), mlp(Twice()), pairs(1), dtype=BF16))
    assert "FP32" in told["2"][1]


def test_only_the_first_forward_is_listened_to_and_no_mode_is_left() -> None:
    class Looks(nn.Module):
        seen: list[bool] = []  # noqa: RUF012

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(_get_current_dispatch_mode() is not None)
            return x

    watched(Dtypes(), mlp(Looks()), pairs(3), dtype=BF16)
    assert Looks.seen == [True, False, False]
    assert _get_current_function_mode() is None


def test_a_forward_that_raises_leaves_no_mode() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("the script's own")

    try:
        watched(Dtypes(), mlp(Raises()), pairs(1))
    except ValueError:
        assert _get_current_dispatch_mode() is None
        assert _get_current_function_mode() is None
    else:
        raise AssertionError("the script's error was lost")


def test_the_outputs_are_bitwise_the_same_with_the_probe() -> None:
    def output(probe: Dtypes | None) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 8))
        if probe is not None:
            probe.attach(model, torch.optim.SGD(model.parameters()), None)
        with torch.autocast("cpu", dtype=BF16):
            made: Tensor = model(torch.randn(2, 3, 8))
        return made

    assert torch.equal(output(None), output(Dtypes()))
