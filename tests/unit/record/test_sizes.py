"""Problems 1 and 3: shares and ratios are those that one computes by hand, and the budget bounds them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from halfstep.record.probes.budget import Budget
from halfstep.record.probes.layers import grouped
from halfstep.record.probes.sizes import Sizes, sample
from halfstep.report.parts import Heat, Table
from unit.record.watched import mlp, pairs, squares, watched

ALWAYS = float("inf")


def sizes() -> Sizes:
    return Sizes(budget=Budget(ALWAYS))


def heat(probe: Sizes, title: str) -> Heat:
    part = next(part for part in probe.measurements() if part.title == title)
    assert isinstance(part, Heat)
    return part


def table(probe: Sizes, title: str) -> Table:
    part = next(part for part in probe.measurements() if part.title == title)
    assert isinstance(part, Table)
    return part


def test_update_ratio_is_the_size_of_the_update_against_that_of_the_weights() -> None:
    model = mlp()
    before = [p.detach().clone() for p in model[2].parameters()]
    probe = watched(sizes(), model, pairs(1))
    moved = torch.cat([(p - b).flatten() for p, b in zip(model[2].parameters(), before, strict=True)]).norm()
    ratio = moved / torch.cat([b.flatten() for b in before]).norm()
    assert heat(probe, "Update ratio per layer").values[1] == pytest.approx((ratio.log10().item(),), abs=1e-5)


def test_updates_below_half_a_step_of_bf16_are_counted_as_lost() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.weight[0] = 2.0**-20
    batches = [(torch.ones(2, 4, dtype=torch.bfloat16), torch.tensor([[1.0, 0, 0, 0]] * 2))]
    probe = watched(sizes(), model, batches, optimizer=torch.optim.SGD(model.parameters(), lr=2.0**-12))
    (finding,) = [f for f in probe.findings() if f.rule == "amp-pure-bf16-update-lost"]
    assert finding.message == (
        "BF16 weights with a gradient that the step leaves as they are, limit 50%: `(model)` 75%; 1 of 1 layers, 1 update"
    )
    assert table(probe, "BF16 updates lost to rounding").rows == (("(model)", "75.0%"),)


def test_fp32_weights_lose_nothing_and_are_not_spoken_of() -> None:
    probe = watched(sizes(), mlp(), pairs(3), lr=1e-3)
    assert probe.findings() == []
    assert [part.title for part in probe.measurements()] == ["Update ratio per layer"]


def test_shares_below_the_range_of_fp16_are_those_at_the_loss_scale() -> None:
    """Gradients are set by hand: at a scale of 2 one value is whole, one has fewer digits, one is lost, one is zero."""
    model = nn.Linear(4, 1, bias=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    probe = sizes()
    probe.attach(model, optimizer, scaler)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    assert model.weight.grad is not None
    model.weight.grad.copy_(torch.tensor([[2.0, 2.0**-20, 2.0**-27, 0.0]]))
    scaler.step(optimizer)
    scaler.update()
    probe.update_ended(0)
    probe.detach()
    assert heat(probe, "FP16 underflow per layer").values == ((pytest.approx(2 / 3),),)
    held = table(probe, "What FP16 and BF16 hold of the gradients")
    assert held.rows == (("(model)", "66.7%", "33.3%", "0.0%", "25.0%"),)
    (finding,) = probe.findings()
    assert finding.message == (
        "`(model)`: 67% of the gradient values, zeros aside, are below FP16's normal range at a loss scale of 2, limit 50%"
    )


def test_state_and_sums_in_bf16_are_told() -> None:
    model = mlp().to(torch.bfloat16)
    batches = [(x.bfloat16(), y) for x, y in pairs(4)]
    probe = watched(sizes(), model, batches, optimizer=torch.optim.AdamW(model.parameters(), lr=0.0), accumulate=2)
    told = {finding.rule: finding.message for finding in probe.findings()}
    assert told == {
        "bf16-optimizer-state": "8 of 12 tensors of AdamW's state are BF16",
        "bf16-accumulation": "gradients of 2 micro-batches are added up in BF16",
    }


def test_a_large_learning_rate_is_told_by_the_size_of_its_updates() -> None:
    model = mlp()
    probe = watched(sizes(), model, pairs(5), optimizer=torch.optim.AdamW(model.parameters(), lr=0.5))
    (finding,) = probe.findings()
    assert finding.rule == "large-updates"
    assert "at a learning rate of up to 0.5; 2 of 2 layers, median of 5 updates" in finding.message


def test_sparse_and_missing_gradients_are_no_obstacle() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    probe = sizes()
    probe.attach(model, optimizer, None)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    probe.update_ended(0)
    probe.detach()
    assert probe.findings() == []


def test_the_weights_are_bitwise_the_same_with_the_probe() -> None:
    def end(probe: Sizes | None) -> Tensor:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if probe is not None:
            probe.attach(model, optimizer, None)
        for x, y in pairs(3):
            squares(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(end(None), end(sizes()))


def test_a_budget_that_is_spent_allows_nothing_but_the_first_updates() -> None:
    now = [0.0]
    budget = Budget(0.1, clock=lambda: now[0])
    allowed = []
    for _ in range(30):
        allowed.append(budget.allows())
        if allowed[-1]:
            with budget.spending(begins=True):
                now[0] += 1.0
        now[0] += 1.0
    assert allowed[:4] == [True, True, True, False]
    assert allowed.count(True) == 4


def test_a_sample_is_spread_over_the_tensor_and_small_ones_are_whole() -> None:
    assert torch.equal(sample(torch.arange(9).view(3, 3)), torch.arange(9))
    taken = sample(torch.arange(1_000_000))
    assert 3000 < len(taken) <= 4096
    assert taken[-1] > 990_000


def test_layers_are_cut_to_a_few_dozen() -> None:
    paths = [f"blocks.{n}.{part}.{leaf}" for n in range(12) for part in ("attention", "feed") for leaf in "abcd"]
    assert len(set(grouped(paths))) == 24
    assert grouped(["", "a.b"]) == ["(model)", "a.b"]
