"""One global batch, divided into micro-batches in every way: the update must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from halfstep.certify.certificate import Line, Topic
from halfstep.certify.exact import Exact, Result, exact
from halfstep.certify.recording import recorded, update_of
from halfstep.certify.stillness import plain_loss
from halfstep.certify.subject import Parts
from halfstep.engine.batch import map_tensors, num_samples, split, tensors
from halfstep.train.own import told

MEAN = (
    "the loss function returns a mean, which counts as one however many samples it is over: return the sum and its weight, "
    "`(loss_sum, count)`, and any division gives the same update"
)


def split_lines(parts: Parts, right: Exact) -> Iterator[Line]:
    """The claims about divisions of the global batch, whose right result is given."""
    counts = [num_samples(batch) for batch in parts.batches]
    given = f"{len(counts)} micro-batches of {_counts(counts)} samples"
    yield compared(f"as it was given, in {given}", right, update_of(parts, parts.batches)[0])
    for claim, divided in _divisions(parts.batches).items():
        if isinstance(divided, str):
            yield Line(topic=Topic.SPLITS, claim=claim, holds=None, note=divided)
        elif not _weighs_samples(parts) and len({*counts, *_sizes(divided)}) > 1 and not _even(counts, _sizes(divided)):
            yield Line(topic=Topic.SPLITS, claim=claim, holds=None, note=MEAN)
        else:
            yield _divided(claim, parts, divided, right)
    yield _ragged(parts)
    yield _tail(parts)


def _divided(claim: str, parts: Parts, divided: Sequence[Any], right: Exact | None = None) -> Line:
    """Not asked where it is the model itself that does not take such micro-batches."""
    try:
        return compared(claim, right or exact(parts, divided), update_of(parts, divided)[0])
    except Exception:
        try:
            plain_loss(parts, divided, 0)
        except Exception as error:  # whatever the user's model raises
            return Line(topic=Topic.SPLITS, claim=claim, holds=None, note=f"the model takes no such micro-batches: {told(error)}")
        raise


def compared(claim: str, right: Exact, found: Result, *, topic: Topic = Topic.SPLITS) -> Line:
    """The claim that an update has the right gradient, and reports the right loss."""
    deviation, where = right.deviation(found)
    loss = right.loss_deviation(found.loss)
    return Line(
        topic=topic,
        claim=claim,
        holds=deviation <= right.tolerance and loss <= right.tolerance,
        figure=f"gradient {deviation:.1e} of its norm away, most in {where}; reported loss {loss:.1e} away",
        tolerance=f"{right.tolerance:.1e}: {right.source}",
    )


def _divisions(batches: Sequence[Any]) -> dict[str, list[Any] | str]:
    """Names of divisions with their micro-batches, or why there are none."""
    samples = sum(map(num_samples, batches))
    return {
        f"1 x {samples}: all in one micro-batch": _merged(batches),
        f"{samples} x 1: a micro-batch for each sample": [part for b in batches for part in split(b, num_samples(b))],
        "uneven: one sample first, then the rest of its micro-batch": [part for b in batches for part in _unevenly(b)],
    }


def _merged(batches: Sequence[Any]) -> list[Any] | str:
    found = [list(tensors(batch)) for batch in batches]
    shapes = [[(name, tensor.dim() and tensor.shape[1:]) for name, tensor in batch] for batch in found]
    if any(shape != shapes[0] for shape in shapes) or any(not t.dim() for batch in found for _, t in batch):
        return "the micro-batches have tensors of different lengths, which do not go into one"
    columns = [iter([torch.cat(same) for same in zip(*([t for _, t in batch] for batch in found), strict=True)])]
    return [map_tensors(batches[0], lambda _: next(columns[0]))]


def _unevenly(batch: Any) -> list[Any]:
    samples = num_samples(batch)

    def run(begin: int, end: int) -> Any:
        return map_tensors(batch, lambda t: t[begin:end] if t.dim() and t.shape[0] == samples else t)

    return [run(0, 1), run(1, samples)]


def _sizes(batches: Sequence[Any]) -> list[int]:
    return [num_samples(batch) for batch in batches]


def _even(given: Sequence[int], divided: Sequence[int]) -> bool:
    """Whether means weigh every sample alike in both divisions."""
    return len(set(given)) == 1 and len(set(divided)) == 1


def _weighs_samples(parts: Parts) -> bool:
    model, batch = parts.model, parts.batches[0]
    device = next(model.parameters()).device
    with torch.no_grad():
        return isinstance(parts.loss(model, map_tensors(batch, lambda t: t.to(device))), tuple)


def _ragged(parts: Parts) -> Line:
    """Micro-batches of different numbers of samples, each weighed by what counts in it."""
    ragged = [split(b, num_samples(b))[0] if index % 2 else b for index, b in enumerate(parts.batches)]
    claim = f"ragged: micro-batches of {_counts(_sizes(ragged))} samples, each weighed by what counts in it"
    return _divided(claim, parts, ragged)


def _tail(parts: Parts) -> Line:
    """An epoch whose last window is shorter."""
    engine, optimizer = recorded(parts, accumulate=len(parts.batches))
    updates = list(engine.updates([*parts.batches, parts.batches[0]]))
    claim = f"the last window of an epoch, 1 micro-batch where the others have {len(parts.batches)}"
    return compared(claim, exact(parts, parts.batches[:1]), Result(loss=updates[-1].loss, gradients=optimizer.heard[-1]))


def _counts(counts: Sequence[int]) -> str:
    return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
