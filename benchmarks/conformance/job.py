"""A job that every stack can express, and what came out of it."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

FEATURES, CLASSES = 4, 3
POISON, ID = FEATURES, FEATURES + 1
IGNORED = -100
MANY = 16
"""Samples of a micro-batch with which a search for those that fit begins."""
ESTIMATED = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "n_positions": 64,
    "vocab_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""What is estimated, as Hugging Face describes it."""
OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate more bytes than there are"
DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
Batch = dict[str, Tensor]


class NotOffered(Exception):
    """The stack has nothing for this; the sentence says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One micro-batch.

    Attributes:
        tokens: how many it has.
        masked: whether all its labels are masked.
        poison: "" for none; "gradient": its backward overflows; "data": it holds a NaN.
    """

    tokens: int = 4
    masked: bool = False
    poison: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained: a small classifier on a list of micro-batches, with SGD at a rate of 0.5 unless it says otherwise.

    Attributes:
        items: the micro-batches; of several ranks number r takes items r, r + ranks, ...
        shuffle: in another order each epoch.
        iterable: the data set has no length, and yields each rank's own part, as every documentation asks.
        accumulate: micro-batches of a window on each rank.
        clip_norm: largest norm, or None.
        clip_value: largest value, or None.
        optimizer: "sgd", "adamw" or "adamw fused".
        learning_rate: of SGD; 0 where only what is reported matters.
        schedule: "" for none; "count": the rate falls with each step; "warm-up": it grows over four updates.
        init_scale: loss scale at the beginning, in FP16.
        growth_interval: applied updates after which it doubles.
        ema: whether weights are averaged.
        dropout: share of features left out.
        stop_after: updates after which the run is saved, and continued by objects made anew.
        ranks: processes.
        metrics: of each rank, what its evaluation after each epoch gives; the rate falls where their mean does not.
        memory: tokens that fit into memory, two thirds of them once the optimizer has its state; 0 where all do. What is searched
            is the number of samples in a micro-batch.
        peeks: a forward without gradients comes before each one with them, under the same autocast.
        estimates: nothing is trained; asked is how many bytes AdamW would need for the parameters of `ESTIMATED`, their gradients
            and its state under autocast.
        plain_fp16: FP16 is asked for and nothing is done to make up for a CPU; see `stacks.accelerator`.
    """

    items: tuple[Item, ...]
    epochs: int = 1
    shuffle: bool = False
    iterable: bool = False
    accumulate: int = 1
    precision: str = "fp32"
    clip_norm: float | None = None
    clip_value: float | None = None
    optimizer: str = "sgd"
    learning_rate: float = 0.5
    schedule: str = ""
    init_scale: float = 2.0**10
    growth_interval: int = 2000
    ema: bool = False
    dropout: float = 0.0
    stop_after: int | None = None
    ranks: int = 1
    metrics: tuple[tuple[float, ...], ...] = ()
    memory: int = 0
    peeks: bool = False
    estimates: bool = False
    plain_fp16: bool = False

    @property
    def updates_per_epoch(self) -> int:
        """Windows of an epoch, on the rank with the most micro-batches."""
        return math.ceil(math.ceil(len(self.items) / self.ranks) / self.accumulate)

    @property
    def uneven(self) -> bool:
        """Whether ranks have different numbers of micro-batches."""
        return len(self.items) % self.ranks > 0

    @property
    def ragged(self) -> bool:
        """Whether micro-batches differ in what counts, so that a mean of means would be wrong."""
        return len({item.tokens for item in self.items}) > 1 or any(item.masked for item in self.items)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a stack made of a job; None where it tells nothing.

    Attributes:
        losses: the loss that the stack reports for each update.
        epoch_loss: the loss that it reports for the last epoch.
        norms: the gradient norm that it reports for each update.
        scales: the loss scale that each update ran under.
        rates: learning rate of each update that stepped.
        ids: micro-batches in the order in which this rank saw them.
        dtype: what the forward computed in.
        averaged: number of updates in the average.
        estimate: bytes that a training would need.
        gradient_reductions: how often all gradients were reduced over the ranks, where that is counted.
        stopped: the sentence with which the run was ended.
    """

    parameters: list[float] = field(default_factory=list)
    parameter_dtype: str = ""
    losses: list[float] | None = None
    epoch_loss: float | None = None
    norms: list[float] | None = None
    scales: list[float] | None = None
    rates: list[float] | None = None
    scheduler_steps: int | None = None
    optimizer_steps: int | None = None
    moments: list[float] | None = None
    ids: list[int] = field(default_factory=list)
    dtype: str = ""
    averaged: int | None = None
    gradient_reductions: int | None = None
    estimate: float | None = None
    stopped: str = ""

    def after(self, earlier: Outcome) -> Outcome:
        """What two runs told, of which the second went on where the first was saved."""
        return replace(
            self,
            losses=_joined(earlier.losses, self.losses),
            scales=_joined(earlier.scales, self.scales),
            rates=_joined(earlier.rates, self.rates),
            ids=[*earlier.ids, *self.ids],
        )


def _joined(earlier: list[float] | None, later: list[float] | None) -> list[float] | None:
    return None if earlier is None or later is None else [*earlier, *later]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Where a run is saved after `Job.stop_after` updates.

    Attributes:
        folder: of the checkpoint; the same for all ranks.
        resuming: whether this is the run that goes on from it.
    """

    folder: Path
    resuming: bool


Train = Callable[[Job, "Saved | None"], Outcome]


def in_parts(job: Job, train: Train) -> Outcome:
    """Train a job, where it asks for it in two runs of which the second goes on from what the first saved."""
    if job.stop_after is None:
        return train(job, None)
    with tempfile.TemporaryDirectory() as folder:
        first_run = train(job, Saved(folder=Path(folder), resuming=False))
        return train(job, Saved(folder=Path(folder), resuming=True)).after(first_run)


def epochs_saved(job: Job) -> int:
    """Whole epochs before the run is saved, for stacks that save between epochs.

    Raises:
        NotOffered: it is to be saved in the midst of one.
    """
    epochs, rest = divmod(job.stop_after or 0, job.updates_per_epoch)
    if rest:
        raise NotOffered("its documentation saves between epochs")
    return epochs


class _Overflow(torch.autograd.Function):
    """The identity, whose gradient is infinite where it is told so."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, poison: Tensor) -> Tensor:
        ctx.factor = float("inf") if bool(poison) else 1.0
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class Classifier(nn.Module):
    """A linear classifier of tokens that remembers what it was shown; beside the features each token holds poison and number."""

    def __init__(self, dropout: float = 0.0, *, peeks: bool = False, memory: int = 0) -> None:
        super().__init__()
        self.peeks, self.memory = peeks, memory
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.dropout = nn.Dropout(dropout)
        self.ids: list[int] = []
        self.dtype = ""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.memory and len(inputs) > self.memory:
            raise RuntimeError(OUT_OF_MEMORY)
        self.ids += [int(number) for number in inputs[:, ID].unique_consecutive()]
        if self.peeks:
            with torch.no_grad():
                self.linear(inputs[:, :FEATURES])
        logits = self.linear(self.dropout(inputs[:, :FEATURES]))
        self.dtype = str(logits.dtype).removeprefix("torch.")
        overflowed: Tensor = _Overflow.apply(logits, inputs[0, POISON])
        return overflowed if overflowed.dtype == torch.float64 else overflowed.float()


class Items(Dataset[Batch]):
    """The micro-batches of a job, one an item."""

    def __init__(self, job: Job) -> None:
        generator = torch.Generator().manual_seed(5)
        self._batches = [_batch(item, number, generator) for number, item in enumerate(job.items)]

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index]


class Stream(IterableDataset[Batch]):
    """The same without a length: the part of one rank."""

    def __init__(self, job: Job, rank: int, ranks: int) -> None:
        super().__init__()
        self._items, self._rank, self._ranks = Items(job), rank, ranks

    def __iter__(self) -> Iterator[Batch]:
        return (self._items[index] for index in range(self._rank, len(self._items), self._ranks))


def _batch(item: Item, number: int, generator: torch.Generator) -> Batch:
    features = torch.randn(item.tokens, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (item.tokens,), generator=generator)
    if item.poison == "data":
        features[0, 0] = float("nan")
    told = torch.tensor([float(item.poison == "gradient"), float(number)]).expand(item.tokens, 2)
    inputs = torch.cat([features, told], dim=1)
    return {"inputs": inputs, "labels": torch.full_like(labels, IGNORED) if item.masked else labels}


def joined(items: list[Batch]) -> Batch:
    """The tokens of some items, which are mostly one, as a micro-batch."""
    return {name: torch.cat([item[name] for item in items]) for name in items[0]}


def loader_of(job: Job, *, rank: int = 0, ranks: int = 1, samples: int | None = None, **given: Any) -> DataLoader[Batch]:
    """A loader as a user of plain PyTorch makes it."""
    samples = samples or (MANY if job.memory else 1)
    if job.iterable:
        return DataLoader(Stream(job, rank, ranks), batch_size=samples, collate_fn=joined)
    return DataLoader(Items(job), batch_size=samples, collate_fn=joined, **{"shuffle": job.shuffle, **given})


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over the tokens that count, as `nn.CrossEntropyLoss` has it."""
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED)


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over the tokens that count."""
    return functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def counted(labels: Tensor) -> Tensor:
    """How many tokens count."""
    return (labels != IGNORED).sum()


def rate(schedule: str, step: int) -> float:
    """The factor of the learning rate after so many steps of the scheduler."""
    return min(1.0, (step + 1) / 4) if schedule == "warm-up" else 1.0 / (1 + step)


def needs_a_finder(job: Job) -> None:
    """For stacks that neither look for a micro-batch that fits nor estimate memory.

    Raises:
        NotOffered: the job asks for it.
    """
    if job.memory:
        raise NotOffered("it looks for no micro-batch that fits")
    estimates_nothing(job)


def estimates_nothing(job: Job) -> None:
    """For stacks that estimate no memory.

    Raises:
        NotOffered: the job asks for it.
    """
    if job.estimates:
        raise NotOffered("it estimates no memory")


@dataclass(slots=True)
class Parts:
    """Model, optimizer and scheduler of a job, and what is seen of them from outside."""

    model: Classifier
    optimizer: Optimizer
    scheduler: LambdaLR | None
    plateau: ReduceLROnPlateau | None = None
    rates: list[float] = field(default_factory=list)

    def outcome(self, **told: Any) -> Outcome:
        """What can be seen whatever the stack is, and what it told."""
        states = [{k: v for k, v in state.items() if isinstance(v, Tensor)} for state in self.optimizer.state.values()]
        steps = [int(state["step"]) for state in states if "step" in state]
        moments = [value for state in states if "exp_avg" in state for value in state["exp_avg"].flatten().tolist()]
        return Outcome(
            parameters=[value for p in self.model.parameters() for value in p.detach().double().flatten().tolist()],
            parameter_dtype=str(next(self.model.parameters()).dtype).removeprefix("torch."),
            rates=self.rates,
            scheduler_steps=None if self.scheduler is None else self.scheduler.last_epoch,
            optimizer_steps=steps[0] if steps else None,
            moments=moments or None,
            ids=self.model.ids,
            dtype=self.model.dtype,
            **told,
        )


def parts_of(job: Job) -> Parts:
    """Fresh parts under a fixed seed, which a script sets again when it is started again."""
    torch.manual_seed(0)
    model = Classifier(job.dropout, peeks=job.peeks, memory=job.memory)
    kinds = {"sgd": (SGD, {"lr": job.learning_rate}), "adamw": (AdamW, {"lr": 0.05, "foreach": False})}
    kind, given = kinds.get(job.optimizer, (AdamW, {"lr": 0.05, "fused": True}))
    optimizer: Optimizer = kind(model.parameters(), **given)
    scheduler = LambdaLR(optimizer, lambda step: rate(job.schedule, step)) if job.schedule else None
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0) if job.metrics else None
    parts = Parts(model, optimizer, scheduler, plateau)
    if job.memory:
        optimizer.register_step_post_hook(lambda *_: setattr(model, "memory", job.memory * 2 // 3))
    optimizer.register_step_pre_hook(lambda *_: parts.rates.append(optimizer.param_groups[0]["lr"]))
    torch.manual_seed(0)
    return parts


def started_from(job: Job) -> list[float]:
    """The parameters before the first update."""
    return copy.deepcopy(parts_of(job)).outcome().parameters
