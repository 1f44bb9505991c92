"""The loss of a causal language model on its hidden states instead of its logits, and when that is chosen.

The model itself is called, through DDP where it is wrapped: for the length of the call a public hook of torch takes the
hidden states on their way into the head and sends none of them on, so that no logits are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.config.choice import ASKED_FOR, Choice
from halfstep.distributed.ddp import unwrap
from halfstep.errors import ModelError
from halfstep.precision.untouched import untouched
from halfstep.train.chunked_loss import chunk_tokens, linear_cross_entropy
from halfstep.train.loss import IGNORED, WholeLogits, arguments, next_tokens

LARGE_LOGITS_BYTES = 128 * 2**20
"""FP32 logits of a micro-batch from which on it pays to leave them out: twice the chunk of a CPU."""
PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLogits:
    """The same loss without ever holding all logits, for models that pass `obstacle`.

    Attributes:
        tokens_at_once: tokens whose logits are there at a time.
        label_smoothing: the share of the target that is spread evenly over the vocabulary.
    """

    tokens_at_once: int
    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy of every next token, in nats, and how many tokens counted."""
        head = _head(unwrap(model))
        with _stopped_before(head) as stopped:
            model(**arguments(batch), use_cache=False)
        targets = next_tokens(batch["labels"])
        total = linear_cross_entropy(
            stopped.hidden.flatten(0, 1),
            head.weight,
            head.bias,
            targets.flatten(),
            tokens_at_once=self.tokens_at_once,
            label_smoothing=self.label_smoothing,
        )
        return total, (targets != IGNORED).sum()


CausalLoss = WholeLogits | ChunkedLogits


def causal_loss(tokens_at_once: int, label_smoothing: float = 0.0) -> CausalLoss:
    """The loss that computes the logits of so many tokens at a time; 0 for all of them."""
    if tokens_at_once == 0:
        return WholeLogits(label_smoothing=label_smoothing)
    return ChunkedLogits(tokens_at_once=tokens_at_once, label_smoothing=label_smoothing)


def choose_chunk(model: nn.Module, *, micro_tokens: int, asked: int | None = None) -> Choice[int]:
    """How many tokens' logits are computed at a time; 0 for all of them.

    Args:
        model: a causal language model on its device.
        micro_tokens: tokens in a micro-batch.
        asked: what the user wants; `None` for a choice.

    Raises:
        ModelError: chunks were asked for, and the model cannot do without its logits.
    """
    if asked == 0:
        return Choice(value=0, reason=ASKED_FOR)
    return _worthwhile_chunk(model, micro_tokens) if asked is None else _asked_chunk(model, asked)


def _asked_chunk(model: nn.Module, asked: int) -> Choice[int]:
    cause = obstacle(model)
    if cause is not None:
        raise ModelError(f"`model.loss_chunk = {asked}` cannot be: {cause}. Use 0, or leave it out.")
    return Choice(value=asked, reason=ASKED_FOR)


def _worthwhile_chunk(model: nn.Module, micro_tokens: int) -> Choice[int]:
    """Nothing is tried where there is too little to save."""
    cause = _visible_obstacle(model)
    if cause is not None:
        return Choice(value=0, reason=f"whole logits, because {cause}")
    weight = _head(unwrap(model)).weight
    logits_bytes = 4 * micro_tokens * len(weight)
    size = f"the FP32 logits of {micro_tokens:,} tokens over a vocabulary of {len(weight):,} are {logits_bytes / 1e6:,.0f} MB"
    if logits_bytes < LARGE_LOGITS_BYTES:
        return Choice(value=0, reason=f"{size}: too little to save")
    cause = _tried(model)
    if cause is not None:
        return Choice(value=0, reason=f"whole logits, because {cause}")
    chunk = chunk_tokens(len(weight), weight.device)
    return Choice(value=chunk, reason=f"{size}, of a chunk {4 * chunk * len(weight) / 1e6:,.0f} MB")


def obstacle(model: nn.Module) -> str | None:
    """Why the logits of `model` cannot be computed in chunks outside of it, or `None` where they can.

    That the logits are what the head makes of its input and nothing more is not believed but tried, on a few tokens,
    without a trace in the model or the random states.
    """
    return _visible_obstacle(model) or _tried(model)


def _visible_obstacle(model: nn.Module) -> str | None:
    if hasattr(model, "_orig_mod"):
        return "a compiled model does not stop before its head"
    module = unwrap(model)
    find = getattr(module, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None:
        return f"{type(module).__name__} names no language-model head (`get_output_embeddings`)"
    if type(head) is not nn.Linear:
        return f"its head is a {type(head).__name__} of {type(head).__module__} and not torch's own"
    if head._forward_hooks or head._forward_pre_hooks:
        return "its head has hooks"
    return None


def _tried(model: nn.Module) -> str | None:
    module = unwrap(model)
    head = _head(module)
    device = head.weight.device
    tokens = torch.arange(PROBE_TOKENS, device=device)[None] % len(head.weight)
    with untouched(module, device), torch.no_grad():
        module.eval()
        seen: list[Tensor] = []
        handle = head.register_forward_hook(lambda _, inputs, output: seen.append(output))
        try:
            logits = module(input_ids=tokens, use_cache=False).logits
        finally:
            handle.remove()
        if len(seen) != 1:
            return f"its head is used {len(seen)} times in a forward"
        if not torch.equal(logits.float(), seen[0].float()):
            return "its logits are not what its head returns: something is done to them afterwards"
        with _stopped_before(head):
            module(input_ids=tokens, use_cache=False)
    return None


@dataclass(slots=True)
class _Stopped:
    """What a head was to get."""

    seen: list[Tensor]

    @property
    def hidden(self) -> Tensor:
        """The hidden states, of shape (sequences, length, width)."""
        assert len(self.seen) == 1
        return self.seen[0]


@contextmanager
def _stopped_before(head: nn.Linear) -> Iterator[_Stopped]:
    """Within it, the head gets no tokens, and what it should have got is kept."""
    stopped = _Stopped([])

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        stopped.seen.append(inputs[0])
        return (inputs[0][:, :0],)

    handle = head.register_forward_pre_hook(keep)
    try:
        yield stopped
    finally:
        handle.remove()


def _head(module: nn.Module) -> nn.Linear:
    head = module.get_output_embeddings()  # type: ignore[operator]  # transformers' name; nn.Module's attributes are tensors
    assert isinstance(head, nn.Linear)
    return head
