"""Attention of short sequences in BF16 on a CPU: two matmuls and a softmax, with scale and mask inside the first matmul.

There torch's fused kernel takes twice as long, and the plain attention of transformers goes over the scores six times, most
of them in FP32. Here every pass is over scores of the matmuls' own number format; softmax adds up in FP32 all the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.config.options import Attention

NAME = "halfstep-matmul"
"""What transformers calls it."""
HIDDEN = torch.finfo(torch.bfloat16).min
"""Added to the scores that do not count: finite in BF16, so that a row in which none counts is no NaN."""
BEYOND = ("softcap", "position_bias", "s_aux")
"""What some models ask of their attention besides, and this one does not do."""


def name_of(attention: Attention | str) -> str:
    """What transformers calls an attention, which it knows from now on."""
    if attention != Attention.MATMUL:
        return str(attention)
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, matmul_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def matmul_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What each token takes from those that it sees, of shape (batch, length, heads, width).

    Args:
        module: the layer; `is_causal` and `num_key_value_groups` are its own.
        query: of shape (batch, heads, length, width).
        key: of shape (batch, heads of keys, tokens seen, width).
        value: as the keys.
        attention_mask: true where a token is seen, or a number to add to its score; `None` for all, or for all before.
        dropout: share of the weights that is left out.
        scaling: of the scores; `None` for the usual one.
        is_causal: whether no mask means that later tokens are not seen; `None` for what the layer says.
        more: what models pass to every attention.
    """
    if any(more.get(name) is not None for name in BEYOND):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        told = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **told, **more)
        return found
    batch, heads, length, width = query.shape
    groups = int(getattr(module, "num_key_value_groups", 1))
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    scores = torch.baddbmm(
        _added(attention_mask, query, key.shape[2], causal=causal),
        query.reshape(batch * heads, length, width),
        key.reshape(batch * heads, -1, width).transpose(1, 2),
        alpha=width**-0.5 if scaling is None else scaling,
    )
    weights = scores.softmax(-1)
    if dropout > 0.0:
        weights = F.dropout(weights, dropout)
    out = weights @ value.reshape(batch * heads, -1, value.shape[-1])
    return out.view(batch, heads, length, -1).transpose(1, 2).contiguous(), None


def _added(mask: Tensor | None, query: Tensor, seen: int, *, causal: bool) -> Tensor:
    """What is added to the scores, of one shape for all heads and rows or of (batch x heads, length, tokens seen)."""
    batch, heads, length, _ = query.shape
    if mask is None:
        if not causal or length == 1:
            return query.new_zeros(1, 1, 1)
        return query.new_full((1, length, seen), HIDDEN).triu_(1 + seen - length)
    if mask.dtype is torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill_(~mask, HIDDEN)
    return mask.clamp(min=HIDDEN).to(query.dtype).expand(batch, heads, length, seen).reshape(batch * heads, length, seen)
