"""What each task minimises, and what is looked at on held-out data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.config.options import Metric, Task
from halfstep.config.run import Run
from halfstep.engine.loss import LossFunction
from halfstep.train.evaluate import Look
from halfstep.train.head import causal_loss
from halfstep.train.loss import IGNORED, arguments, logits_of
from halfstep.train.own import own_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelLoss:
    """The loss of a model whose outputs stand where the labels do: a class for each sample, or a token for each place.

    Attributes:
        label_smoothing: the share of the target that is spread evenly over the classes.
    """

    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy in nats, and how many labels counted.

        Args:
            model: takes a batch without its labels, and returns logits, or has them as `logits` of what it returns.
            batch: `labels` of any shape, -100 where there is none; all else is the model's.
        """
        return self._sums(logits_of(model(**arguments(batch))), batch["labels"])

    def look(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and how many of the labels are what the model holds most likely."""
        logits, labels = logits_of(model(**arguments(batch))), batch["labels"]
        right = (logits.argmax(-1) == labels) & (labels != IGNORED)
        return *self._sums(logits, labels), right.sum()

    def _sums(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        total = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            labels.reshape(-1),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return total, (labels != IGNORED).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLook:
    """The user's own loss on held-out data; a mean counts as one, as it does in an update."""

    loss: LossFunction

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """The summed loss and its weight."""
        found = self.loss(model, batch)
        total, weight = found if isinstance(found, tuple) else (found, 1.0)
        return total.reshape(()), torch.as_tensor(weight, dtype=torch.float64, device=total.device).reshape(())


def loss_of(run: Run) -> LossFunction:
    """What the run minimises."""
    if run.model.loss is not None:
        return own_loss(run.model.loss)
    if run.model.task is Task.CAUSAL_LM:
        return causal_loss(run.model.loss_chunk, run.model.label_smoothing)
    return LabelLoss(label_smoothing=run.model.label_smoothing)


def look_of(run: Run) -> Look:
    """What is looked at on the run's held-out data."""
    if run.model.loss is not None:
        return OwnLook(loss=own_loss(run.model.loss))
    if run.model.task is Task.CAUSAL_LM:
        return causal_loss(run.model.loss_chunk)
    return LabelLoss().look


def metric_of(run: Run) -> Metric:
    """What says which of the run's models is the best."""
    return run.model.task.metric if run.model.loss is None else Metric.LOSS


def unit_of(run: Run) -> str:
    """What the run counts: what its loss says of itself where that is the user's own."""
    return run.model.task.unit if run.model.loss is None else Task.OWN.unit
