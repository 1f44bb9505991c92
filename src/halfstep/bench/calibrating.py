"""What `halfstep plan --gpu this` plans with: this machine's rates, and the share of them that a real update reached."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

import torch
from torch import nn

from halfstep.bench.benching import Result
from halfstep.config.options import Precision
from halfstep.measure.clock import elapsed_s
from halfstep.measure.hardware import device_name
from halfstep.measure.memory import total_bytes
from halfstep.measure.rate_cache import known_or_measured_rates
from halfstep.plan.calibration import Calibration
from halfstep.plan.model_facts import Transformer
from halfstep.plan.recipe import Recipe
from halfstep.plan.time import flops_of_products
from halfstep.precision.select import ARITHMETIC

BYTES_MOVED = 2**27
REPEATS = 7
IMAGES, CHANNELS, SIDE = 4, 64, 56
LAUNCHES = 2000


def calibrate(device: torch.device, model: Transformer, results: Sequence[Result], sequence: int) -> Calibration | None:
    """The calibration of this machine; None where no row could be measured, or the device does not tell its memory."""
    memory = total_bytes(device)
    rates = known_or_measured_rates(device)
    tflops = {str(p): rates[ARITHMETIC[p]].value for p in Precision if ARITHMETIC[p] in rates}
    reached: dict[str, float] = {}
    for result in results:
        name = str(result.row.precision)
        if result.update_s is not None and name in tflops and not result.row.compile:
            share = _flops(model, result, sequence) / result.update_s / (tflops[name] * 1e12)
            reached[name] = max(reached.get(name, 0.0), min(1.0, share))
    if memory is None or not reached:
        return None
    exact = min(reached, key=list(map(str, Precision)).index)  # FP32, where it was among the rows
    return Calibration(
        device=device_name(device),
        torch=torch.__version__,
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        memory_bytes=memory,
        matmul_tflops=tflops,
        efficiency=reached,
        convolutions=_convolutions_flops(device) / (tflops[exact] * reached[exact] * 1e12),
        bandwidth_gbs=_bandwidth_gbs(device),
        launch_us=_launch_us(device),
        measured=date.today().isoformat(),
    )


def _flops(model: Transformer, result: Result, sequence: int) -> float:
    row = result.row
    recipe = Recipe(micro_batch=row.micro, sequence=sequence, accumulation=row.accumulate, precision=row.precision)
    return flops_of_products(model, recipe) * row.accumulate


def _convolutions_flops(device: torch.device) -> float:
    """FLOP/s of a convolution as a ResNet has them (He et al. 2015, its first stage), forward and backward, in FP32."""
    convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False, device=device)
    images = torch.randn(IMAGES, CHANNELS, SIDE, SIDE, device=device, requires_grad=True)

    def work() -> None:
        convolution(images).sum().backward()

    work()
    flops = 3 * 2 * IMAGES * SIDE**2 * CHANNELS**2 * 9
    return flops / min(elapsed_s(work, device) for _ in range(REPEATS))


def _bandwidth_gbs(device: torch.device) -> float:
    """GB/s of reading and writing a tensor larger than any cache."""
    tensor = torch.zeros(BYTES_MOVED // 4, device=device)
    tensor.add_(1)
    fastest = min(elapsed_s(lambda: tensor.add_(1), device) for _ in range(REPEATS))
    return 2 * BYTES_MOVED / fastest / 1e9


def _launch_us(device: torch.device) -> float:
    """Microseconds of an operation on almost nothing."""
    tensor = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            tensor.add_(1)

    launch()
    return min(elapsed_s(launch, device) for _ in range(REPEATS)) / LAUNCHES * 1e6
