"""What a forward leaves for its backward: an inventory of the tensors that autograd saves, a token and a block at a time.

The inventory was made by reading which operands torch 2.13's derivatives keep (`tools/autograd/derivatives.yaml`) for the blocks
of transformers 5.24, and agrees with storages counted on fake tensors: 46.5 bytes a token and hidden unit of a LLaMA block in
pure BF16, where this says 45.5. It is a sum of facts: nothing in it is fitted. Korthikanti et al. (2022, eq. 1-2) have the same
for one GPT block with dropout: 34 bytes, and 5 more for every head and key.
"""

from __future__ import annotations

from halfstep.config.options import Attention
from halfstep.plan.convnet import Convnet
from halfstep.plan.model_facts import Model, Norm, Transformer
from halfstep.plan.recipe import Adapter, Checkpointing, Loss, Recipe

FIRST_BLOCK_OF_A_PREFIX = 2
"""LLaMA-Adapter begins in the third block: nothing before it needs a gradient."""
PARTS = 8
"""Into how many parts a loss is divided."""
LORA_INDEX_COPY = 2
"""Bytes of each output that a merged query-key-value adapter keeps to put its outputs in place (`index_copy`)."""


def saved_bytes(model: Model, recipe: Recipe) -> float:
    """Bytes that the blocks save for the backward of one micro-batch."""
    if isinstance(model, Convnet):
        return recipe.micro_batch * model.kept * recipe.compute_bytes
    return recipe.cells * _per_token(model, recipe) * _blocks_with_gradients(model, recipe) / recipe.tensor_ranks


def one_block_bytes(model: Model, recipe: Recipe) -> float:
    """Bytes that a block holds while its backward runs, of what it has saved or computed again."""
    if isinstance(model, Convnet):
        return 3 * recipe.micro_batch * max(each.elements for each in model.convolutions) * recipe.compute_bytes
    return recipe.cells * sum(block_inventory(model, recipe).values()) / recipe.tensor_ranks


def block_inventory(model: Transformer, recipe: Recipe) -> dict[str, float]:
    """Bytes a token that a block without checkpointing saves, by part."""
    parts = {
        "normalisations": _norms(model, recipe),
        "attention": _attention(model, recipe),
        "mlp": _mlp(model, recipe) * model.active_experts,
        "dropout masks": float(model.traits.dropouts * model.hidden),
        "adapters": _adapters(model, recipe),
    }
    return parts if not recipe.weights.bitsandbytes else parts | {"inputs of 4-bit products": _four_bit_inputs(model, recipe)}


def logits_bytes(model: Model, recipe: Recipe) -> float:
    """Bytes of logits, loss and their gradients at the highest point, which is when log-softmax runs backward.

    The logits themselves while someone holds them; what log-softmax has put out; the gradients of its output and of its input.
    """
    if isinstance(model, Convnet):
        return 16.0 * recipe.micro_batch * model.classes
    if predictions(model, recipe) < recipe.cells:
        return 16.0 * recipe.micro_batch * (model.vocab if model.traits.images else 2)
    low, full = recipe.compute_bytes, 4 if recipe.float_loss else recipe.compute_bytes
    held = low if recipe.logits_held else 0
    each: float = {
        Loss.WHOLE: 2 * full + low if recipe.fused_loss else 3 * full + held,
        Loss.PARTS: low + (full + low if recipe.fused_loss else 3 * full) / PARTS,
        Loss.CHUNKED: 2.0 * full * (min(1.0, recipe.loss_chunk / recipe.cells) if recipe.loss_chunk else 1 / PARTS),
    }[recipe.loss]
    return recipe.cells * model.vocab * each / (recipe.tensor_ranks if recipe.parallel_loss else 1)


def predictions(model: Transformer, recipe: Recipe) -> int:
    """Places of a micro-batch whose logits are made."""
    return recipe.micro_batch if model.traits.images or recipe.labels_samples else recipe.cells


def _per_token(model: Transformer, recipe: Recipe) -> float:
    if recipe.checkpointing is Checkpointing.OFFLOAD:
        return 0.0
    stream = recipe.stream_bytes * model.hidden
    if recipe.checkpointing is Checkpointing.FULL:
        return stream
    if recipe.checkpointing is Checkpointing.SELECTIVE:
        gate = model.ffn * (1 if model.traits.gated else 0)
        second_products = model.q_width + model.kv_width + gate + model.hidden
        return stream + recipe.compute_bytes * (model.q_width + second_products)
    return sum(block_inventory(model, recipe).values())


def _blocks_with_gradients(model: Transformer, recipe: Recipe) -> int:
    return model.layers - (FIRST_BLOCK_OF_A_PREFIX if recipe.adapter is Adapter.PREFIX else 0)


def _norms(model: Transformer, recipe: Recipe) -> float:
    """Each keeps its input (RMS written out: an FP32 copy; autocast: FP32), its normalised values if its weight is trained and
    it is written out, and, for products that are trained, what it puts out.
    """
    kept = _trained_norms(recipe)
    fused = recipe.compiled or model.traits.norm is not Norm.RMS
    given = recipe.stream_bytes if fused else 4
    normalised = 0 if fused or not kept else (recipe.stream_bytes if recipe.full_training else 4)
    inputs = 1 if model.traits.parallel else model.traits.norms
    put_out = recipe.compute_bytes if recipe.full_training else 0
    return model.hidden * (inputs * given + model.traits.norms * (normalised + put_out))


def _attention(model: Transformer, recipe: Recipe) -> float:
    """Query, key, value and output; a value that is a part of a merged product keeps all of it; scores if written out."""
    low, q, kv = recipe.compute_bytes, model.q_width, model.kv_width
    rotated = low * (q + kv) if model.traits.merged and model.traits.positions is None and not recipe.compiled else 0
    kernel = low * (2 * q + 2 * kv) + rotated + 4 * model.heads
    if recipe.attention is Attention.SDPA:
        return kernel
    dropped = 1 + (low if low == 4 else 0) if model.traits.dropouts else 0
    weights = low if recipe.attention is Attention.MATMUL else 4 + (low if low < 4 else 0)
    return kernel + model.heads * recipe.sequence * (weights + dropped)


def _mlp(model: Transformer, recipe: Recipe) -> float:
    """The activation keeps its input, the gate both factors, the last product its input if it is trained.

    A compiler fuses what lies between products, but the inputs of products are still made and kept.
    """
    low = recipe.compute_bytes
    trained = recipe.full_training
    if model.traits.gated:
        return low * model.ffn * ((2 if recipe.compiled else 3) + trained)
    copies = 1 if recipe.compiled else model.traits.activation_copies
    return low * model.ffn * (copies + trained)


def _adapters(model: Transformer, recipe: Recipe) -> float:
    low, hidden, q = recipe.compute_bytes, model.hidden, model.q_width
    if recipe.adapter is Adapter.LORA:
        return _lora(model, recipe)
    if recipe.adapter is Adapter.PREFIX:
        return low * q
    if recipe.adapter is Adapter.SCALES:
        unscaled = q + 2 * model.kv_width + 2 * hidden + (model.mlp_matrices - 1) * model.ffn
        return low * (q + unscaled + (model.ffn if model.traits.gated else 0))
    return 0.0


def _lora(model: Transformer, recipe: Recipe) -> float:
    """Each adapter drops parts of its input, and keeps a copy and a mask of it; without dropout products share their input."""
    low, hidden, mlp = recipe.compute_bytes, model.hidden, model.mlp_matrices - 1
    merged = LORA_INDEX_COPY * (model.q_width + model.kv_width) if model.traits.merged else 0
    if not recipe.adapter_dropout:
        return low * (hidden + (hidden + model.ffn if recipe.adapts_all else 0)) + merged
    read = hidden * (1 if model.traits.merged else 2)
    if recipe.adapts_all:
        read += hidden * (mlp if model.traits.merged else mlp + 1) + model.q_width + model.ffn
    return (low + 1) * read + merged


def _trained_norms(recipe: Recipe) -> bool:
    return recipe.full_training or recipe.adapter is Adapter.SCALES


def _four_bit_inputs(model: Transformer, recipe: Recipe) -> float:
    """bitsandbytes' product keeps its input although its weight is frozen."""
    return recipe.compute_bytes * (model.traits.norms * model.hidden + model.ffn)
