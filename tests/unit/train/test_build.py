"""A resolved run becomes objects."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from halfstep.config.options import OptimizerName, SchedulerName
from halfstep.config.run import OptimizerRun, SchedulerRun
from halfstep.errors import ConfigError
from halfstep.train.build import build_optimizer, build_scheduler, course, parameter_groups


def settings(name: OptimizerName, **changed: float | tuple[float, float] | None) -> OptimizerRun:
    values = {"learning_rate": 0.1, "weight_decay": 0.5, "betas": None, "eps": None, "momentum": None}
    return OptimizerRun(name=name, clip_norm=1.0, clip_value=0.0, ema_decay=0.0, **{**values, **changed})  # type: ignore[arg-type]


def schedule(name: SchedulerName, warmup: int = 0, final: float = 0.1) -> SchedulerRun:
    return SchedulerRun(name=name, warmup_updates=warmup, decay_updates=None, final_share=final)


def test_norms_and_biases_do_not_decay_and_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 1))
    model[2].requires_grad_(False)
    decayed, others = parameter_groups(model, 0.5)
    assert decayed == {"params": [model[0].weight], "weight_decay": 0.5}
    assert others == {"params": [model[0].bias, model[1].weight, model[1].bias], "weight_decay": 0.0}


def test_a_shared_parameter_is_in_one_group_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert [len(group["params"]) for group in parameter_groups(model, 0.1)] == [1]


@pytest.mark.parametrize("name", list(OptimizerName))
def test_every_optimizer_can_be_made_and_steps(name: OptimizerName, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library of 8-bit AdamW is a fake, whose AdamW is torch's."""
    library = ModuleType("bitsandbytes")
    library.optim = SimpleNamespace(AdamW8bit=torch.optim.AdamW)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    extra = {"momentum": 0.9} if name is OptimizerName.SGD else {}
    optimizer, fused = build_optimizer(model, settings(name, **extra))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert fused.reason


def test_the_library_of_8_bit_adamw_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError) as caught:
        build_optimizer(nn.Linear(3, 2), settings(OptimizerName.ADAMW_8BIT))
    assert str(caught.value) == (
        '`optimizer.name = "adamw-8bit"` is that of bitsandbytes, which is not installed: pip install bitsandbytes. '
        'Or use "adamw", or "adafactor", which keeps less.'
    )


def test_betas_and_eps_reach_the_optimizer() -> None:
    optimizer, fused = build_optimizer(nn.Linear(3, 2), settings(OptimizerName.ADAMW, betas=(0.8, 0.9), eps=1e-5))
    assert (optimizer.defaults["betas"], optimizer.defaults["eps"]) == ((0.8, 0.9), 1e-5)
    assert fused.value is True


def test_the_learning_rate_warms_up_then_falls_to_its_final_share() -> None:
    share = course(schedule(SchedulerName.COSINE, warmup=4, final=0.1), planned=15)
    assert [round(share(applied), 6) for applied in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert share(9) == pytest.approx(1 - 0.9 * (1 - math.cos(math.pi * 0.5)) / 2)
    assert share(14) == pytest.approx(0.1)
    assert share(1000) == pytest.approx(0.1)


def test_a_linear_course_is_a_line() -> None:
    share = course(schedule(SchedulerName.LINEAR, final=0.0), planned=5)
    assert [share(applied) for applied in range(5)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_constant_course_needs_no_end() -> None:
    assert course(schedule(SchedulerName.CONSTANT), planned=None)(10**6) == 1.0


def test_the_scheduler_sets_the_rate_of_the_first_update_at_once() -> None:
    optimizer, _ = build_optimizer(nn.Linear(3, 2), settings(OptimizerName.SGD))
    build_scheduler(optimizer, schedule(SchedulerName.COSINE, warmup=3), planned=10)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.025, 0.025])
