"""Where the first value that is not finite was made: the kept forwards of an update are made once more under a `Flow`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.events.vocabulary import Place
from halfstep.record.probes.flow import Flow, Kind, Operation, key_of, kind_of
from halfstep.record.probes.paths import Paths
from halfstep.record.probes.rerun import Call, again, floating, inner


class Phase(str, Enum):
    """Where in an update a value stopped to be finite."""

    DATA = "data"
    WEIGHTS = "weights"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    ELSEWHERE = "another rank"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The first value that is not finite.

    Attributes:
        phase: where it was made.
        module: path of the module that made it, or that first met it where it came with the data; empty for the model itself.
        op: the operation, such as `mm` or `LogBackward0`; empty where none was seen.
        kind: infinity or NaN.
        place: the line that made it, or that called the model.
        micro_batch: which forward of the update, from 0.
        sample_ids: the samples of that micro-batch, where the loader told.
        loss_is_finite: whether backward began from a finite loss; None where that was not heard.
        guarded: whether the operation of the loss divides by a guard that FP16 rounded to zero.
        in_fp16: whether the operation of the loss is a sum, mean or power in FP16.
        detail: which input, weight or row, or why nothing was found.
        operation: all that is known of the operation; None where there is none.
    """

    phase: Phase
    module: str = ""
    op: str = ""
    kind: Kind = Kind.NAN
    place: Place | None = None
    micro_batch: int = 0
    sample_ids: tuple[int, ...] = ()
    loss_is_finite: bool | None = None
    guarded: bool = False
    in_fp16: bool = False
    detail: str = ""
    operation: Operation | None = None


def find_origin(model: nn.Module, calls: Sequence[Call], device: torch.device) -> Origin:
    """The first value that is not finite in forwards made again, with their backwards.

    Parameters must be what they were when the script made the forwards. Nothing of the model is changed.
    """
    alone = cannot_run_alone(model)
    if alone or not calls:
        return Origin(phase=Phase.UNKNOWN, detail=alone or "no forward under gradients was heard in this update")
    unknown = Origin(phase=Phase.UNKNOWN, detail="run again, its forwards and backwards are finite")
    if isinstance(model, DistributedDataParallel):
        unknown = Origin(phase=Phase.ELSEWHERE, detail="what this rank computed is finite")
    for number, call in enumerate(calls):
        found = _of_call(model, call, device)
        if found is not None:
            found = replace(
                found,
                micro_batch=number,
                sample_ids=tuple(call.sample_ids or ()),
                place=found.place or call.place,
                loss_is_finite=call.loss_is_finite,
            )
            if found.phase is not Phase.UNKNOWN:
                return found
            unknown = found
    return unknown


def cannot_run_alone(model: nn.Module) -> str:
    """Why one rank cannot make a forward by itself: others would have to take part, and it would wait for them for ever."""
    for module in inner(model).modules():
        if isinstance(module, (DistributedDataParallel, nn.SyncBatchNorm)) or "FSDP" in type(module).__name__:
            return f"{type(module).__name__} inside of the model needs all ranks, so that one cannot run the batch again"
    return ""


def _of_call(model: nn.Module, call: Call, device: torch.device) -> Origin | None:
    if call.changed:
        return Origin(phase=Phase.UNKNOWN, detail="the script wrote over the batch, so that it cannot be run again")
    outside = _outside(inner(model), call)
    paths = Paths(inner(model))
    flow = Flow(outside, paths)
    with again(model, call, device) as module:
        paths.install()
        try:
            with flow:
                output = module.forward(*call.args, **call.kwargs)
        finally:
            paths.remove()
        outputs = floating(output, "output")
        blamed = _in_forward(flow, outputs, call)
        if blamed is not None:
            return blamed
        if call.loss_is_finite is False:
            return Origin(phase=Phase.LOSS, detail="the model's outputs are finite")
        gradients = _usable(outputs, call)
        if not gradients:
            return Origin(phase=Phase.UNKNOWN, detail=call.dropped) if call.dropped else None
        with flow:
            found = _backward(module, outputs, gradients)
    return _in_backward(flow, found, call)


def _outside(module: nn.Module, call: Call) -> dict[int, str]:
    """What tensors are that no operation of the re-run makes."""
    named = {key_of(tensor): f"{Phase.DATA.value} {name}" for name, tensor in call.inputs.items()}
    named |= {key_of(gradient): Phase.LOSS.value for gradient in call.output_gradients.values()}
    named |= {key_of(tensor): f"buffer {name}" for name, tensor in module.named_buffers()}
    return named | {key_of(tensor): f"{Phase.WEIGHTS.value} {name}" for name, tensor in module.named_parameters()}


def _in_forward(flow: Flow, outputs: Mapping[str, Tensor], call: Call) -> Origin | None:
    """Whether forward made it. Infinity alone in an output may be meant, unless what follows from it is bad as well."""
    known_bad = call.infinity_is_bad or call.loss_is_finite is False
    after_is_bad = known_bad or any(kind_of(g) is not Kind.FINITE for g in call.output_gradients.values())
    nan = [tensor for tensor in outputs.values() if kind_of(tensor) is Kind.NAN]
    infinite = [tensor for tensor in outputs.values() if kind_of(tensor) is Kind.INFINITE and after_is_bad]
    return _blamed(flow, nan or infinite, call)


def _blamed(flow: Flow, bad: Sequence[Tensor], call: Call) -> Origin | None:
    """The origin of the bad results that was made first."""
    if not bad:
        return None
    known = [operation.origin() for tensor in bad if (operation := flow.of(tensor)) is not None]
    if not known:
        return Origin(phase=Phase.DATA, kind=kind_of(bad[0]), detail="an output is an input of the model")
    first, source = min(known, key=lambda found: found[0].number)
    origin = Origin(
        phase=Phase.BACKWARD if first.node else Phase.FORWARD,
        module=first.module,
        op=first.node or first.name,
        kind=first.result,
        place=first.place,
        operation=first,
    )
    word, _, name = source.partition(" ")
    if word == Phase.DATA.value:
        return replace(origin, phase=Phase.DATA, place=call.place, detail=_row(name, call.inputs[name]))
    if word == Phase.LOSS.value:
        return replace(origin, phase=Phase.LOSS, detail="backward brought it to the output of the model")
    if word in (Phase.WEIGHTS.value, "buffer"):
        return replace(origin, phase=Phase.WEIGHTS, module=name.rpartition(".")[0], detail=f"`{name}`")
    return origin


def _row(name: str, tensor: Tensor) -> str:
    bad = ~torch.isfinite(tensor)
    if not tensor.dim():
        return f"`{name}`"
    rows = bad.reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
    more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
    return f"`{name}`, sample {rows[0]}{more} of {len(tensor)}"


def _usable(outputs: Mapping[str, Tensor], call: Call) -> dict[str, Tensor]:
    kept = call.output_gradients
    return {name: kept[name] for name, tensor in outputs.items() if name in kept and tensor.requires_grad}


def _backward(module: nn.Module, outputs: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> list[Tensor]:
    """The gradients of the parameters, without touching `.grad`."""
    trained = [p for p in module.parameters() if p.requires_grad]
    given = [gradients[name] for name in gradients]
    found: Sequence[Any] = torch.autograd.grad([outputs[name] for name in gradients], trained, given, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _in_backward(flow: Flow, found: Sequence[Tensor], call: Call) -> Origin | None:
    """The first bad gradient; what the loss handed over is the loss's."""
    for name, gradient in call.output_gradients.items():
        if kind_of(gradient) is not Kind.FINITE:
            return Origin(phase=Phase.LOSS, kind=kind_of(gradient), detail=f"in the gradient of the model's `{name}`")
    return _blamed(flow, [gradient for gradient in found if kind_of(gradient) is not Kind.FINITE], call)
