"""What an engine refuses to begin with, each in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from halfstep import Engine
from halfstep.errors import ConfigError, ModelError, UsageError
from halfstep.precision.scaler import ScalerSettings


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def refused(kind: type[UsageError], said: str, given: Any = None, make: Any = SGD, **options: Any) -> None:
    """The engine refuses with exactly this sentence."""
    module = model() if given is None else given
    optimizer = make(module.parameters()) if callable(make) else make
    with pytest.raises(kind) as told:
        Engine(module, optimizer, **options)
    assert str(told.value) == said


ACCUMULATE = "it is the number of micro-batches in an update: 1 or more."
CLIP = "give a number above 0, or None for no clipping."
SKIPS = "it is the number of skipped updates in a row that stops a run: 1 or more."
PRECISIONS = '"auto", "fp32", "fp16", "bf16", "bf16-pure"'
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"accumulate": 0}, f"`accumulate` is 0; {ACCUMULATE}"),
    ({"accumulate": -4}, f"`accumulate` is -4; {ACCUMULATE}"),
    ({"accumulate": 2.0}, f"`accumulate` is 2.0; {ACCUMULATE}"),
    ({"accumulate": True}, f"`accumulate` is True; {ACCUMULATE}"),
    ({"accumulate": "4"}, f"`accumulate` is '4'; {ACCUMULATE}"),
    ({"clip_norm": 0.0}, f"`clip_norm` is 0.0; {CLIP}"),
    ({"clip_norm": -1}, f"`clip_norm` is -1; {CLIP}"),
    ({"clip_norm": math.nan}, f"`clip_norm` is nan; {CLIP}"),
    ({"clip_norm": "1.0"}, f"`clip_norm` is '1.0'; {CLIP}"),
    ({"clip_value": 0}, f"`clip_value` is 0; {CLIP}"),
    ({"clip_norm": 1.0, "clip_value": 0.5}, "`clip_norm` is 1.0 and `clip_value` is 0.5; give one of the two."),
    ({"max_skips": 0}, f"`max_skips` is 0; {SKIPS}"),
    ({"max_skips": None}, f"`max_skips` is None; {SKIPS}"),
    ({"precision": "fp8"}, f"`precision` is 'fp8', which is not one of {PRECISIONS}."),
    ({"precision": torch.float16}, f"`precision` is torch.float16, which is not one of {PRECISIONS}."),
    ({"precision": None}, f"`precision` is None, which is not one of {PRECISIONS}."),
    ({"tail": "flush"}, '`tail` is \'flush\', which is not one of "step", "carry", "drop".'),
]


@pytest.mark.parametrize(("options", "said"), SETTINGS, ids=[said.split(",")[0][:50] for _, said in SETTINGS])
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    refused(ConfigError, said, make=lambda held: SGD(held, lr=0.1), **{"precision": "fp32", **options})


SCALE = "The loss scale needs growth_factor >= 1, 0 < backoff_factor < 1 and growth_interval >= 1, not "
SCALES: list[tuple[dict[str, Any], str]] = [
    ({"floor": 0.0}, "The loss scale starts at 65536 with a floor of 0; the floor must be above 0 and at most the start."),
    (
        {"init_scale": 1.0, "floor": 2.0},
        "The loss scale starts at 1 with a floor of 2; the floor must be above 0 and at most the start.",
    ),
    ({"growth_factor": 0.5}, f"{SCALE}0.5, 0.5 and 2000."),
    ({"backoff_factor": 1.0}, f"{SCALE}2, 1 and 2000."),
    ({"backoff_factor": 0.0}, f"{SCALE}2, 0 and 2000."),
    ({"growth_interval": 0}, f"{SCALE}2, 0.5 and 0."),
]


@pytest.mark.parametrize(("options", "said"), SCALES, ids=[str(options) for options, _ in SCALES])
def test_a_scale_that_cannot_move_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as told:
        ScalerSettings(**options)
    assert str(told.value) == said


def test_a_model_without_trainable_parameters_is_refused() -> None:
    frozen = model().requires_grad_(False)
    said = "The model has no parameter that needs gradients; un-freeze some with `requires_grad_(True)`."
    refused(ModelError, said, frozen, precision="fp32")


HOLDS_NONE = (
    "The {} holds none of the model's trainable parameters. Make it from `model.parameters()` after the model has its final form "
    "(moved, converted, adapters added)."
)


def test_an_optimizer_of_another_model_is_refused() -> None:
    refused(ModelError, HOLDS_NONE.format("AdamW"), make=AdamW(model().parameters()), precision="fp32")


def test_one_of_several_optimizers_that_holds_nothing_is_refused() -> None:
    module = model()
    both = [SGD(module.parameters(), lr=0.1), Adam(model().parameters())]
    refused(ModelError, HOLDS_NONE.format("Adam"), module, make=both, precision="fp32")


def test_an_optimizer_of_the_frozen_part_is_refused() -> None:
    module = model()
    module[0].requires_grad_(False)
    refused(ModelError, HOLDS_NONE.format("SGD"), module, make=SGD(module[0].parameters(), lr=0.1), precision="fp32")


def test_no_optimizer_is_refused() -> None:
    refused(ModelError, "The list of optimizers is empty; give at least one over the model's parameters.", make=[])


def test_two_optimizers_of_one_parameter_are_refused() -> None:
    module = model()
    both = [SGD(module.parameters(), lr=0.1), SGD(module[1].parameters(), lr=0.1)]
    said = "Two optimizers hold the parameter `1.weight`; each parameter is stepped by one of them."
    refused(ModelError, said, module, make=both)


def test_what_is_no_optimizer_is_refused() -> None:
    module = model()
    said = "`optimizer` is a {}; give a `torch.optim.Optimizer`, or a list of them."
    refused(ModelError, said.format("StepLR"), module, make=StepLR(SGD(module.parameters(), lr=0.1), 1))
    refused(ModelError, said.format("Parameter"), module, make=list(module.parameters()))


class TakesAClosure(SGD):
    """As second-order optimizers do: no step without a closure."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize("make", [LBFGS, lambda held: TakesAClosure(held, lr=0.1)], ids=["LBFGS", "closure"])
def test_an_optimizer_that_calls_a_closure_is_refused(make: Callable[[Any], Optimizer]) -> None:
    name = type(make(model().parameters())).__name__
    said = (
        f"{name} evaluates the loss several times in one step through a closure, which accumulation, loss scaling and one-read "
        "clipping do not allow. Use a first-order optimizer such as AdamW."
    )
    refused(ModelError, said, make=make, precision="fp32")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_parameters_that_are_not_finite_at_the_start_are_named(value: float) -> None:
    module = model()
    with torch.no_grad():
        module[1].weight[0, :2] = value
    said = (
        "Parameter `1.weight` has 2 of 3 values that are not finite before the first update. "
        "Was the checkpoint damaged, or the initialisation skipped (`torch.empty`, `to_empty`)?"
    )
    refused(ModelError, said, module, make=lambda held: SGD(held, lr=0.1), precision="fp32")


HELD = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
LOST = "its updates are lost to rounding"
WHY = {"fp16": "gradients in that type cannot be unscaled", "fp32": LOST, "bf16": LOST}


@pytest.mark.parametrize("precision", ["fp16", "fp32", "bf16"])
@pytest.mark.parametrize("dtype", HELD)
def test_half_precision_parameters_are_refused_with_the_cure(dtype: torch.dtype, precision: str) -> None:
    also = ' or train with `precision = "bf16-pure"`' if dtype is torch.bfloat16 else ""
    said = (
        f'Parameter `0.weight` is {HELD[dtype]}; `precision = "{precision}"` trains FP32 parameters ({WHY[precision]}). '
        f"Load the model in float32 (`model.float()` before the optimizer is made){also}."
    )
    refused(ModelError, said, model().to(dtype), make=lambda held: SGD(held, lr=0.1), precision=precision)


def test_frozen_half_precision_parameters_are_welcome() -> None:
    """The base under an adapter."""
    module = model()
    module[0].half().requires_grad_(False)
    Engine(module, SGD(module[1].parameters(), lr=0.1), precision="fp16")


def test_pure_bf16_is_refused_once_the_optimizer_has_states() -> None:
    module = model()
    optimizer = AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    said = (
        'The optimizer has states already; `precision = "bf16-pure"` turns the parameters into BF16 before the first update. '
        "Make the engine before the optimizer's first step, or before its states are loaded."
    )
    refused(ModelError, said, module, make=optimizer, precision="bf16-pure")


def test_pure_bf16_turns_parameters_and_states_into_bf16_and_keeps_the_optimizers_references() -> None:
    module = model()
    optimizer = AdamW(module.parameters())
    engine = Engine(module, optimizer, loss=lambda m, x: m(x).square().mean(), precision="bf16-pure")
    assert engine.update([torch.ones(2, 2, dtype=torch.bfloat16)]).applied
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {s["exp_avg"].dtype for s in optimizer.state.values()} == {torch.bfloat16}


def test_sparse_gradients_are_refused() -> None:
    module = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean()

    engine = Engine(module, SGD(module.parameters(), lr=0.1), loss=loss, precision="fp32")
    with pytest.raises(ModelError) as told:
        engine.update([torch.tensor([1, 2])])
    assert (
        str(told.value) == "A gradient is sparse (`nn.Embedding(sparse=True)`?); halfstep needs dense ones: use `sparse=False`."
    )


def test_checkpointing_a_model_without_repeated_blocks_is_refused() -> None:
    said = (
        "`checkpoint_activations` looks for repeated blocks, and Sequential has none. Put `torch.utils.checkpoint.checkpoint` "
        "around the parts of its forward that need much memory."
    )
    refused(ModelError, said, make=lambda held: SGD(held, lr=0.1), precision="fp32", checkpoint_activations=True)


def test_a_refused_engine_leaves_no_trace_on_the_model() -> None:
    module = model()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for options in ({"accumulate": 0}, {"precision": "fp8"}, {"tail": "flush"}):
        with pytest.raises(UsageError):
            Engine(module, SGD(module.parameters(), lr=0.1), **options)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
