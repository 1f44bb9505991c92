"""What other estimators say of the peak of a recipe, in bytes on one device: their formulas, told as they publish them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from halfstep.config.options import Precision
from halfstep.plan.memory import memory_bill
from halfstep.plan.model_facts import Transformer
from halfstep.plan.recipe import Checkpointing, Recipe

Estimator = Callable[[Transformer, Recipe], float]


def planner(model: Transformer, recipe: Recipe) -> float:
    """Ours."""
    return memory_bill(model, recipe).allocated_bytes


def accelerate(model: Transformer, recipe: Recipe) -> float:
    """`accelerate estimate-memory`: the largest of its four parts, which is what it prints for training with Adam."""
    from accelerate.commands.estimate import estimate_training_usage

    precision = "float32" if recipe.precision is Precision.FP32 else "bfloat16"
    return float(max(estimate_training_usage(4 * model.parameters, precision).values()))


def deepspeed(model: Transformer, recipe: Recipe) -> float:
    """Its `estimate_zero3_model_states_mem_needs` without offloading (memory.rst): 18 P / N + 4 x largest layer."""
    largest = max(model.head_matrix, model.block_parameters)
    return 18 * model.parameters / recipe.ranks / recipe.tensor_ranks + 4 * largest


def korthikanti(model: Transformer, recipe: Recipe) -> float:
    """States of 16 bytes a parameter (8 in pure BF16, 2 frozen) and 34 s b h a block, 2 s b h if checkpointed (2022)."""
    each = 2 if not recipe.full_training else 8 if recipe.precision is Precision.BF16_PURE else 16
    a_token = 34 if recipe.checkpointing in (Checkpointing.NONE, Checkpointing.SELECTIVE) else 2
    shards = recipe.tensor_ranks * (recipe.ranks if recipe.sharding.divides else 1)
    return each * model.parameters / shards + a_token * recipe.cells * model.hidden * model.layers / recipe.tensor_ranks


def others() -> dict[str, Estimator]:
    """Those that can be asked here."""
    found: dict[str, Estimator] = {"DeepSpeed's formula": deepspeed, "34 s b h": korthikanti}
    return {"Accelerate": accelerate, **found} if find_spec("accelerate") else found
