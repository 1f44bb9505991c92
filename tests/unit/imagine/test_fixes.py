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
    return fixed(Source("script.py", text), (find_rule(rule),), Settings(), BOTH)


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
