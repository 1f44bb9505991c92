"""The original and the converted script, side by side: every update of the parameters is compared."""

import contextlib
import io
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep.findings.finding import Severity
from halfstep.imagine.converting.conversion import convert
from halfstep.imagine.converting.outcome import Wish
from halfstep.imagine.project import parse
from halfstep.imagine.story import tell
from halfstep.rules.judge import judge
from halfstep.rules.settings import Settings

SCRIPTS = Path(__file__).parent / "test_convert_scripts"
ALL = sorted(p.stem for p in SCRIPTS.glob("*.py") if p.stem != "helper_module")
HALF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Relative distance of two neighbouring numbers."""


@cache
def faults(text, path):
    found = judge(tell(parse(text), path), Settings().rules())
    return frozenset(f"{f.rule}: {f.message}" for f in found if f.severity in (Severity.ERROR, Severity.WARNING))


@cache
def converted(name, **wish):
    path = SCRIPTS / f"{name}.py"
    return convert(path.read_text(), str(path), Wish(**wish), lambda text: faults(text, str(path)))


def updates(text, folder, monkeypatch):
    """The parameters after each step of the script's optimizer, and what the script prints."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(sys, "argv", ["script.py"])
    heard: list[torch.Tensor] = []

    def after(optimizer, args, kwargs):
        heard.append(torch.cat([p.detach().flatten().clone() for g in optimizer.param_groups for p in g["params"]]))

    hook = register_optimizer_step_post_hook(after)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    finally:
        hook.remove()
    return torch.stack(heard), [float(n) for n in re.findall(r"^loss (\S+)$", printed.getvalue(), re.M)]


def original(name):
    return (SCRIPTS / f"{name}.py").read_text()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ALL)
def test_half_precision_trains_to_the_same_loss_within_its_rounding(name, precision, tmp_path, monkeypatch):
    result = converted(name, precision=precision)
    assert result.left == []
    plain, plain_losses = updates(original(name), tmp_path, monkeypatch)
    low_scale = result.text.replace("GradScaler(", "GradScaler(init_scale=256.0, device=")  # the default skips the first updates
    half, half_losses = updates(low_scale, tmp_path, monkeypatch)
    assert half.shape == plain.shape
    assert not torch.equal(half, plain)  # the low precision is really used
    assert half_losses == pytest.approx(plain_losses, rel=4 * HALF[precision], abs=4 * HALF[precision])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ALL)
def test_with_autocast_switched_off_every_update_is_bitwise_the_original(name, precision, tmp_path, monkeypatch):
    text = converted(name, precision=precision).text.replace("torch.autocast(", "torch.autocast(enabled=False, ")
    plain, plain_losses = updates(original(name), tmp_path, monkeypatch)
    same, same_losses = updates(text, tmp_path, monkeypatch)
    assert torch.equal(same, plain)  # scaling by a power of two is exact
    assert same_losses == plain_losses


@pytest.mark.parametrize(
    ("name", "small", "large"),
    [
        ("plain", "batch_size=6", "batch_size=24"),
        ("validated", "batch_size=8", "batch_size=32"),
        ("with_helper", "batch_size=6", "batch_size=24"),
        ("several_losses", "batch_size=8", "batch_size=32"),
    ],
)
def test_four_accumulated_micro_batches_are_one_batch_of_four_times_the_size(name, small, large, tmp_path, monkeypatch):
    result = converted(name, precision="fp32", accumulate=4)
    large_text = original(name).replace(small, large).replace("drop_last=True", "drop_last=False")
    whole, _ = updates(large_text, tmp_path, monkeypatch)
    parts, _ = updates(result.text, tmp_path, monkeypatch)
    assert parts.shape == whole.shape
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("precision", "ddp"), [("auto", False), ("fp16", True)])
@pytest.mark.parametrize("name", ALL)
def test_converting_twice_changes_nothing_the_second_time(name, precision, ddp):
    path = str(SCRIPTS / f"{name}.py")
    once = converted(name, precision=precision, accumulate=4, ddp=ddp)
    twice = convert(once.text, path, Wish(precision=precision, accumulate=4, ddp=ddp), lambda text: faults(text, path))
    assert once.text != original(name)
    assert twice.text == once.text


@pytest.mark.parametrize(("precision", "ddp"), [("auto", False), ("fp16", True)])
@pytest.mark.parametrize("name", ALL)
def test_check_finds_nothing_new_in_a_converted_script(name, precision, ddp):
    path = str(SCRIPTS / f"{name}.py")
    assert faults(converted(name, precision=precision, accumulate=4, ddp=ddp).text, path) <= faults(original(name), path)


ENGINE = sorted(set(ALL) - {"choices"})
WINDOWED = ["phases", "plain", "reference", "several_losses", "validated", "with_helper"]
"""Scripts whose loop can be given accumulation."""


def assert_same_updates(before, result, folder, monkeypatch):
    assert result.left == []
    plain, plain_losses = updates(before, folder, monkeypatch)
    engine, engine_losses = updates(result.text, folder, monkeypatch)
    torch.testing.assert_close(engine, plain, rtol=1e-4, atol=1e-6)
    assert engine_losses == pytest.approx(plain_losses, rel=1e-4)


@pytest.mark.parametrize(("name", "accumulate"), [*((name, 1) for name in ENGINE), *((name, 4) for name in WINDOWED)])
def test_loop_on_the_engine_makes_the_same_updates(name, accumulate, tmp_path, monkeypatch):
    result = converted(name, precision="fp32", engine=True, accumulate=accumulate)
    by_hand = original(name) if accumulate == 1 else converted(name, precision="fp32", accumulate=accumulate).text
    assert_same_updates(by_hand, result, tmp_path, monkeypatch)


GUARDED = (
    original("choices")
    .replace("            norm = grad_norm(model)\n", "")
    .replace(
        """            if args.clip > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
""",
        """            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
""",
    )
)
GUARDED = GUARDED[: GUARDED.index("def grad_norm")] + GUARDED[GUARDED.index("def main") :].replace(
    "seen = pred", 'print("loss", norm.item())\n            seen = pred'
)
TAIL_AFTER_THE_LOOP = (
    original("accumulating")
    .replace(" or i + 1 == len(loader):", ":")
    .replace(
        """    print("loss", loss.item() * window)
""",
        """    if len(loader) % accumulation_steps != 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print("loss", loss.item() * window)
""",
    )
    .replace("max_norm=1.0", "1.0")
    .replace("            scheduler.step()\n", "")
)
SHAPES = {
    "a guard before backward, and the norm that the clip returns": GUARDED,
    "a tail that is stepped after the loop": TAIL_AFTER_THE_LOOP.replace(
        "            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""
    ).replace("        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),
    "a loss divided by its backward pass": original("accumulating")
    .replace(") / window\n", ")\n")
    .replace("loss.backward()", "(loss / window).backward()")
    .replace("loss.item() * window", "loss.item()"),
    "a loss divided in place": original("accumulating").replace(") / window\n", ")\n        loss /= window\n"),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_loop_of_another_shape_makes_the_same_updates_on_the_engine(shape, tmp_path, monkeypatch):
    text = SHAPES[shape]
    result = convert(text, "script.py", Wish(precision="fp32", engine=True), lambda text: faults(text, "script.py"))
    assert_same_updates(text, result, tmp_path, monkeypatch)


HUGGING_FACE = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from types import SimpleNamespace


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids).mean(1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def train_epoch(net, batches, optimizer, lr_scheduler, device, limit):
    right = 0
    for step, batch in enumerate(batches):
        batch = {k: v.to(device) for k, v in batch.items()}  # a dictionary
        outputs = net(**batch)
        loss = outputs.loss
        loss.backward()
        if limit > 0:
            nn.utils.clip_grad_norm_(net.parameters(), limit)
        for group in optimizer.param_groups:
            group["weight_decay"] *= 0.9
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        right += (outputs.logits.argmax(-1) == batch["labels"]).sum().item()
        print("loss", loss.item())
    return right / len(batches)


def main(max_norm=0.3):
    torch.manual_seed(3)
    rows = [{"input_ids": torch.randint(9, (6,)), "labels": torch.tensor(i % 3)} for i in range(30)]
    batches = DataLoader(rows, batch_size=6, shuffle=True)
    device = torch.device("cpu")
    model = Classifier()
    optimizer = torch.optim.AdamW(
        [{"params": [p for n, p in model.named_parameters() if "bias" not in n], "weight_decay": 0.1},
         {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0}], lr=0.02)
    model.to(device)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=10)
    for epoch in range(2):
        train_epoch(model, batches, optimizer, lr_scheduler, device, max_norm)
        print("loss", lr_scheduler.get_last_lr()[0])


main()
"""


def test_dictionaries_and_outputs_with_a_loss_run_in_a_window_made_where_the_optimizer_is(tmp_path, monkeypatch):
    result = convert(HUGGING_FACE, "script.py", Wish(precision="fp32", engine=True), lambda text: faults(text, "script.py"))
    made = result.text[result.text.index("    lr_scheduler = ") : result.text.index("    for epoch")]
    assert "engine = halfstep.Engine(" in made
    assert "clip_norm=max_norm if max_norm > 0 else None" in made
    assert "scheduler=lr_scheduler" in made
    assert_same_updates(HUGGING_FACE, result, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ENGINE)
def test_check_finds_nothing_new_in_a_script_on_the_engine(name):
    path = str(SCRIPTS / f"{name}.py")
    assert faults(converted(name, precision="fp32", engine=True, accumulate=1).text, path) <= faults(original(name), path)
