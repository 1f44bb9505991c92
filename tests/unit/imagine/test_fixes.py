"""Fixes on other text than the cards' examples: what is edited, and what is left because no edit is sure."""

from __future__ import annotations

import pytest

from halfstep.cli.check import fixed
from halfstep.findings.finding import Edit, Fix, Safety
from halfstep.findings.registry import find_rule
from halfstep.imagine.fixing.actions import together
from halfstep.imagine.source import Source
from halfstep.rules.settings import Settings

BOTH = {Safety.SAFE, Safety.UNSAFE}


def fix(rule: str, text: str) -> str:
    return fixed(Source("script.py", text), (find_rule(rule),), Settings(), BOTH).text


def example(rule: str) -> str:
    return find_rule(rule).card.example


def test_argument_is_added_to_a_call_over_several_lines() -> None:
    before = example("data-nonblocking-no-pin").replace(
        "DataLoader(dataset, batch_size=8, shuffle=True)",
        "DataLoader(\n        dataset,\n        batch_size=(8),  # few\n        shuffle=True,\n    )",
    )
    assert "        shuffle=True,\n        pin_memory=True,\n    )" in fix("data-nonblocking-no-pin", before)


def test_argument_given_by_its_place_is_not_given_a_second_time() -> None:
    before = example("sched-plateau-mode").replace("(optimizer)\n", '(optimizer, "min")\n')
    assert 'ReduceLROnPlateau(optimizer, "max")' in fix("sched-plateau-mode", before)


LEFT = {
    "the other one is done only sometimes": (
        "amp-unscale-twice",
        "            scaler.unscale_(optimizer)\n            nn.utils",
        "            if epoch:\n                scaler.unscale_(optimizer)\n            nn.utils",
    ),
    "what is hoisted depends on the turn": ("data-loader-rebuilt", "DataLoader(dataset, ", "DataLoader(dataset[epoch], "),
    "something between needs what is moved": (
        "sched-orphan-optimizer",
        "    optimizer = torch.optim.SGD",
        "    print(scheduler)\n    optimizer = torch.optim.SGD",
    ),
    "the sampler is not always one": (
        "ddp-no-set-epoch",
        "    sampler = DistributedSampler(dataset)\n",
        "    sampler = None\n    sampler = DistributedSampler(dataset)\n",
    ),
    "epochs are not named": ("ddp-no-set-epoch", "for epoch in", "for _ in"),
    "another test repeats the boundary": (
        "accum-tail-dropped",
        "            loss.backward()\n",
        "            loss.backward()\n            print(i % accumulate)\n",
    ),
    "batches are not counted": (
        "accum-tail-dropped",
        "for i, (x, y) in enumerate(loader)",
        "for i, (x, y) in enumerate(map(tuple, loader))",
    ),
    "the division is by more than the ranks": (
        "ddp-double-average",
        "/ dist.get_world_size()",
        "/ (dist.get_world_size() * 1.0)",
    ),
    "the inputs are cast like the model": ("amp-half-params", "mse_loss(model(x), y)", "mse_loss(model(x.half()), y)"),
    "the cast also moves": ("amp-pure-bf16-update-lost", "model.to(torch.bfloat16)", 'model.to("cuda", torch.bfloat16)'),
    "two factors may be the rate": ("sched-lambda-absolute", "1e-3 * 0.99**step", "1e-3 * 0.01"),
    "the loader has arguments that cannot be told apart": ("ddp-no-sampler", "shuffle=True)", "shuffle=True, **{})"),
    "the seed is set before the model is wrapped": (
        "ddp-same-seed",
        "    model = DDP(model.cuda(), device_ids=[local_rank])\n    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "    torch.manual_seed(1234)\n",
        "    torch.manual_seed(1234)\n    model = DDP(model.cuda(), device_ids=[local_rank])\n"
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n",
    ),
    "the boundary is counted after the forward pass": (
        "ddp-no-sync-off-by-one",
        "            if (i + 1) % accumulate == 0 or i + 1 == len(loader):",
        "            done = i + 1\n            if done % accumulate == 0 or done == len(loader):",
    ),
    "only one branch of the question runs backward": (
        "ddp-no-sync-backward-only",
        "            else:\n                loss.backward()",
        "            else:\n                (loss * 1.0).backward()",
    ),
    "the loss is divided by another number than the window's": (
        "accum-tail-underweighted",
        "mse_loss(model(x), y) / accumulate",
        "mse_loss(model(x), y) / 4",
    ),
    "several statements on one line": (
        "clip-before-backward",
        "loss.backward()\n            optimizer",
        "loss.backward(); optimizer",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_fault_is_left_where_no_edit_is_sure(case: str) -> None:
    rule, old, new = LEFT[case]
    before = example(rule).replace(old, new)
    assert before != example(rule)
    assert fix(rule, before) == before


def test_unscaling_and_clipping_of_every_micro_batch_go_to_the_step_together() -> None:
    before = example("amp-update-per-microbatch").replace(
        "            scaler.scale(loss).backward()\n",
        "            scaler.scale(loss).backward()\n            scaler.unscale_(optimizer)\n"
        "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
    )
    inside = """i + 1 == len(loader):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
"""
    assert inside in fix("amp-unscale-twice", before)


def test_scaler_comes_to_a_function_that_is_given_the_optimizer_and_not_to_a_backward_pass_without_a_step() -> None:
    before = (
        example("amp-fp16-no-scaler").replace(
            "def train(model, loader, epochs=2):\n    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n",
            "def train(model, loader, optimizer, epochs=2):\n",
        )
        + """

net = nn.Linear(2, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
train(net, torch.utils.data.DataLoader(data, batch_size=4), opt)
net(torch.randn(3, 2)).mean().backward()
"""
    )
    after = fix("amp-fp16-no-scaler", before)
    assert "def train(model, loader, optimizer, epochs=2, *, scaler):\n" in after
    assert 'scaler = torch.amp.GradScaler("cuda")\ntrain(net, ' in after
    assert ", opt, scaler=scaler)\nnet(torch.randn(3, 2)).mean().backward()\n" in after


def test_object_that_cannot_be_read_at_a_place_is_not_named_there() -> None:
    head, loop = example("amp-clip-before-unscale").split("def train(")
    clip = "def clip(parameters):\n    nn.utils.clip_grad_norm_(parameters, 1.0)\n\n\n"
    before = f"{head}{clip}def train({loop}".replace("nn.utils.clip_grad_norm_(model", "clip(model")
    assert fix("amp-clip-before-unscale", before) == before


def test_text_of_several_lines_in_a_wrapped_loop_is_kept() -> None:
    before = example("mode-no-grad-missing").replace(
        "        for x, y in val_loader:\n", '        for x, y in val_loader:\n            note = """a\n  b"""\n'
    )
    assert 'with torch.no_grad():\n            for x, y in val_loader:\n                note = """a\n  b"""\n' in fix(
        "mode-no-grad-missing", before
    )


def test_state_goes_on_a_line_of_its_own_where_the_others_have_theirs() -> None:
    before = example("sched-not-checkpointed").replace(
        '{"model": model.state_dict(), "optimizer": optimizer.state_dict()}',
        "{\n            'model': model.state_dict(),\n            'optimizer': optimizer.state_dict(),  # moments\n        }",
    )
    assert "'optimizer': optimizer.state_dict(),\n            'scheduler': scheduler.state_dict(),  # moments" in fix(
        "sched-not-checkpointed", before
    )


def test_fixes_that_meet_are_made_one_after_the_other_and_each_whole() -> None:
    first = Fix((Edit(1, 0, 1, 4, "a"), Edit(3, 0, 4, 0, "")), Safety.SAFE)
    meets = Fix((Edit(3, 2, 3, 4, "b"), Edit(9, 0, 9, 0, "c")), Safety.SAFE)
    apart = Fix((Edit(9, 0, 9, 0, "c"),), Safety.SAFE)
    assert together([first, meets, apart]) == [*first.edits, *apart.edits]
