"""Problem 3: in which number format each module really computes, and what took it out of low precision."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from halfstep.events.vocabulary import Place
from halfstep.findings.finding import Finding
from halfstep.record.probes.layers import grouped
from halfstep.record.probes.lines import line_of_script
from halfstep.record.probes.operations import LOW, Asked, Kind, Operations, Tally
from halfstep.record.probes.paths import Paths
from halfstep.record.probes.probe import Probe
from halfstep.record.probes.rerun import RERUNNING, inner
from halfstep.record.probes.telling import finding
from halfstep.report.parts import AnyPart, Table
from halfstep.rules.measured.bf16 import LEFT_PRECISION

LEFT_LIMIT = 0.05
MOST_TOLD = 3
NAMES = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16", torch.float64: "FP64"}
QUIET = {"_to_copy", "detach", "view", "t", "transpose", "expand", "empty", "zeros", "ones", "clone", "slice", "select", "alias"}
"""Operations that compute nothing."""


class Dtypes(Probe):
    """Listens to the operations of one forward, the first under gradients; after it, it costs nothing."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._modes: list[Any] = []
        self._tallies: dict[Kind, Tally] = {}
        self._paths: Paths | None = None
        self._place: Place | None = None

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Wait for the first forward; a compiled model is not listened to, for its operations are no longer its own."""
        if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in model.modules()):
            return
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")
        self._hooks = [
            model.register_forward_pre_hook(self.safely(self._begin)),
            model.register_forward_hook(self.safely(self._end), always_call=True),
        ]

    def _begin(self, model: nn.Module, _args: Any) -> None:
        if self._paths is not None:
            self.detach()
        elif torch.is_grad_enabled() and not RERUNNING.get():
            self._listen(model)

    def _listen(self, model: nn.Module) -> None:
        self._place = line_of_script()
        self._paths, asked = Paths(inner(model)), Asked(self._device_type)
        operations = Operations(self._paths, asked)
        self._tallies, self._modes = operations.tallies, [operations, asked]
        self._paths.install()
        for mode in reversed(self._modes):
            mode.__enter__()

    def _end(self, *_: Any) -> None:
        """Leave the modes, whether forward ended or raised. Hooks stay: torch is going through them."""
        for mode in self._modes:
            mode.__exit__(None, None, None)
        self._modes = []

    def update_ended(self, index: int) -> None:
        """One forward has told all."""
        if self._paths is not None:
            self.detach()

    def detach(self) -> None:
        """Take out the hooks."""
        self._end()
        for hook in self._hooks:
            hook.remove()
        if self._paths is not None:
            self._paths.remove()
        self._hooks = []

    def findings(self) -> list[Finding]:
        """Matrix products that left low precision, if they weigh anything."""
        left = {kind: tally.flops for kind, tally in self._tallies.items() if tally.flops and kind.why}
        low = sum(tally.flops for kind, tally in self._tallies.items() if kind.dtype in LOW)
        whole = sum(left.values()) + low
        if not whole or sum(left.values()) / whole <= LEFT_LIMIT:
            return []
        heaviest = max(left, key=lambda kind: left[kind])
        reasons = Counter[str]()
        for kind, flops in left.items():
            reasons[f"{kind.why}: `{kind.module or 'the model'}` ({kind.name})"] += flops
        told = "; ".join(f"{reason} {flops / whole:.0%}" for reason, flops in reasons.most_common(3))
        share = f"{sum(left.values()) / whole:.0%} of the forward's matrix work ran in FP32, limit {LEFT_LIMIT:.0%}"
        return [finding(LEFT_PRECISION, heaviest.place or self._place, f"{share}. {told}")]

    def measurements(self) -> list[AnyPart]:
        """The dtype map."""
        if not self._tallies:
            return []
        modules = list(dict.fromkeys(kind.module for kind in self._tallies))
        kinds: dict[str, list[Kind]] = {}
        group = dict(zip(modules, grouped(modules), strict=True))
        for kind in self._tallies:
            kinds.setdefault(group[kind.module], []).append(kind)
        rows = (self._row(name, of_group) for name, of_group in kinds.items())
        about = (
            "What really ran in one forward. Matrix products should be BF16 or FP16; that norms, softmax and losses are FP32 is "
            "meant. The last column says what took an operation out of low precision."
        )
        columns = ("module", "matrix products", "other operations", "why FP32")
        shown = tuple(row for row in rows if any(row[1:3]))
        products = [kind for kind, tally in self._tallies.items() if tally.flops]
        why = list(dict.fromkeys(f"`{kind.module or 'the model'}` {kind.why}" for kind in products if kind.why))
        glance = [f"matrix products in {self._formats(products)}" if products else "no matrix products"]
        glance += [f"in FP32: {'; '.join(why[:MOST_TOLD])}{'; ...' * (len(why) > MOST_TOLD)}"] if why else []
        return [Table(title="Number format of each module", about=about, columns=columns, rows=shown, glance=tuple(glance))]

    def _row(self, name: str, kinds: list[Kind]) -> tuple[str, ...]:
        products = [kind for kind in kinds if self._tallies[kind].flops]
        others = [kind for kind in kinds if kind not in products and kind.name not in QUIET and kind.dtype is not None]
        whys = dict.fromkeys(f"{kind.name}: {kind.why}" for kind in products + others if kind.why)
        return name, self._formats(products), self._formats(others), "; ".join(whys)

    def _formats(self, kinds: list[Kind]) -> str:
        counts = Counter[str]()
        for kind in kinds:
            counts[NAMES.get(kind.dtype or torch.float32, str(kind.dtype))] += self._tallies[kind].count
        return ", ".join(f"{name} ({count})" for name, count in counts.most_common())
