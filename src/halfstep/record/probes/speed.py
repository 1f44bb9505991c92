"""Problem 2, no faster: a few updates under torch's profiler, then one under a mode that sees every operation."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Finding
from halfstep.measure.dtypes import Arithmetic, Support, dtype_support
from halfstep.measure.rates import matmul_rate
from halfstep.record.probes.lines import line_of_script
from halfstep.record.probes.operations import LOW, Kind, Operations, Tally
from halfstep.record.probes.paths import Paths
from halfstep.record.probes.probe import Probe
from halfstep.record.probes.rerun import RERUNNING, apart, inner
from halfstep.record.probes.savings import Lines, Profile, Saving, savings
from halfstep.record.probes.telling import finding
from halfstep.report.html_figure import number
from halfstep.report.parts import AnyPart, Bars, Table

FIRST = 2
"""Updates that are left to warm up; further ones while a loss scale still looks for its height and steps are skipped."""
LATEST = 50
NUM_UPDATES = 3
SMALL_US = 10.0
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "scaled_dot_product", "mkldnn_linear", "linear")
NODES = "autograd::engine::evaluate_function"


class Speed(Probe):
    """Where the time of an update goes.

    Args:
        rate_budget_s: how long to multiply matrices in each number format, for the factor that low precision would give.
    """

    def __init__(self, *, rate_budget_s: float = 0.3) -> None:
        self._rate_budget_s = rate_budget_s
        self._hooks: list[Any] = []
        self._profiler: Any = None
        self._mode: Operations | None = None
        self._place: Place | None = None
        self._loop: Place | None = None
        self._profile: Profile | None = None
        self._events: list[FunctionEvent] = []
        self._seconds, self._forward_s, self._begun = 0.0, 0.0, 0.0
        self._step_s, self._step_begun = 0.0, 0.0
        self._step_place: Place | None = None
        self._optimizer_told = self._form_told = ""
        self._graphs = 0
        self._stepped = False
        self._first: int | None = None

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Hear forwards, to time them and to know their line."""
        self._optimizer, self._paths = weakref.ref(optimizer), Paths(inner(model))
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._hooks = [
            model.register_forward_pre_hook(self.safely(self._before)),
            model.register_forward_hook(self.safely(self._after)),
            optimizer.register_step_post_hook(self.safely(self._after_step)),
        ]

    @property
    def profiling(self) -> bool:
        """Whether seconds are being measured now: other probes should take none."""
        return self._profiler is not None

    def batch_fetched(self, batch: Any, sample_ids: Sequence[int] | None) -> None:
        """Note the line of the loop over batches."""
        self._loop = self._loop or line_of_script()

    def _before_step(self, *_: Any) -> None:
        self._step_place = self._step_place or line_of_script()
        self._step_begun = time.perf_counter()

    def _after_step(self, *_: Any) -> None:
        self._stepped = True
        if self._step_begun:
            self._step_s, self._step_begun = self._step_s + time.perf_counter() - self._step_begun, 0.0

    def _before(self, *_: Any) -> None:
        self._place = self._place or line_of_script()
        self._begun = time.perf_counter()

    def _after(self, *_: Any) -> None:
        if self._profiler is not None and not RERUNNING.get():
            self._forward_s += time.perf_counter() - self._begun

    def update_ended(self, index: int) -> None:
        """Warm up, profile a few updates, listen to one, and be done."""
        ready = index >= FIRST - 1 and (self._stepped or index >= LATEST)
        self._stepped = False
        if self._first is None and ready:
            self._first = index + 1
            self._start()
        elif self._first is not None and index == self._first + NUM_UPDATES - 1:
            self._stop()
            self._paths.install()
            self._mode = Operations(self._paths)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        elif self._first is not None and index == self._first + NUM_UPDATES and self._mode is not None:
            tallies = self._mode.tallies
            self.detach()
            self._profile = self._read(tallies)

    def _start(self) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        # its hook before the step is the last one, as that after it is the first
        self._hooks.append(optimizer.register_step_pre_hook(self.safely(self._before_step)))
        self._optimizer_told, self._form_told = type(optimizer).__name__, self._form(optimizer.param_groups[0])
        on = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        self._profiler = profile(activities=on)
        self._graphs, self._forward_s = _graphs(), 0.0
        self._profiler.start()
        self._seconds = time.perf_counter()

    def _stop(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._seconds = time.perf_counter() - self._seconds
        self._hooks.pop().remove()
        self._profiler.stop()
        self._graphs = _graphs() - self._graphs
        self._events, self._profiler = list(self._profiler.events()), None

    def _read(self, tallies: Mapping[Kind, Tally]) -> Profile:
        """One update, from the events of a few and the operations of one."""
        own = [e for e in self._events if e.device_type == DeviceType.CPU]
        kernels = [e for e in self._events if e.device_type != DeviceType.CPU]
        on_cpu = self._device.type == "cpu"
        leaves = [e for e in own if e.name.startswith("aten::")] if on_cpu else kernels
        small = [us for e in leaves if 0 < (us := e.self_cpu_time_total if on_cpu else e.device_time_total) < SMALL_US]
        products = {kind: tally for kind, tally in tallies.items() if tally.flops}
        flops: dict[torch.dtype, float] = {}
        for kind, tally in products.items():
            flops[kind.dtype or torch.float32] = flops.get(kind.dtype or torch.float32, 0.0) + tally.flops
        casts = [tally for kind, tally in tallies.items() if kind.moved == "cast"]
        return Profile(
            updates=NUM_UPDATES,
            seconds=self._seconds / NUM_UPDATES,
            waiting_s=_total_s(own, "enumerate(DataLoader)") / NUM_UPDATES,
            forward_s=self._forward_s / NUM_UPDATES,
            backward_s=_total_s(own, NODES) / NUM_UPDATES,
            optimizer_s=self._step_s / NUM_UPDATES,
            optimizer_place=self._step_place,
            loop_place=self._loop,
            optimizer=self._optimizer_told,
            optimizer_form=self._form_told,
            products_s=_products_s(own, on_cpu) / NUM_UPDATES,
            flops=flops,
            odd_flops=sum(t.flops for k, t in products.items() if k.dtype in LOW and any(side % 8 for side in k.shape)),
            casts_s=sum(tally.seconds for tally in casts) if on_cpu else None,
            casts=sum(tally.count for tally in casts),
            reads=_at_lines(tallies, lambda kind: kind.name == "_local_scalar_dense"),
            transfers=_at_lines(tallies, lambda kind: kind.moved.startswith("cpu to")),
            transfers_s=None if on_cpu else sum(e.device_time_total for e in kernels if "HtoD" in e.name) / 1e6 / NUM_UPDATES,
            small_s=sum(small) / 1e6 / NUM_UPDATES,
            small=len(small) / NUM_UPDATES,
            operations=len(leaves) / NUM_UPDATES,
            tf32_off=self._tf32_off(),
            recompiles=self._graphs,
            speedup=self._speedup(),
            device_type=self._device.type,
        )

    def _form(self, group: dict[str, Any]) -> str:
        if group.get("fused"):
            return "fused"
        asked = group.get("foreach")
        return "foreach" if asked or (asked is None and self._device.type == "cuda") else "loop"

    def _tf32_off(self) -> bool:
        has = dtype_support(self._device)[Arithmetic.TF32].support is Support.NATIVE
        return has and torch.get_float32_matmul_precision() == "highest"

    def _speedup(self) -> float | None:
        """Measured: how much faster the device multiplies in the better of its native half formats."""
        told = dtype_support(self._device)
        native = [a for a in (Arithmetic.BF16, Arithmetic.FP16) if told[a].support is Support.NATIVE]
        if not native:
            return None
        with apart():
            rates = [matmul_rate(self._device, a, budget_s=self._rate_budget_s).value for a in (Arithmetic.FP32, *native)]
        return max(rates[1:]) / rates[0]

    def findings(self) -> list[Finding]:
        """What could be saved, each with its line and the change."""
        return [] if self._profile is None else [self._finding(self._profile, saving) for saving in savings(self._profile)]

    def _finding(self, measured: Profile, saving: Saving) -> Finding:
        most = (
            "unknown" if saving.seconds is None else f"{saving.seconds * 1e3:.3g} ms of {measured.seconds * 1e3:.3g} ms an update"
        )
        found = finding(saving.card, saving.place or self._place, f"{saving.told}; could save at most: {most}")
        return replace(found, why=f"{found.why} Instead: `{saving.change}`")

    def measurements(self) -> list[AnyPart]:
        """Phases, matrix work by format, and what could be saved."""
        p = self._profile
        if p is None:
            about = f"The script ended within {FIRST + NUM_UPDATES} updates, or skipped them: nothing was profiled."
            return [Table(title="Time per phase", about=about, columns=("phase", "seconds"), rows=(), glance=(about,))]
        rest = max(0.0, p.seconds - p.waiting_s - p.forward_s - p.backward_s - p.optimizer_s)
        phases = (("waiting for data", p.waiting_s), ("forward", p.forward_s), ("backward", p.backward_s))
        about = (
            f"Seconds of one update on the host, mean of {p.updates} under torch's profiler. Waiting should be next to nothing."
        )
        work = tuple((str(dtype).removeprefix("torch."), flops / 1e9) for dtype, flops in p.flops.items())
        found = savings(p)
        rows = tuple((s.card.what, number(s.seconds, "s"), s.told, s.change) for s in found)
        most = "Seconds of one update, largest first: each change saves at most so much."
        return [
            Bars(title="Time per phase", about=about, items=(*phases, ("optimizer step", p.optimizer_s), ("the rest", rest))),
            Bars(title="Matrix work by number format", about="In one update, forward and backward.", items=work, unit="GFLOP"),
            Table(title="What to change", about=most, columns=("what", "at most", "measured", "change"), rows=rows, glance=()),
        ]

    def detach(self) -> None:
        """Leave the mode, stop the profiler, take out the hooks."""
        if self._profiler is not None:
            self._profiler.stop()
        if self._mode is not None:
            self._mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._paths.remove()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._mode, self._profiler = [], None, None


def _total_s(events: list[FunctionEvent], name: str) -> float:
    """Seconds in events whose name begins so and that lie in no other such."""
    found = [e for e in events if e.name.startswith(name) and not _inside(e, name)]
    return float(sum(e.cpu_time_total for e in found)) / 1e6


def _inside(event: FunctionEvent, name: str) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(name):
            return True
        parent = parent.cpu_parent
    return False


def _products_s(events: list[FunctionEvent], on_cpu: bool) -> float:
    """Seconds in matrix products: their own time on the CPU, that of their kernels elsewhere."""
    found = [e for e in events if e.name.removeprefix("aten::").strip("_").startswith(PRODUCTS)]
    return float(sum(e.self_cpu_time_total if on_cpu else e.self_device_time_total for e in found)) / 1e6


def _at_lines(tallies: Mapping[Kind, Tally], chosen: Any) -> tuple[Lines, ...]:
    counts: dict[tuple[Place | None, str], int] = {}
    for kind, tally in tallies.items():
        if chosen(kind):
            counts[kind.place, kind.moved] = counts.get((kind.place, kind.moved), 0) + tally.count
    return tuple(Lines(place=place, count=count, what=what) for (place, what), count in counts.items())


def _graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0
