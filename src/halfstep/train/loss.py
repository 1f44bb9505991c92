"""The loss of a causal language model, as a sum and the number of tokens that it was summed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.distributed.ddp import unwrap
from halfstep.errors import ModelError

IGNORED = -100
"""The label of a token that is not to be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLogits:
    """The plain loss: all logits of a micro-batch at once.

    Attributes:
        label_smoothing: the share of the target that is spread evenly over the vocabulary.
    """

    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy of every next token, in nats, and how many tokens counted.

        Args:
            model: a causal language model of transformers, or one that returns its logits, alone or as `logits`.
            batch: `labels` of shape (sequences, length), the label at a place being the token there, or -100; all else is the
                model's, as `input_ids`.

        Returns:
            A scalar tensor with the sum and one with the count.
        """
        logits = logits_of(model(**arguments(batch), **without_cache(model)))
        targets = next_tokens(batch["labels"])
        total = F.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        return total, (targets != IGNORED).sum()


def arguments(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What of a batch the model gets: all but the labels."""
    return {key: value for key, value in batch.items() if key != "labels"}


def without_cache(model: nn.Module) -> dict[str, bool]:
    """What keeps a model of transformers from keeping keys and values, which only generating needs."""
    return {"use_cache": False} if hasattr(getattr(unwrap(model), "config", None), "use_cache") else {}


def logits_of(output: Any) -> Tensor:
    """The logits of what a model returned.

    Raises:
        ModelError: there are none.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"The model returned {type(output).__name__}; it must return its logits, alone or as `logits`, "
            "or `model.loss` must name a loss of your own."
        )
    return logits


def next_tokens(labels: Tensor) -> Tensor:
    """At each place the label of the place after it; the last place has none.

    The labels are moved and not the logits, of which a shifted view would be copied.
    """
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets
