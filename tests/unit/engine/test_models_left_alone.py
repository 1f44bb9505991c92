"""Nothing of the user's is patched; models with shared, frozen, unused and compiled parts train as they should."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from halfstep import Engine
from halfstep.distributed.blocks import repeated_blocks
from parity.by_hand import (
    FUSED,
    UNFUSED,
    Batch,
    ByHand,
    MakeOptimizer,
    assert_bitwise,
    assert_near,
    mean_loss,
    micro_batches,
    state,
    tiny_model,
)

FP32_ROUNDING = 2e-6
fused_or_not = pytest.mark.parametrize("make", [UNFUSED["AdamW"], FUSED["AdamW fused"]], ids=["unfused", "fused"])


def shape_of(model: nn.Module, optimizer: Optimizer) -> tuple[Any, ...]:
    """Types, methods, attributes and hooks: what patching would change."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    of_tensors = [p._backward_hooks for p in model.parameters()]
    types = (type(model), type(optimizer), model.forward.__func__, optimizer.step.__func__)
    return types, set(vars(model)), set(vars(optimizer)), hooks, of_tensors


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_types_methods_and_hooks_stay_what_they_were(precision: str) -> None:
    model = tiny_model()
    optimizer = AdamW(model.parameters(), fused=True)
    before = shape_of(model, optimizer)
    engine = Engine(model, optimizer, loss=mean_loss, precision=precision, accumulate=2, clip_norm=1.0)
    list(engine.updates(micro_batches(4)))
    assert shape_of(model, optimizer) == before


def test_a_schedulers_own_wrapper_of_step_is_left_to_it() -> None:
    model = tiny_model()
    optimizer = AdamW(model.parameters())
    scheduler = StepLR(optimizer, 1)
    step = optimizer.step
    Engine(model, optimizer, loss=mean_loss, scheduler=scheduler, precision="fp32").update(micro_batches(1))
    assert optimizer.step == step


def test_on_one_process_the_model_is_called_as_it_was_given() -> None:
    model = tiny_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32")
    assert engine.model is engine.module is model


def test_step_hooks_of_the_optimizer_are_called_once_an_applied_update() -> None:
    model = tiny_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    engine = Engine(model, optimizer, loss=mean_loss, precision="fp32", accumulate=2)
    batches = micro_batches(6)
    batches[2] = batches[2].times(float("inf"))
    list(engine.updates(batches))
    assert len(steps) == 2


class Branches(nn.Module):
    """One branch is used by each micro-batch, and one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[int(x.sum() > 0)](x)


@fused_or_not
def test_a_parameter_without_gradient_is_bitwise_untouched(make: MakeOptimizer) -> None:
    """Weight decay too: an optimizer leaves alone what has no gradient."""
    ours, theirs = Branches(), Branches()
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    unused = ours.branches[2].weight.detach().clone()
    engine = Engine(ours, optimizer, loss=mean_loss, precision="fp32", accumulate=2, clip_norm=1e6)
    list(engine.updates(micro_batches(8)))
    loop = ByHand(model=theirs, optimizers=[plain], mean=True)
    batches = micro_batches(8)
    for i in range(0, 8, 2):
        loop.update(batches[i : i + 2])
    assert_bitwise(state(ours, optimizer), state(theirs, plain))
    assert torch.equal(ours.branches[2].weight, unused)


@fused_or_not
def test_frozen_parameters_stay_bitwise_what_they_were(make: MakeOptimizer) -> None:
    model = tiny_model()
    model[0].requires_grad_(False)
    before = state(model[0])
    engine = Engine(model, make(model.parameters()), loss=mean_loss, precision="fp32", clip_norm=0.1)
    list(engine.updates(micro_batches(4)))
    assert_bitwise(before, state(model[0]))


@pytest.mark.parametrize("make", [UNFUSED["SGD"], FUSED["AdamW fused"]], ids=["SGD", "AdamW fused"])
def test_parameters_unfrozen_on_the_way_are_cleared_clipped_and_stepped(make: MakeOptimizer) -> None:
    """Gradual unfreezing, by `requires_grad_` and by a new parameter group."""
    ends = []
    for by_engine in (True, False):
        model = tiny_model()
        model[0].requires_grad_(False)
        optimizer = make([*model[0].parameters(), *model[3].parameters()])
        engine = Engine(model, optimizer, loss=mean_loss, precision="fp32", clip_norm=0.1) if by_engine else None
        loop = ByHand(model=model, optimizers=[optimizer], clip_norm=0.1, mean=True)
        for number, batch in enumerate(micro_batches(6)):
            if number == 2:
                model[0].requires_grad_(True)
            if number == 4:
                optimizer.add_param_group({"params": list(model[1].parameters())})
                model[1].zero_grad()
            if engine is not None:
                engine.update([batch])
            else:
                loop.update([batch])
        ends.append(state(model, optimizer))
    assert_near(*ends, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


class Tied(nn.Module):
    """An embedding whose weight is the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x))


def next_token_loss(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    logits, targets = model(tokens[:, :-1]).float(), tokens[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


@fused_or_not
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tied_parameters_are_stepped_once_with_both_gradients(make: MakeOptimizer, precision: str) -> None:
    window = [torch.randint(0, 7, (2, 5)) for _ in range(2)]
    ours, theirs = Tied(), Tied()
    optimizer, plain = make(ours.parameters()), make(theirs.parameters())
    Engine(ours, optimizer, loss=next_token_loss, precision=precision).update(window)
    for tokens in window:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            total, _ = next_token_loss(theirs, tokens)
        (total / 16).backward()
    plain.step()
    assert_bitwise(state(ours, optimizer), state(theirs, plain))
    assert ours.out.weight is ours.embedding.weight


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_bitwise_as_it_does_compiled_by_hand(backend: str, precision: str) -> None:
    torch._dynamo.reset()
    ours, theirs = tiny_model(), tiny_model()
    optimizer, plain = SGD(ours.parameters(), lr=0.1), SGD(theirs.parameters(), lr=0.1)
    engine = Engine(torch.compile(ours, backend=backend), optimizer, loss=mean_loss, precision=precision, accumulate=2)
    list(engine.updates(micro_batches(4)))
    dtype = torch.bfloat16 if precision == "bf16" else None
    loop = ByHand(model=torch.compile(theirs, backend=backend), optimizers=[plain], dtype=dtype, mean=True)
    loop.update(micro_batches(4)[:2])
    loop.update(micro_batches(4)[2:])
    assert engine.module is ours
    assert_bitwise(state(ours, optimizer), state(theirs, plain))


def test_a_model_compiled_in_place_trains_too() -> None:
    torch._dynamo.reset()
    ours, theirs = tiny_model(), tiny_model()
    ours.compile(backend="eager")
    Engine(ours, SGD(ours.parameters(), lr=0.1), loss=mean_loss, precision="bf16").update(micro_batches(2))
    Engine(theirs, SGD(theirs.parameters(), lr=0.1), loss=mean_loss, precision="bf16").update(micro_batches(2))
    assert_near(state(ours), state(theirs), rtol=2**-8, atol=2**-10)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_model_compiled_by_inductor_trains_to_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    ours, theirs = (nn.Sequential(nn.Linear(4, 2), nn.Tanh()) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for model, called in ((ours, torch.compile(ours, options={"compile_threads": 1})), (theirs, theirs)):
        engine = Engine(called, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32", accumulate=2)
        list(engine.updates(micro_batches(4)))
    assert_near(state(ours), state(theirs), rtol=1e-5, atol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(6), nn.Linear(6, 6), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


def deep_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Sequential(Block(), Block(), Block()), nn.Linear(6, 2))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpointed_activations_give_bitwise_the_same_updates(precision: str) -> None:
    """Dropout too: its random numbers are drawn again."""
    ends = []
    for checkpointed in (True, False):
        model = deep_model()
        optimizer = AdamW(model.parameters(), lr=0.01)
        given: dict[str, Any] = {"precision": precision, "accumulate": 2, "checkpoint_activations": checkpointed}
        engine = Engine(model, optimizer, loss=mean_loss, **given)
        torch.manual_seed(1)
        list(engine.updates(micro_batches(4)))
        ends.append(state(model, optimizer))
    assert_bitwise(*ends)


def test_checkpointed_blocks_run_their_forward_again() -> None:
    calls: list[None] = []

    class Counting(Block):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(None)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 6), nn.Sequential(Counting(), Counting()), nn.Linear(6, 2))
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32", checkpoint_activations=True)
    engine.update(micro_batches(1))
    assert len(calls) == 4


def test_checkpointing_keeps_names_and_types_and_says_what_it_does() -> None:
    model, plain = deep_model(), deep_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=mean_loss, precision="fp32", checkpoint_activations=True)
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    said = "3 x Block (asked for: their activations are computed again in backward)"
    assert str(engine.choices["checkpoint_activations"]) == said
    assert "checkpoint_activations" not in Engine(plain, SGD(plain.parameters(), lr=0.1), precision="fp32").choices


def test_the_longest_run_of_equal_children_is_the_blocks() -> None:
    model = deep_model()
    assert repeated_blocks(model) == list(model[1])
    assert repeated_blocks(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))) == []
    assert repeated_blocks(nn.Sequential(Block())) == []


def test_how_the_step_is_made_is_said() -> None:
    model = tiny_model()
    fused = "in the kernel (AdamW is fused and takes multiplier and skip flag)"
    unfused = "in place (SGD is not fused: gradients are multiplied once before the step)"
    by_value = "in place (clipping by value needs the true gradients before the step)"
    for optimizer, given, said in (
        (AdamW(model.parameters(), fused=True), {}, fused),
        (SGD(model.parameters(), lr=0.1), {}, unfused),
        (AdamW(model.parameters(), fused=True), {"clip_value": 1.0}, by_value),
    ):
        assert str(Engine(model, optimizer, precision="fp32", **given).choices["finish"]) == said


def test_a_loss_may_hold_parameters_that_the_model_does_not() -> None:
    """Learnt temperatures, class centres: the optimizer holds them, so they are cleared, clipped and stepped."""

    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centre = nn.Parameter(torch.zeros(2))

    centres = Centres()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch.x) - centres.centre).square().mean()

    model = tiny_model()
    optimizer = SGD([*model.parameters(), *centres.parameters()], lr=0.1)
    list(Engine(model, optimizer, loss=loss, precision="fp32").updates(micro_batches(2)))
    assert centres.centre.abs().sum() > 0
    assert centres.centre.grad is None
