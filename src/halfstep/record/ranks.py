"""What ranks must have alike, noted on each of them so that it can be compared: parameters, inputs, random states, gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.events.vocabulary import EpochBegin, Place
from halfstep.measure.checksums import checksums
from halfstep.record.recorder import Listener, Recorder

EVERY = 256
"""Parameters are compared after 1, 2, 4, 8, ... updates and every so many."""
MOST_INPUTS = 64
MOST_COLLECTIVES = 256
MOST_INPUTS_ON_DEVICE = 8
FIRST_UPDATES = 4
"""Updates whose random states and gradients are noted."""
BYTES = 16_384


@dataclass(frozen=True, slots=True)
class Together:
    """A collective: its kind, the shapes of the tensors that it was given, and its line."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    place: Place | None


@dataclass(slots=True)
class Shared:
    """What one rank noted of its DDP model."""

    names: tuple[str, ...] = ()
    checksums: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """One number a parameter, by update."""
    inputs: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Fingerprint and shape of what each of the first training passes got."""
    random: list[tuple[int, int]] = field(default_factory=list)
    """Passes over loaders begun, and a fingerprint of the random state, at the end of the first updates."""
    missing: list[tuple[str, ...]] = field(default_factory=list)
    """Parameters without a gradient, in the first updates."""
    zero: list[tuple[str, ...]] = field(default_factory=list)
    """Parameters with a gradient of zeros, in the first updates."""
    idle: list[frozenset[str]] = field(default_factory=list)
    """Parameters to which this rank's own micro-batches brought nothing, or zeros, before the reduction, in the first updates."""
    find_unused: bool = False
    forwards: int = 0
    reducing: int = 0
    """Training passes of the DDP model, and those whose backward reduces gradients over the ranks."""
    num_collectives: int = 0
    collectives: list[Together] = field(default_factory=list)
    """The script's own first collectives over all ranks."""
    backwards: int = 0
    place: Place | None = None
    """Where the model is called."""


class Meter(Listener):
    """Notes what ranks must have alike. Does nothing in a process that is alone."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.rank: int | None = None
        self.size = 1
        self.shared = Shared()
        self._updates = 0
        self._names: dict[str, Tensor] = {}
        self._arrived: dict[str, Tensor] = {}
        """Whether anything but zeros came to a parameter since the last update, before the reduction."""
        self._hooks: list[Any] = []

    def joined_group(self, rank: int, size: int) -> None:
        """This process is a rank now."""
        self.rank, self.size = rank, size

    def forward_begins(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note what a DDP model gets."""
        if self.size < 2 or not isinstance(model, DistributedDataParallel) or not torch.is_grad_enabled():
            return
        shared = self.shared
        if not self._names:
            self._names = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
            shared.names, shared.find_unused = tuple(self._names), bool(model.find_unused_parameters)
            self._hooks = [p.register_hook(self._arriving(name)) for name, p in self._names.items()]  # type: ignore[no-untyped-call]
        shared.forwards += 1
        shared.reducing += bool(model.require_backward_grad_sync)
        first = next(_tensors(inputs), None)
        most = MOST_INPUTS if first is None or first.device.type == "cpu" else MOST_INPUTS_ON_DEVICE
        if first is not None and len(shared.inputs) < most:
            shared.inputs.append((fingerprint(first), tuple(first.shape)))

    def backward_begins(self, loss: Tensor, place: Place | None) -> None:
        """Count."""
        self.shared.backwards += 1
        self.shared.place = self.shared.place or place

    def update_ended(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """Note parameters, gradients and random state, now and then."""
        if self.size < 2 or not self._names or not self._is_mine(optimizer):
            return
        self._updates += 1
        number, shared = self._updates, self.shared
        if number & (number - 1) == 0 or number % EVERY == 0:
            shared.checksums[number] = checksums(self._names.values())
        if number <= FIRST_UPDATES:
            epochs = sum(draft.kind is EpochBegin for draft in self._recorder.tape.head)
            shared.random.append((epochs, fingerprint(torch.get_rng_state())))
            shared.missing.append(tuple(name for name, p in self._names.items() if p.grad is None))
            shared.zero.append(tuple(n for n, p in self._names.items() if p.grad is not None and not bool(p.grad.any())))
            shared.idle.append(frozenset(n for n in self._names if n not in self._arrived or not bool(self._arrived[n])))
            self._arrived.clear()
        if number == FIRST_UPDATES:
            self.left_group()

    def collective_begins(self, kind: str, tensors: tuple[Tensor, ...], place: Place | None) -> None:
        """Note what the script does together with all ranks."""
        self.shared.num_collectives += 1
        if len(self.shared.collectives) < MOST_COLLECTIVES:
            self.shared.collectives.append(Together(kind, tuple(tuple(t.shape) for t in tensors), place))

    def left_group(self) -> None:
        """Look at single gradients no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _arriving(self, name: str) -> Callable[[Tensor], None]:
        def arrive(gradient: Tensor) -> None:
            present = (gradient._values() if gradient.is_sparse else gradient).detach().any()
            self._arrived[name] = present | self._arrived[name] if name in self._arrived else present

        return arrive

    def _is_mine(self, optimizer: torch.optim.Optimizer) -> bool:
        first = next(iter(self._names.values()))
        return any(p is first for group in optimizer.param_groups for p in group["params"])


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def fingerprint(tensor: Tensor) -> int:
    """A number that tells two tensors apart, from their first bytes."""
    flat = tensor.detach().reshape(-1)
    flat = flat[: BYTES // flat.element_size()].contiguous().view(torch.uint8).cpu()
    return zlib.crc32(flat.numpy().tobytes())
