"""The loss of a causal language model, as a sum and the number of tokens that it was summed over."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""The label of a token that is not to be predicted."""


def causal_lm_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of every next token, in nats, and how many tokens counted.

    Args:
        model: a causal language model of transformers, or one whose output has `logits` too.
        batch: `input_ids` and `labels` of shape (sequences, length); the label at a place is the token there, or -100.

    Returns:
        A scalar tensor with the sum and one with the count.
    """
    arguments = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**arguments, use_cache=False).logits
    targets = next_tokens(batch["labels"])
    total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def next_tokens(labels: Tensor) -> Tensor:
    """At each place the label of the place after it; the last place has none.

    The labels are moved and not the logits, of which a shifted view would be copied.
    """
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]
    return targets
