"""`torch.compile` on the repeated blocks of a model, tried at once, so that what cannot be compiled is said before the run.

Each block is compiled in place: names, types and weights stay, and as the blocks are alike one compilation serves them all.
What surrounds them, the head among it, runs as it did, so that the chunked loss goes with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from halfstep.config.choice import Choice
from halfstep.distributed.blocks import repeated_blocks
from halfstep.engine.loss import LossFunction, sum_and_weight
from halfstep.errors import ModelError
from halfstep.precision.untouched import untouched


def compile_blocks(
    model: nn.Module, loss: LossFunction, batch: Any, autocast: Callable[[], AbstractContextManager[object]]
) -> Choice[bool]:
    """Compile the model's blocks, or the whole of it where nothing repeats, and run them forward and backward once.

    Args:
        model: without wrappers, on its device; it has no gradients yet, and has none afterwards.
        loss: of the run.
        batch: a micro-batch on the device.
        autocast: the run's arithmetic.

    Raises:
        ModelError: the compiler cannot do it; with its first line.
    """
    blocks = repeated_blocks(model)
    for part in blocks or [model]:
        part.compile()
    began = time.perf_counter()
    try:
        with untouched(model, next(model.parameters()).device):
            with autocast():
                total, _ = sum_and_weight(loss(model, batch))
            total.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # of dynamo, of inductor, or of the compiler that they call
        cause = str(error).strip().partition("\n")[0]
        raise ModelError(f"`model.compile = true` cannot be: {cause} Use false, or leave it out.") from error
    finally:
        model.zero_grad(set_to_none=True)
    seconds = time.perf_counter() - began
    what = f"{len(blocks)} x {type(blocks[0]).__name__}" if blocks else type(model).__name__
    return Choice(value=True, reason=f"asked for: {what}, compiled in {seconds:.1f} s; other shapes are compiled when they come")
