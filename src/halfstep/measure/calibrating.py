"""Measures what planning for this device needs: rates of products, of memory, of launches, and what a block reaches of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from statistics import median

import torch
from torch import nn

from halfstep.config.options import Precision
from halfstep.measure.clock import Elapsed, Work, elapsed_s
from halfstep.measure.dtypes import Arithmetic
from halfstep.measure.hardware import device_name
from halfstep.measure.memory import total_bytes
from halfstep.measure.rates import matmul_rate
from halfstep.plan.calibration import ATTENTION_AGAINST_PRODUCTS, Calibration
from halfstep.plan.model_facts import Norm, Traits, Transformer
from halfstep.plan.recipe import Recipe
from halfstep.plan.time import Rates, estimate

FORMATS = {Precision.FP32: Arithmetic.FP32, Precision.BF16: Arithmetic.BF16, Precision.FP16: Arithmetic.FP16}
WIDTH, HEADS, BLOCKS, SEQUENCES, LENGTH = 512, 8, 2, 4, 128
IMAGES, CHANNELS, SIDE = 4, 64, 28
SMALL, LARGE = 1024, 1 << 24
RUNS = 5


def calibrate(
    device: torch.device,
    precisions: Sequence[Precision] = (Precision.FP32, Precision.BF16),
    *,
    budget_s: float = 1.0,
    elapsed: Elapsed = elapsed_s,
) -> Calibration:
    """What `device` reaches, in about ten seconds.

    Args:
        device: where to measure.
        precisions: which to measure.
        budget_s: about how long to take for each rate of products.
        elapsed: how time is taken.
    """
    rates = {str(each): matmul_rate(device, FORMATS[each], budget_s=budget_s, elapsed=elapsed).value for each in precisions}
    bandwidth, launch_s = _bandwidth(device, elapsed), _launch_s(device, elapsed)
    reached = {name: _Reached(matmul=rate * 1e12, bandwidth=bandwidth, launch_s=launch_s) for name, rate in rates.items()}
    efficiency = {str(each): _efficiency(device, each, reached[str(each)], elapsed) for each in precisions}
    first = str(precisions[0])
    return Calibration(
        device=device_name(device),
        torch=str(torch.__version__),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        memory_bytes=total_bytes(device) or 0,
        matmul_tflops=rates,
        efficiency=efficiency,
        convolutions=_convolution_rate(device, precisions[0], elapsed) / (rates[first] * efficiency[first] * 1e12),
        bandwidth_gbs=bandwidth / 1e9,
        launch_us=launch_s * 1e6,
        measured=date.today().isoformat(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reached:
    matmul: float
    bandwidth: float
    launch_s: float

    def rates(self) -> Rates:
        attention = self.matmul * ATTENTION_AGAINST_PRODUCTS
        return Rates(
            matmul=self.matmul,
            attention=attention,
            bandwidth=self.bandwidth,
            link=self.bandwidth,
            launch_s=self.launch_s,
            full_width=1,
        )


def _bandwidth(device: torch.device, elapsed: Elapsed) -> float:
    """Bytes a second of reading and writing what no cache holds."""
    values = torch.ones(LARGE, device=device)
    out = torch.empty_like(values)
    seconds = _median_s(lambda: torch.mul(values, 2.0, out=out), device, elapsed)
    return 2 * 4 * LARGE / seconds


def _launch_s(device: torch.device, elapsed: Elapsed) -> float:
    """Seconds of an operation on almost nothing."""
    values, out = torch.ones(SMALL, device=device), torch.empty(SMALL, device=device)

    def many() -> None:
        for _ in range(100):
            torch.mul(values, 2.0, out=out)

    return _median_s(many, device, elapsed) / 100


def _efficiency(device: torch.device, precision: Precision, reached: _Reached, elapsed: Elapsed) -> float:
    """The share of the rate of products that two blocks reach, when all else takes what the planner says it takes."""
    recipe = Recipe(micro_batch=SEQUENCES, sequence=LENGTH, precision=precision)
    measured_s = _median_s(_update(device, precision), device, elapsed)
    parts = estimate(_shape(), recipe, reached.rates()).parts
    products_s = parts["matrix products"] + parts["attention"]
    return min(1.0, products_s / max(measured_s - parts["memory traffic"], measured_s / 10))


def _convolution_rate(device: torch.device, precision: Precision, elapsed: Elapsed) -> float:
    """FLOP/s of the convolutions of a ResNet's bottleneck, forward and backward."""
    layers = nn.Sequential(
        nn.Conv2d(4 * CHANNELS, CHANNELS, 1, bias=False),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
        nn.Conv2d(CHANNELS, 4 * CHANNELS, 1, bias=False),
    ).to(device)
    shape = (IMAGES, 4 * CHANNELS, SIDE, SIDE)
    images = torch.linspace(-1, 1, math.prod(shape), device=device).view(shape).requires_grad_()

    def update() -> None:
        with _autocast(device, precision):
            loss = layers(images).float().mean()
        loss.backward()

    weights = sum(weight.numel() for weight in layers.parameters())
    return 3 * 2 * IMAGES * SIDE**2 * weights / _median_s(update, device, elapsed)


def _shape() -> Transformer:
    traits = Traits(norm=Norm.LAYER, gated=False, qkv_bias=True, bias=True, merged=True, positions=0, tied=True)
    return Transformer(
        name="two blocks",
        traits=traits,
        layers=BLOCKS,
        hidden=WIDTH,
        heads=HEADS,
        kv_heads=HEADS,
        head_size=WIDTH // HEADS,
        ffn=4 * WIDTH,
        vocab=1,
        tied=True,
    )


class _Block(nn.Module):
    """A block of a GPT, written with nothing but torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norms[0](stream)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.out(seen.transpose(1, 2).flatten(2))
        return stream + self.mlp(self.norms[1](stream))  # type: ignore[no-any-return]


def _update(device: torch.device, precision: Precision) -> Work:
    """Forward and backward of the blocks."""
    blocks = nn.Sequential(*(_Block() for _ in range(BLOCKS))).to(device)
    stream = torch.linspace(-1, 1, SEQUENCES * LENGTH * WIDTH, device=device).view(SEQUENCES, LENGTH, WIDTH)

    def update() -> None:
        with _autocast(device, precision):
            loss = blocks(stream).float().square().mean()
        loss.backward()

    return update


def _autocast(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    low = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}.get(precision)
    return nullcontext() if low is None else torch.autocast(device.type, low)


def _median_s(work: Work, device: torch.device, elapsed: Elapsed) -> float:
    work()
    return median(elapsed(work, device) for _ in range(RUNS))
