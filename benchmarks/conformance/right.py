"""The right answer: plain PyTorch in FP64, each window of all ranks as one big batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.conformance.job import ESTIMATED, Batch, Items, Job, Outcome, counted, parts_of, summed_loss


def windows(job: Job) -> Iterator[list[int]]:
    """Numbers of the micro-batches of each window of an epoch, over all ranks."""
    shares = [list(range(rank, len(job.items), job.ranks)) for rank in range(job.ranks)]
    for begin in range(0, len(shares[0]), job.accumulate):
        yield [number for share in shares for number in share[begin : begin + job.accumulate]]


def right(job: Job) -> Outcome:
    """What the job must give."""
    if job.estimates:
        return Outcome(estimate=_needed())
    parts = parts_of(job)
    parts.model.double()
    items, scale, good = Items(job), job.init_scale, 0
    losses: list[float] = []
    norms: list[float] = []
    scales: list[float] = []
    averaged = 0
    for epoch in range(job.epochs):
        epoch_sum = epoch_count = 0.0
        for numbers in windows(job):
            total, count = _backward(parts.model, [items[number] for number in numbers])
            epoch_sum, epoch_count = epoch_sum + total, epoch_count + count
            losses.append(total / count if count else float("nan"))
            norm = float(nn.utils.clip_grad_norm_(parts.model.parameters(), job.clip_norm or float("inf")))
            if job.clip_value is not None:
                nn.utils.clip_grad_value_(parts.model.parameters(), job.clip_value)
            norms.append(norm)
            scales.append(scale)
            finite = all(bool(p.grad.isfinite().all()) for p in parts.model.parameters() if p.grad is not None)
            good = good + 1 if finite else 0
            scale = scale if finite else scale / 2
            scale, good = (scale * 2, 0) if good == job.growth_interval else (scale, good)
            if finite and count:
                parts.optimizer.step()
                averaged += 1
                if parts.scheduler is not None:
                    parts.scheduler.step()
        if parts.plateau is not None:
            parts.plateau.step(sum(each[epoch] for each in job.metrics) / len(job.metrics))
    return parts.outcome(
        losses=losses,
        epoch_loss=epoch_sum / epoch_count if epoch_count else float("nan"),
        norms=norms,
        scales=scales,
        averaged=averaged,
    )


def _needed() -> float:
    """Bytes of parameters, gradients and state of AdamW after a step under autocast, counted."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ESTIMATED))
    optimizer = AdamW(model.parameters())
    tokens = torch.ones(1, 8, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
    return float(sum(tensor.numel() * tensor.element_size() for tensor in held if tensor.dim()))


def _backward(model: nn.Module, batches: list[Batch]) -> tuple[float, float]:
    """Loss and weight of a window, whose gradients the parameters then have."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    weight: Tensor | int = 0
    for batch in batches:
        total = total + summed_loss(model(batch["inputs"].double()), batch["labels"])
        weight = weight + counted(batch["labels"])
    (total / max(float(weight), 1.0)).backward()  # type: ignore[no-untyped-call]
    return total.item(), float(weight)
