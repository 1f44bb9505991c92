"""A bad micro-batch on disk, and the same once more: nothing in the file can run code when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from halfstep.engine.batch import map_tensors
from halfstep.errors import DataError
from halfstep.precision.untouched import RandomState
from halfstep.record.probes.judgement import NOWHERE, sentence
from halfstep.record.probes.origin import Origin, Phase, find_origin
from halfstep.record.probes.probe import Probe
from halfstep.record.probes.rerun import Call, Casting, inner, versions
from halfstep.record.running import Replayed
from halfstep.report.parts import AnyPart

FORMAT = 1
PLAIN = (str, int, float, bool, type(None))
MOST_BYTES_OF_WEIGHTS = 2 * 2**30
"""Weights larger than this are not written: the replay takes those that the script has at its first forward."""


def save(path: Path, model: nn.Module, call: Call, origin: Origin, *, script: tuple[str, ...] = ()) -> str:
    """Write what is needed to make `call` once more; where it was written, or why it was not, in words.

    Args:
        path: the file.
        model: the model with the parameters of that forward.
        call: the forward.
        origin: what was found. Where forward itself is at fault, what backward brought is its consequence and is left out.
        script: the command that the script was started by.
    """
    module = inner(model)
    state = {name: tensor.detach() for name, tensor in module.state_dict().items() if isinstance(tensor, Tensor)}
    large = sum(tensor.nbytes for tensor in state.values()) > MOST_BYTES_OF_WEIGHTS
    after = origin.phase in (Phase.LOSS, Phase.BACKWARD)
    try:
        content = {
            "format": FORMAT,
            "said": sentence(origin),
            "script": list(script),
            "args": _plain(call.args),
            "kwargs": _plain(call.kwargs),
            "output_gradients": dict(call.output_gradients) if after else {},
            "weights": None if large else state,
            "training": [name for name, part in module.named_modules() if part.training],
            "rng": {"device": str(call.rng.device), "cpu": call.rng.cpu_state, "own": call.rng.device_state},
            "casting": [call.casting.device_type, call.casting.enabled, str(call.casting.dtype), call.casting.cache],
            "loss_is_finite": call.loss_is_finite if after else None,
            "infinity_is_bad": not after,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    except (OSError, RuntimeError, TypeError) as error:
        with suppress(OSError):
            path.unlink()
        return f"the batch could not be saved ({error})"
    return f"the batch was saved: `halfstep watch --replay {path}`"


def load(path: Path) -> dict[str, Any]:
    """What `save` wrote. Only tensors and plain values are read; a file that holds anything else is refused.

    Raises:
        DataError: the file is not there, damaged, or not one of ours.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # torch names no class for what may be wrong with a file
        raise DataError(f"{path} is no batch that `halfstep watch` saved: it is damaged, or holds more than tensors.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{path} is no batch that this version of `halfstep watch` saved.")
    return content


def replay(model: nn.Module, content: Mapping[str, Any], device: torch.device) -> Origin:
    """The first value that is not finite, when the saved forward is made once more with this model.

    The model gets the saved weights, buffers and training modes, and keeps them.

    Raises:
        DataError: the file belongs to a model with other parameters.
    """
    module = inner(model)
    if content["weights"] is not None:
        try:
            module.load_state_dict(content["weights"])
        except RuntimeError as error:
            raise DataError("the saved batch belongs to another model: its parameters have other names or shapes.") from error
    for name, part in module.named_modules():
        part.training = name in content["training"]
    return find_origin(model, [_call(content, device)], device)


class Replay(Probe):
    """Makes a saved forward once more as soon as the script calls its model, and ends the script there."""

    def __init__(self, path: Path) -> None:
        self._content = load(path)
        self._hook: Any = None

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Wait for the first forward."""
        self._hook = model.register_forward_pre_hook(self._first_forward)

    def _first_forward(self, model: nn.Module, _args: Any) -> NoReturn:
        self.detach()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        origin = replay(model, self._content, device)
        told = f"Run again, {sentence(origin)}.\nWhen it was saved, {self._content['said']}."
        raise Replayed(told, reproduced=origin.phase not in NOWHERE)

    def update_ended(self, index: int) -> None:
        """Never comes: the script ends before."""

    def findings(self) -> list[Any]:
        """None: what was found is in `Replayed`."""
        return []

    def measurements(self) -> list[AnyPart]:
        """None."""
        return []

    def detach(self) -> None:
        """Take out the hook."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _plain(value: Any) -> Any:
    """The same nesting in dicts, lists, tuples, tensors and plain values.

    Raises:
        TypeError: it holds anything else.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"the model was given a {type(value).__name__}, which cannot be written safely")


def _call(content: Mapping[str, Any], device: torch.device) -> Call:
    def moved(nested: Any) -> Any:
        return map_tensors(nested, lambda tensor: tensor.to(device))

    args, kwargs, rng = moved(content["args"]), moved(content["kwargs"]), content["rng"]
    device_type, enabled, dtype, cache = content["casting"]
    same_device = torch.device(rng["device"]).type == device.type
    return Call(
        args=args,
        kwargs=kwargs,
        rng=RandomState(device=device, cpu_state=rng["cpu"], device_state=rng["own"] if same_device else None),
        casting=Casting(
            device_type=device_type, enabled=enabled, dtype=getattr(torch, dtype.removeprefix("torch.")), cache=cache
        ),
        loss_is_finite=content["loss_is_finite"],
        infinity_is_bad=content["infinity_is_bad"],
        output_gradients=moved(content["output_gradients"]),
        versions=versions(args, kwargs),
    )
