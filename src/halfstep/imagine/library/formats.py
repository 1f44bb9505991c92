"""Number formats: what the program calls them, which a model's parameters have, and casts of them."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from halfstep.events.vocabulary import AverageUpdate, Forward, Numeric, Place, Region
from halfstep.imagine.state import Draft
from halfstep.imagine.values import External, Tensor, Thing, Value, parts_of, settled

if TYPE_CHECKING:
    from halfstep.imagine.calls import Calls

CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32"}
"""Methods that cast."""
LOW = {"float16": "half", "bfloat16": "bfloat"}
"""Formats of 16 bits, and what a tensor in them is called here."""
LIMITS = {
    "float32": (-3.4028234e38, 3.4028234e38, 1.1754944e-38, 1.1920929e-07),
    "bfloat16": (-3.3895314e38, 3.3895314e38, 1.1754944e-38, 0.0078125),
    "float16": (-65504.0, 65504.0, 6.1035156e-05, 0.0009765625),
}
"""Smallest and largest number, smallest normal one, distance of 1 to the next."""
WITH_PARAMETERS = re.compile(r"Linear|Conv|Embedding|LSTM|GRU|RNN|Norm|Attention|Transformer|PReLU|Bilinear")
"""Layers with parameters of their own."""


def dtype_name(value: Value) -> str | None:
    """`float16`, `bfloat16`, `float32` ... of a dtype value."""
    value = settled(value)
    if isinstance(value, External) and value.path.startswith("torch."):
        return {"half": "float16", "float": "float32", "bfloat": "bfloat16"}.get(value.last, value.last)
    if isinstance(value, str):
        return {"fp16": "float16", "bf16": "bfloat16", "half": "float16"}.get(value, value)
    return None


def take_dtype(model: Thing, place: Place | None) -> None:
    """A model whose trained layers all have parameters of one low precision is one of that precision."""
    trained = [part for part in parts_of(model) if not part.facts.get("frozen")]
    kinds = {part.dtype for part in trained if part.dtype or WITH_PARAMETERS.search(str(part.facts.get("class", "")))}
    if len(kinds) == 1 and (kind := kinds.pop()) in ("float16", "bfloat16"):
        model.dtype = kind
        model.facts["cast at"] = place or next(part.facts.get("cast at") for part in trained if part.dtype)


def cast(state: Calls, thing: Thing, dtype: str, node: ast.AST) -> None:
    """The parameters of a model get another number format."""
    for part in all_of(thing):
        part.dtype = dtype if dtype != "float32" else None
        part.facts["cast at"] = state.place(node)
    for whole in thing.family() if thing.dtype is None else ():
        if any(part.facts.get("frozen") or part.facts.get("partly frozen") for part in all_of(whole)):
            whole.dtype = None  # what is trained of it is FP32 again


def all_of(model: Thing, depth: int = 0) -> list[Thing]:
    """A module and all that it holds, outermost first."""
    return [model, *(m for part in parts_of(model) for m in all_of(part, depth + 1))] if depth < 6 else []


def read_param(param: Thing, name: str, values: list[Value]) -> Tensor:
    """What a method makes of a parameter: a cast, or something in the same format."""
    kept = next((owner.dtype for owner in param.owners), None)
    asked = [dtype_name(value) for value in values] if name == "to" else [CASTS.get(name)]
    dtype = next((each for each in asked if each in CASTS.values()), kept)
    return Tensor(models=frozenset(param.owners), name="parameter", dtype=LOW.get(dtype or "", "float"))


def write_param(state: Calls, thing: Thing, node: ast.AST, new: Value = None) -> Value:
    """The numbers of a parameter are set by hand."""
    moved = isinstance(new, Tensor) and new.name == "parameter" and "copied weights" not in new.tags
    dtype = next((long for long, short in LOW.items() if moved and short == new.dtype), "float32")
    for owner in thing.owners:
        if moved and (owner.dtype or "float32") != dtype:
            cast(state, owner, dtype, node)
        if owner.facts.get("copy_of") is not None:
            state.emit(AverageUpdate, node, target=owner)
        elif state.region is not None and any(_kept_low(draft, owner, state.region) for draft in state.drafts):
            state.emit(Numeric, node, kind="weights written", region=state.region)
    return thing


def _kept_low(draft: Draft, owner: Thing, region: Region) -> bool:
    """Whether a forward pass in this region made low-precision copies of these weights, which are kept until its end."""
    model = draft.fields["model"] if draft.kind is Forward and draft.fields["region"] is region else None
    return model is not None and draft.fields["grad_enabled"] and (owner in model.family() or model in owner.family())
