"""`halfstep env`: what this machine can do, measured, and what "auto" would choose."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from halfstep import __version__
from halfstep.config.choice import Choice
from halfstep.config.options import Precision
from halfstep.measure.stats import Measured

if TYPE_CHECKING:
    import torch

    from halfstep.measure.rate_cache import Rates

EXAMPLES = """
examples:
  halfstep env                    measures this machine once, and remembers its rates
  halfstep env --refresh          measures it again
  halfstep env --format json      the same for a program
"""
COMPILERS = ("c++", "g++", "clang++", "cl")
BACKENDS = ("nccl", "gloo", "xccl", "ucc", "mpi")


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One number format of a device; `rate` is `None` where it was not measured."""

    name: str
    support: str
    because: str
    rate: Measured | None
    times_fp32: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, with the sizes in bytes and the rates in TFLOP/s."""

    device: str
    backend: str
    name: str
    driver: str
    versions: dict[str, str]
    memory_bytes: int | None
    cores: int | None
    threads: int | None
    compile: str
    rates: str
    formats: list[Format]
    precisions: dict[Precision, Choice[bool]]
    auto: Choice[Precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """This machine."""

    halfstep: str
    torch: str
    python: str
    platform: str
    distributed: list[str]
    devices: list[Device]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to show it (default: text)")
    measuring = parser.add_mutually_exclusive_group()
    measuring.add_argument("--no-measure", action="store_true", help="show rates only where they are known already")
    measuring.add_argument("--refresh", action="store_true", help="measure again, though the rates are known")


def run(args: argparse.Namespace) -> int:
    """Print the environment to stdout."""
    found = _environment(measure=not args.no_measure, refresh=args.refresh)
    print(json.dumps(asdict(found), indent=2) if args.format == "json" else _text(found))
    return 0


def _environment(*, measure: bool, refresh: bool) -> Environment:
    import torch

    from halfstep.measure.hardware import devices

    return Environment(
        halfstep=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=platform.platform(),
        distributed=_distributed_backends(),
        devices=[_device(device, measure=measure, refresh=refresh) for device in devices()],
    )


def _device(device: torch.device, *, measure: bool, refresh: bool) -> Device:
    from halfstep.measure.hardware import describe
    from halfstep.precision.select import available, explain_without_model

    told = describe(device)
    rates, told_of_rates = _rates(device, measure=measure, refresh=refresh)
    return Device(
        device=str(device),
        backend=str(told.backend),
        name=told.name,
        driver=told.driver,
        versions=told.versions,
        memory_bytes=told.memory_bytes,
        cores=told.cores,
        threads=told.threads,
        compile=_compile_support(device),
        rates=told_of_rates,
        formats=_formats(device, rates),
        precisions=available(device),
        auto=explain_without_model(device, rates=rates),
    )


def _rates(device: torch.device, *, measure: bool, refresh: bool) -> tuple[Rates, str]:
    from halfstep.measure.rate_cache import known_or_measured_rates, known_rates

    known = None if refresh else known_rates(device)
    if known is not None:
        return known, "measured before on this machine"
    if not measure:
        return {}, "not measured"
    _say(f"measuring matmul on {device}, about a second a number format ...")
    return known_or_measured_rates(device, refresh=refresh), "measured now"


def _formats(device: torch.device, rates: Rates) -> list[Format]:
    from halfstep.measure.dtypes import Arithmetic, dtype_support

    fp32 = rates.get(Arithmetic.FP32)
    return [
        Format(
            name=str(arithmetic),
            support=str(told.support),
            because=told.because,
            rate=rate,
            times_fp32=None if rate is None or fp32 is None else rate.value / fp32.value,
        )
        for arithmetic, told in dtype_support(device).items()
        for rate in (rates.get(arithmetic),)
    ]


def _distributed_backends() -> list[str]:
    from torch import distributed

    if not distributed.is_available():
        return []
    return [name for name in BACKENDS if getattr(distributed, f"is_{name}_available", bool)()]


def _compile_support(device: torch.device) -> str:
    """What `torch.compile` would generate code with; nothing is compiled, for that takes many seconds."""
    if device.type in ("cuda", "xpu"):
        return f"Triton {_triton_version()}" if importlib.util.find_spec("triton") else "no: Triton is not installed"
    if device.type == "mps":
        return "Metal"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    return f"C++ compiler {compiler}" if compiler else "no: no C++ compiler was found"


def _triton_version() -> str:
    """The package has another name in the builds for ROCm and XPU."""
    names = ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
    installed = {name: metadata.version(name) for name in names for _ in metadata.Distribution.discover(name=name)}
    return next(iter(installed.values()), "of unknown version")


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _text(found: Environment) -> str:
    head = f"halfstep {found.halfstep}, torch {found.torch}, Python {found.python}, {found.platform}"
    backends = f"distributed backends: {', '.join(found.distributed) or 'none'}"
    return "\n\n".join(["\n".join([head, backends]), *map(_device_text, found.devices)])


def _device_text(device: Device) -> str:
    facts = {
        "driver": device.driver,
        "versions": ", ".join(f"{name} {version}" for name, version in device.versions.items()) or "unknown",
        "memory": _gib(device.memory_bytes),
        "cores": _cores(device),
        "torch.compile": device.compile,
        "matmul rates": device.rates,
    }
    lines = [f"{device.device}: {device.name} ({device.backend})"]
    lines += [f"  {name:<14}{value}" for name, value in facts.items()]
    lines += ["", *_table([["format", "support", "matmul", "against fp32", "known from"], *map(_row, device.formats)])]
    lines += ["", *(f"  precision = {name!s:<11}{_verdict(answer)}" for name, answer in device.precisions.items())]
    return "\n".join([*lines, f"  precision = auto       {device.auto.value}: {device.auto.reason}"])


def _row(format: Format) -> list[str]:
    rate = "unknown" if format.rate is None else str(format.rate)
    return [format.name, format.support, "-" if format.support == "absent" else rate, _times(format), format.because]


def _times(format: Format) -> str:
    if format.times_fp32 is None:
        return "-"
    faster = format.times_fp32 >= 1
    return f"{format.times_fp32:.2f} times" if faster else f"{1 / format.times_fp32:.3g} times slower"


def _verdict(answer: Choice[bool]) -> str:
    return f"{'yes' if answer.value else 'no'}: {answer.reason}"


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _gib(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / 2**30:.1f} GiB"


def _cores(device: Device) -> str:
    cores = "unknown" if device.cores is None else str(device.cores)
    return cores if device.threads is None else f"{cores}, torch computes with {device.threads} threads"
