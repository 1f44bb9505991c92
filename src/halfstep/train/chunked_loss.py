"""Cross-entropy over a large vocabulary that never holds all of its logits.

The tokens go through the language-model head some hundred at a time; of each chunk only its part of the sum and of the
gradients is kept. In FP32 and BF16 the gradients are made in the forward, while the chunk's logits are there, and backward
only multiplies them by the gradient at the root: as many matmuls as the plain loss. In FP16 the loss scale has to be in
the logits' gradient before it is rounded, and is known in backward alone: there the logits are computed a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from halfstep.errors import ModelError
from halfstep.train.loss import IGNORED

CHUNK_BYTES = {"cpu": 64 * 2**20}
"""FP32 logits of a chunk by the kind of device: on a CPU few enough for them to be used while they are near."""
OTHER_CHUNK_BYTES = 256 * 2**20
"""Elsewhere a chunk is to be enough work for the whole device."""
CHUNK_UNIT = 64
"""Chunks are whole multiples of this many tokens, which matmul kernels like."""

Place = slice | Tensor
"""Which tokens a chunk is made of: neighbours, or the indices of those that count."""


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens in a chunk, so that its FP32 logits have a fitting size on `device`."""
    fitting = CHUNK_BYTES.get(device.type, OTHER_CHUNK_BYTES) // (4 * vocabulary)
    return max(CHUNK_UNIT, fitting // CHUNK_UNIT * CHUNK_UNIT)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    tokens_at_once: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The summed cross-entropy of `hidden @ weight.T + bias`, in nats and at least FP32, and its gradients.

    Equal to `F.cross_entropy` of all the logits to rounding. Under autocast the matmuls are in its number format and all
    else in FP32, as in the plain loss; the gradient of the weight is added up in FP32.

    Args:
        hidden: what the head gets, of shape (tokens, width).
        weight: the head's, of shape (vocabulary, width); may be frozen or shared with the embedding.
        bias: the head's, of shape (vocabulary,), or `None`.
        targets: of shape (tokens,); -100 where a token does not count.
        tokens_at_once: tokens in a chunk; `None` for `chunk_tokens` of the vocabulary.
        label_smoothing: the share of the target that is spread evenly over the vocabulary.

    Returns:
        A scalar tensor.
    """
    how = _How(
        dtype=_compute_dtype(hidden),
        tokens_at_once=tokens_at_once or chunk_tokens(len(weight), hidden.device),
        smoothing=label_smoothing,
        learning=torch.is_grad_enabled(),
    )
    total: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, targets, how)  # type: ignore[no-untyped-call]
    return total


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device_type = hidden.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """How the chunks are computed.

    Attributes:
        dtype: of the matmuls.
        tokens_at_once: tokens in a chunk.
        smoothing: the share of the target that is spread over the vocabulary.
        learning: whether gradients may be asked for.
    """

    dtype: torch.dtype
    tokens_at_once: int
    smoothing: float
    learning: bool

    @property
    def exact_dtype(self) -> torch.dtype:
        """Of everything but the matmuls."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def gradients_in_forward(self) -> bool:
        """Whether gradients can be rounded before the gradient at the root is known."""
        return self.learning and self.dtype is not torch.float16


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum over all chunks, with what its backward needs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, how: _How) -> Tensor:
        ctx.how = how
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.gradients = None
        if how.gradients_in_forward:
            ctx.gradients = _Gradients((hidden, weight, bias), ctx.needs_input_grad, how)
        return _sweep(hidden, weight, bias, targets, how, ctx.gradients, root=None)

    @staticmethod
    def backward(ctx: Any, root: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "The chunked loss has no gradient of its gradient (`create_graph=True`). Use `model.loss_chunk = 0`."
            )
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is not None:
            return (*gradients.times(root), None, None)
        # FP16, or a second backward through a retained graph, whose gradients the first one has given away.
        hidden, weight, bias, targets = ctx.saved_tensors
        gradients = _Gradients((hidden, weight, bias), ctx.needs_input_grad, ctx.how)
        _sweep(hidden, weight, bias, targets, ctx.how, gradients, root=root)
        return (*gradients.times(None), None, None)


class _Gradients:
    """Gradients of hidden states, weight and bias, added up chunk by chunk; `None` where none is asked for."""

    def __init__(self, inputs: Sequence[Tensor | None], needed: Sequence[bool], how: _How) -> None:
        hidden, weight, bias = inputs
        assert hidden is not None
        self._dtypes = [None if tensor is None else tensor.dtype for tensor in inputs]
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = _sum_for(weight, how) if needed[1] else None
        self.bias = _sum_for(bias, how) if needed[2] else None

    @property
    def wanted(self) -> bool:
        """Whether any is asked for."""
        return any(gradient is not None for gradient in (self.hidden, self.weight, self.bias))

    def add(self, place: Place, of_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Add what the chunk at `place` contributes; its gradient of the logits is given away."""
        if self.bias is not None:
            self.bias += of_logits.sum(0)
        of_logits = of_logits.to(hidden.dtype)
        if self.hidden is not None:
            self.hidden[place] = (of_logits @ weight).to(self.hidden.dtype)
        if self.weight is None:
            return
        if self.weight.dtype is hidden.dtype:
            self.weight.addmm_(of_logits.T, hidden)
        else:
            self.weight += of_logits.T @ hidden

    def times(self, root: Tensor | None) -> list[Tensor | None]:
        """The sums in the number formats of what they belong to, multiplied by the gradient at the root."""
        sums = (self.hidden, self.weight, self.bias)
        scaled = [each if each is None or root is None else each.mul_(root) for each in sums]
        return [None if each is None else each.to(dtype) for each, dtype in zip(scaled, self._dtypes, strict=True)]


def _sum_for(tensor: Tensor | None, how: _How) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, how.exact_dtype))


def _sweep(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    how: _How,
    gradients: _Gradients | None,
    *,
    root: Tensor | None,
) -> Tensor:
    """The sum over all chunks; their gradients, times `root` where that is known, go to `gradients`."""
    total = torch.zeros((), dtype=how.exact_dtype, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        cast_weight = weight.to(how.dtype)
        cast_bias = None if bias is None else bias.to(how.dtype)
        for place in _places(targets, how.tokens_at_once):
            piece = hidden[place].to(how.dtype)
            log_shares = F.log_softmax(F.linear(piece, cast_weight, cast_bias), dim=1, dtype=how.exact_dtype)
            total += _loss(log_shares, targets[place], how.smoothing)
            if gradients is not None and gradients.wanted:
                of_logits = _gradient(log_shares, targets[place], how.smoothing)
                gradients.add(place, of_logits if root is None else of_logits.mul_(root), piece, cast_weight)
    return total


def _places(targets: Tensor, tokens_at_once: int) -> Sequence[Place]:
    """The chunks. On a CPU tokens that do not count are passed over; elsewhere finding them would wait for the device."""
    if targets.device.type == "cpu":
        counted = (targets != IGNORED).nonzero().flatten()
        if len(counted) < len(targets):
            return torch.split(counted, tokens_at_once)
    return [slice(start, start + tokens_at_once) for start in range(0, len(targets), tokens_at_once)]


def _loss(log_shares: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    hard = F.nll_loss(log_shares, targets, ignore_index=IGNORED, reduction="sum")
    if smoothing == 0.0:
        return hard
    spread = -log_shares.mean(1).masked_fill(targets == IGNORED, 0.0).sum()
    return (1 - smoothing) * hard + smoothing * spread


def _gradient(log_shares: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """The gradient of `_loss` by the logits: softmax less the (smoothed) target. It takes the place of `log_shares`."""
    gradient = log_shares.exp_()
    if smoothing != 0.0:
        gradient.sub_(smoothing / gradient.shape[1])
    share = torch.full((len(targets), 1), smoothing - 1.0, dtype=gradient.dtype, device=gradient.device)
    if targets.device.type == "cpu":  # there every token of a chunk counts
        return gradient.scatter_add_(1, targets[:, None], share)
    ignored = (targets == IGNORED)[:, None]
    gradient.scatter_add_(1, targets[:, None].masked_fill(ignored, 0), share)
    return gradient.masked_fill_(ignored, 0.0)
