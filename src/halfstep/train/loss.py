"""The loss of a causal language model, as a sum and the number of tokens that it was summed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
            model: a causal language model of transformers, or one whose output has `logits` too.
            batch: `labels` of shape (sequences, length), the label at a place being the token there, or -100; all else is the
                model's, as `input_ids`.

        Returns:
            A scalar tensor with the sum and one with the count.
        """
        logits = model(**arguments(batch), use_cache=False).logits
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


def next_tokens(labels: Tensor) -> Tensor:
    """At each place the label of the place after it; the last place has none.

    The labels are moved and not the logits, of which a shifted view would be copied.
    """
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets
