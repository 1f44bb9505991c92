"""Problems 1 and 3: what FP16 loses of the gradients, what BF16 weights lose of the updates, and how large updates are.

Of each parameter a few thousand values are looked at, before and after the step, in as many updates as the budget allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Finding
from halfstep.record.probes.budget import Budget
from halfstep.record.probes.history import Grid
from halfstep.record.probes.layers import Layers, values
from halfstep.record.probes.lines import line_of_script
from halfstep.record.probes.probe import Probe
from halfstep.record.probes.rerun import RERUNNING
from halfstep.record.probes.scale import scale_of
from halfstep.record.probes.telling import finding
from halfstep.report.parts import AnyPart, Table
from halfstep.rules.measured import bf16 as bf16_cards
from halfstep.rules.measured import numbers as number_cards
from halfstep.rules.numbers.amp_pure_bf16_update_lost import CARD as LOST

MOST_VALUES = 4096
FP16_NORMAL = 2.0**-14
FP16_ROUNDS_TO_ZERO = 2.0**-25
BF16_NORMAL = 2.0**-126
LOST_LIMIT = 0.5
UNDERFLOW_LIMIT = 0.5
RATIO_LIMIT = 0.1
MOST_KEPT = 64
MOST_TOLD = 3


@dataclass(slots=True)
class Seen:
    """What was measured of one layer, update by update; the last few dozen are kept."""

    subnormal: list[float] = field(default_factory=list)
    """Share of values that are not zero and lose digits in FP16 at the loss scale."""
    vanished: list[float] = field(default_factory=list)
    """Share of values that would be zero in FP16 at the loss scale, and are not."""
    zero: list[float] = field(default_factory=list)
    below_bf16: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    """Share of values with a gradient that the step left as they were."""

    def add(self, **amounts: float) -> None:
        """Keep the amounts of one update."""
        for name, amount in amounts.items():
            kept: list[float] = getattr(self, name)
            kept.append(amount)
            del kept[:-MOST_KEPT]


class Sizes(Probe):
    """Sizes of gradients and updates, layer by layer."""

    def __init__(self, *, budget: Budget | None = None) -> None:
        self._budget = budget or Budget()
        self._hooks: list[Any] = []
        self._before: list[tuple[int, Tensor, Tensor | None]] = []
        self._place: Place | None = None
        self._forwards, self._most_forwards, self._update = 0, 0, 0
        self._half, self._rate, self._rates_are_zero = False, 0.0, False
        self._low_told, self._adds_in_bf16 = "", False

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Hear steps and forwards."""
        self._layers = Layers.of(model, optimizer)
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._seen = [Seen() for _ in self._layers.names]
        self._underflow, self._ratios = Grid(self._layers.names), Grid(self._layers.names)
        self._hooks = [
            model.register_forward_pre_hook(self.safely(self._forward)),
            optimizer.register_step_pre_hook(self.safely(self._before_step)),
            optimizer.register_step_post_hook(self.safely(self._after_step)),
        ]

    def scaled_by(self, scaler: torch.amp.GradScaler) -> None:
        """Note a scaler that is new."""
        self._scaler = scaler

    def _forward(self, model: nn.Module, _args: Any) -> None:
        if RERUNNING.get() or not torch.is_grad_enabled():
            return
        self._forwards += 1
        self._place = self._place or line_of_script()
        if not self._half:
            device = self._device_type
            self._half = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.float16

    def _before_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        self._before = []
        if self._budget.allows():
            with self._budget.spending(begins=True), torch.no_grad():
                scaled = getattr(optimizer, "grad_scale", None)
                rates = [float(group["lr"]) for group in optimizer.param_groups]
                self._rate, self._rates_are_zero = max(self._rate, *rates), not any(rates)
                self._look(1.0 if scaled is None else float(scaled))

    def _look(self, divisor: float) -> None:
        """Sample weights and gradients, and count what FP16 holds of the gradients."""
        scale = scale_of(self._scaler) or 1.0
        for index, parameter in self._layers.parameters():
            gradient = None if parameter.grad is None else sample(values(parameter.grad)).float() / divisor
            sparse = parameter.grad is not None and parameter.grad.is_sparse
            self._before.append((index, sample(values(parameter)).clone(), None if sparse else gradient))
        if self._scaler is not None or self._half:
            self._underflow.add(self._update, [self._count(layer, scale) for layer in range(len(self._seen))])

    def _of_layer(self, layer: int) -> list[tuple[int, Tensor, Tensor]]:
        owner = self._layers.owner
        return [(i, weight, gradient) for i, weight, gradient in self._before if owner[i] == layer and gradient is not None]

    def _count(self, layer: int, scale: float) -> float | None:
        """The share of a layer's gradient values that FP16 holds with fewer digits or not at all, zeros aside."""
        found = [gradient for _, _, gradient in self._of_layer(layer)]
        if not found:
            return None
        sizes = torch.cat(found).abs()
        present = int((sizes > 0).sum())
        scaled = sizes * scale
        share = [scaled < FP16_NORMAL, scaled <= FP16_ROUNDS_TO_ZERO, sizes < BF16_NORMAL]
        subnormal, vanished, below = (float(((sizes > 0) & low).sum()) / max(present, 1) for low in share)
        zero = 1 - present / len(sizes)
        self._seen[layer].add(subnormal=subnormal, vanished=vanished, below_bf16=below, zero=zero)
        return subnormal

    def _after_step(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._before:
            return
        with self._budget.spending(begins=False), torch.no_grad():
            self._ratios.add(self._update, [self._moved(layer) for layer in range(len(self._seen))])
            self._note_bf16(optimizer)
        self._before = []

    def _moved(self, layer: int) -> float | None:
        """The size of a layer's update against that of its weights; what rounding took of it is booked."""
        change = weight = 0.0
        asked = lost = 0
        for index, before, gradient in self._of_layer(layer):
            parameter = self._layers.held[index]()
            after = before if parameter is None else sample(values(parameter))
            change += float((after.float() - before.float()).square().sum())
            weight += float(before.float().square().sum())
            if before.dtype is torch.bfloat16:
                asked += int((gradient != 0).sum())
                lost += int(((gradient != 0) & (after == before)).sum())
        if asked and change == change and not self._rates_are_zero:  # as warm-up begins with: nothing is lost to rounding
            self._seen[layer].add(lost=lost / asked)
        if weight == 0.0:
            return None
        ratio = float((change / weight) ** 0.5)
        self._seen[layer].add(ratio=ratio)
        return ratio

    def _note_bf16(self, optimizer: torch.optim.Optimizer) -> None:
        """What the optimizer's state and the gradients are stored in."""
        state = [t for kept in optimizer.state.values() for t in kept.values() if isinstance(t, Tensor)]
        low = sum(t.dtype is torch.bfloat16 for t in state)
        self._low_told = f"{low} of {len(state)} tensors of {type(optimizer).__name__}'s state are BF16" if low else ""
        held = [t for _, p in self._layers.parameters() for t in (p, p.grad) if t is not None]
        self._adds_in_bf16 = any(t.dtype is torch.bfloat16 for t in held)

    def update_ended(self, index: int) -> None:
        """Count the forwards of the update."""
        self._most_forwards = max(self._most_forwards, self._forwards)
        self._forwards, self._update = 0, index + 1

    def findings(self) -> list[Finding]:
        """What is lost, and updates that are large."""
        found = [*self._lost(), *self._large(), *self._underflown()]
        return found + self._low_state()

    def _lost(self) -> list[Finding]:
        shares = self._medians("lost")
        worst = [(name, share) for name, share in shares if share > LOST_LIMIT]
        if not worst:
            return []
        told = ", ".join(f"`{name}` {share:.0%}" for name, share in sorted(worst, key=lambda item: -item[1])[:4])
        message = f"BF16 weights with a gradient that the step leaves as they are, limit {LOST_LIMIT:.0%}: {told}"
        return [finding(LOST, self._place, f"{message}; {len(worst)} of {len(shares)} layers, {self._counted('lost')}")]

    def _large(self) -> list[Finding]:
        large = [(name, ratio) for name, ratio in self._medians("ratio") if ratio > RATIO_LIMIT]
        if not large:
            return []
        name, ratio = max(large, key=lambda item: item[1])
        message = f"an update changes `{name}` by {ratio:.0%} of its size, limit {RATIO_LIMIT:.0%}"
        layers = f"{len(large)} of {len(self._seen)} layers, {self._counted('ratio')}"
        told = f"{message}, at a learning rate of up to {self._rate:g}; {layers}"
        return [finding(bf16_cards.LARGE_UPDATES, self._place, told)]

    def _underflown(self) -> list[Finding]:
        low = [(name, share) for name, share in self._medians("subnormal") if share > UNDERFLOW_LIMIT]
        if not low:
            return []
        name, share = max(low, key=lambda item: item[1])
        scale = scale_of(self._scaler) or 1.0
        below = f"{share:.0%} of the gradient values, zeros aside, are below FP16's normal range"
        message = f"`{name}`: {below} at a loss scale of {scale:g}, limit {UNDERFLOW_LIMIT:.0%}"
        return [finding(number_cards.UNDERFLOW, self._place, message)]

    def _low_state(self) -> list[Finding]:
        found = [finding(bf16_cards.STATE, self._place, self._low_told)] if self._low_told else []
        if self._most_forwards > 1 and self._adds_in_bf16:
            told = f"gradients of {self._most_forwards} micro-batches are added up in BF16"
            found.append(finding(bf16_cards.ACCUMULATION, self._place, told))
        return found

    def _medians(self, name: str) -> list[tuple[str, float]]:
        pairs = zip(self._layers.names, self._seen, strict=True)
        return [(layer, median(kept)) for layer, seen in pairs if (kept := getattr(seen, name))]

    def _counted(self, name: str) -> str:
        count = max(len(getattr(seen, name)) for seen in self._seen)
        return f"median of {count} updates" if count > 1 else "1 update"

    def measurements(self) -> list[AnyPart]:
        """Heat maps of update ratio and underflow, and the tables behind them."""
        parts: list[AnyPart] = []
        if any(seen.ratio for seen in self._seen):
            about = "How far an update moves a layer against its size. 0.001 is usual, more than 0.1 is much."
            parts.append(self._ratios.log_heat(title="Update ratio per layer", about=about))
        if any(seen.subnormal for seen in self._seen):
            about = "Share of gradient values, zeros aside, that FP16 holds with fewer digits or not at all at its loss scale."
            parts.append(self._underflow.heat(title="FP16 underflow per layer", about=about, unit="share"))
            parts.append(self._underflow_table())
        if any(seen.lost for seen in self._seen):
            rows = tuple((name, f"{share:.1%}") for name, share in sorted(self._medians("lost"), key=lambda item: -item[1]))
            about = "Of the values that have a gradient, how many the step left bitwise as they were. FP32 weights lose none."
            parts.append(Table(title="BF16 updates lost to rounding", about=about, columns=("layer", "lost"), rows=rows))
        return parts

    def _underflow_table(self) -> Table:
        columns = ("layer", "FP16: fewer digits", "FP16: would be zero", "BF16: below its range", "exactly zero")
        names = ("subnormal", "vanished", "below_bf16", "zero")
        cells = [dict(self._medians(name)) for name in names]
        layers = sorted(cells[0], key=lambda name: (-cells[1][name], -cells[0][name]))
        rows = tuple((name, *(f"{cell[name]:.1%}" for cell in cells)) for name in layers)
        about = (
            f"Shares of a layer's values, {self._counted('subnormal')}. Zeros may be true ones, or values that FP16 has already "
            f"lost in backward. BF16 has the range, and 8 instead of 11 bits for the digits."
        )
        gone = [f"`{name}` {cells[1][name]:.1%}" for name in layers[:MOST_TOLD] if cells[1][name]]
        glance = (f"would be zero in FP16: {', '.join(gone)}",) if gone else ()
        title = "What FP16 and BF16 hold of the gradients"
        return Table(title=title, about=about, columns=columns, rows=rows, glance=glance)

    def detach(self) -> None:
        """Take out the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._before = [], []


def sample(tensor: Tensor) -> Tensor:
    """At most a few thousand values, spread over the tensor; an odd stride meets every column of most matrices."""
    flat = tensor.reshape(-1)
    stride = -(-flat.numel() // MOST_VALUES)
    return flat if stride <= 1 else flat[:: stride | 1]
