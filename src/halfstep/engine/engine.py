"""The engine: performs updates, exactly weighted, in any precision, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.config.choice import Choice
from halfstep.config.options import Precision, Sharding, Tail, option
from halfstep.distributed import connect
from halfstep.distributed.ddp import unwrap
from halfstep.engine.arithmetic import Arithmetic
from halfstep.engine.assembly import assemble, place
from halfstep.engine.checks import check_finite, check_micro_batches, check_optimizers, check_settings
from halfstep.engine.ledger import Ledger
from halfstep.engine.loss import LossFunction
from halfstep.engine.position import Position
from halfstep.engine.randomness import randomness, set_randomness
from halfstep.engine.reading import Reader, read_ahead, require_any
from halfstep.engine.recomputing import checkpoint_blocks
from halfstep.engine.settlement import Averaged, Counters, Scheduler, listed, on_plateau
from halfstep.engine.state import restore, state_of
from halfstep.engine.stopping import all_masked
from halfstep.engine.update import Update
from halfstep.engine.window import Window
from halfstep.precision.scaler import ScalerSettings


class Engine:
    """Turns micro-batches into updates.

    The gradient of an update is the sum of all its micro-batches' loss gradients, over all ranks, divided by the sum of their
    weights; however they are split, the update is the same to rounding. Under `torchrun` the model is wrapped in DDP, or sharded.

    Args:
        model: moved to its device already, with FP32 parameters.
        optimizer: one or several over the model's parameters; fused ones cost least.
        loss: `loss(model, batch)` returns the mean over the micro-batch, or the sum over it and its weight (tokens, samples).
            May be left out where only `window` is used.
        scheduler: one or several, stepped once an applied update. `ReduceLROnPlateau` is stepped by `plateau`.
        precision: "auto", "fp32", "fp16", "bf16" or "bf16-pure".
        accumulate: micro-batches in an update, on each rank.
        clip_norm: largest norm of the gradient. clip_value: largest magnitude of its elements.
        ema: averaged weights with `update_parameters(model)`, as `torch.optim.swa_utils.AveragedModel` has.
        tail: what becomes of an epoch's last, shorter window: "step", "carry" (into the next epoch) or "drop".
        sharding: what each of several ranks holds: "ddp" everything, "zero2" its shard of gradients and optimizer states,
            "zero3" of parameters too, or "auto"; one process has nothing to divide. The model is sharded in place and the
            optimizer is given its new parameters.
        checkpoint_activations: compute the activations of repeated blocks again in backward instead of keeping them.
        find_unused_parameters: whether parameters can take part in some micro-batches and not in others; gradients are then
            reduced after the last backward instead of during it. In a sharded model, what no rank used gets a gradient of zeros.
        halve_on_out_of_memory: compute micro-batches in halves, from then on, when memory runs out.
        scaler: how the FP16 loss scale moves.
        max_skips: updates skipped in a row, for reasons that no loss scale cures, that stop the run.
        evidence: folder in which the batch is saved that stopped a run.

    Raises:
        UsageError: the parts do not fit together; the message says which and what would be right.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        loss: LossFunction | None = None,
        scheduler: Scheduler | Sequence[Scheduler] | None = None,
        precision: Precision | str = "auto",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        ema: Averaged | None = None,
        tail: Tail | str = Tail.STEP,
        sharding: Sharding | str = "auto",
        checkpoint_activations: bool = False,
        find_unused_parameters: bool = False,
        halve_on_out_of_memory: bool = True,
        scaler: ScalerSettings | None = None,
        max_skips: int = 25,
        evidence: str | Path = "halfstep-evidence",
    ) -> None:
        check_settings(accumulate=accumulate, clip_norm=clip_norm, clip_value=clip_value, max_skips=max_skips)
        optimizers = self.optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        self.schedulers, self.ema = listed(scheduler), ema
        self.module = unwrap(model)
        """The user's model, without wrappers."""
        check_optimizers(self.module, optimizers)
        check_finite(self.module)
        self.device = next(p.device for p in self.module.parameters() if p.requires_grad)
        """Where the model is; micro-batches are moved there."""
        self.group = connect(self.device)
        """All ranks."""
        self._made: dict[str, Choice[Any]] = {}
        if checkpoint_activations:
            self._made["checkpoint_activations"] = checkpoint_blocks(self.module)
        arithmetic = Arithmetic(precision, self.module, optimizers, self.device, self.group, scaler or ScalerSettings())
        layout = place(
            model, optimizers, arithmetic, self.group, asked=sharding, loss=loss, ema=ema, find_unused=find_unused_parameters
        )
        self._made |= layout.choices
        self.model = layout.model
        """The model to call: the user's, or its DDP wrapper."""
        self._performer = assemble(
            layout,
            optimizers,
            arithmetic,
            self.group,
            loss=loss,
            schedulers=self.schedulers,
            ema=ema,
            clip_norm=clip_norm,
            clip_value=clip_value,
            halve=halve_on_out_of_memory,
            max_skips=max_skips,
            evidence=Path(evidence),
        )
        self._reader = Reader(accumulate, option(Tail, tail, name="tail"), self.group)
        self._randomness: dict[str, Any] | None = None

    def updates(self, loader: Iterable[Any], *, epochs: int | None = 1, max_updates: int | None = None) -> Iterator[Update]:
        """Train on a loader; each update is yielded when it has been made.

        Args:
            loader: yields micro-batches. Its sampler, batch sampler or data set is told the epoch where it listens
                (`set_epoch`). On several ranks a `DataLoader` over a sized data set without a sampler of its own is shared out
                over the ranks; any other loader must yield this rank's part.
            epochs: passes over the loader; None for no end.
            max_updates: end when the engine has applied so many updates in its life, if that comes first. The next call
                begins the epoch anew: what is to be done between updates belongs into the loop.

        Raises:
            DataError: the loader yields nothing, or every label in it is masked.
            RunStopped: the run cannot go on, here or on another rank; the message says why.
        """
        with self.group.failures_told():
            yield from self._updates(loader, epochs, max_updates)

    def _updates(self, loader: Iterable[Any], epochs: int | None, max_updates: int | None) -> Iterator[Update]:
        self.settle()
        before = len(self.ledger)
        for feed, everyone in self._reader.windows(loader, epochs, self._restore_randomness):
            if self._performer.has_applied(max_updates):
                return
            yield self._performer.perform(feed, everyone=everyone)
            if self._performer.has_applied(max_updates):
                return
        self.settle()
        if self.ledger.only_masked(since=before):
            raise all_masked(len(self.ledger) - before)

    def update(self, micro_batches: Iterable[Any]) -> Update:
        """Make one update of these micro-batches; every rank calls it, with any number of them, some with none."""
        check_micro_batches(micro_batches)
        with self.group.failures_told():
            feed = read_ahead(micro_batches)
            first = next(feed, None)
            everyone = require_any(micro_batches, self.group, has_some=first is not None)
            return self._performer.perform(feed if first is None else chain([first], feed), everyone=everyone)

    @contextmanager
    def window(self) -> Iterator[Window]:
        """A window for those who call backward themselves: its update is made when the `with` block ends.

        Gradients are reduced over the ranks once, after the block. After an error in the block no update is made. Of a sharded
        model each backward reduces its gradients, and all ranks must run as many forwards and backwards.
        """
        with self._performer.open_window() as window:
            yield window

    def autocast(self) -> torch.autocast:
        """The precision's autocast, for evaluation; while "auto" is still open, every rank calls it."""
        self._performer.arithmetic.begin(None, None)
        return self._performer.arithmetic.policy.autocast()

    def plateau(self, metric: float, weight: float = 1.0) -> float:
        """Step `ReduceLROnPlateau` by a metric, averaged over the ranks by weight; every rank calls it.

        Returns:
            The average.
        """
        average = self.group.mean(metric * weight, weight)
        for scheduler in on_plateau(self.schedulers):
            scheduler.step(average)
        return average

    def settle(self) -> None:
        """Wait until it is known whether the last update was applied, and move scheduler, EMA and counters.

        Raises:
            RunStopped: its skip was one too many.
        """
        self._performer.settlement.settle()

    @property
    def ledger(self) -> Ledger:
        """What became of every update that has been settled."""
        return self._performer.settlement.ledger

    @property
    def counters(self) -> Counters:
        """Weight, micro-batches and samples used up."""
        return self._performer.settlement.counters

    @property
    def choices(self) -> dict[str, Choice[Any]]:
        """Every automatic choice with its reason."""
        return {**self._performer.choices, **self._made, **self._reader.choices}

    def state_dict(self) -> dict[str, Any]:
        """What the engine itself must remember, as JSON types; model, optimizers, schedulers and average have their own.

        Between two updates; every rank calls it, and keeps its own.
        """
        self._performer.settlement.look()
        place = asdict(self._reader.position())
        return {**state_of(self._performer), "position": place, "randomness": randomness(self.device)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, with the next call of `updates` in the midst of its data.

        Raises:
            DataError: the state is of another version.
            ConfigError: the engine was asked for another precision.
        """
        restore(self._performer, state)
        self._reader.go_to(Position.from_dict(state["position"]))
        self._randomness = state["randomness"]
        self._restore_randomness()

    def _restore_randomness(self) -> None:
        assert self._randomness is not None
        set_randomness(self._randomness, self.device)
