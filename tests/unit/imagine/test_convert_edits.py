"""What the edits look like, and what is left alone with which words."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

from halfstep.imagine.converting.conversion import convert
from halfstep.imagine.converting.outcome import Wish

SCRIPTS = Path(__file__).parent / "test_convert_scripts"
HEAD = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = DataLoader(data, batch_size=4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


STREAM = """\


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from zip(torch.randn(32, 4), torch.randn(32, 1))


data = Stream()
"""


def change(loop, head=HEAD, judge=lambda _: frozenset(), **wish):
    return convert(head + textwrap.dedent(loop), "script.py", Wish(**{"precision": "bf16", **wish}), judge)


def after(result, line):
    """The loop of the result: everything from a line on."""
    return result.text[result.text.index(line) :]


PLAIN = """
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
"""


def test_plain_loop_in_bf16_gets_one_with_block():
    assert after(change(PLAIN), "for epoch") == textwrap.dedent(
        """\
        for epoch in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
        """
    )


@pytest.mark.parametrize(
    ("target", "numbered"), [("(x,), (y,)", "((x,), (y,))"), ("(x, y)", "(x, y)"), ("x, y", "(x, y)"), ("[x, y]", "[x, y]")]
)
def test_turns_are_numbered_whatever_a_batch_is_taken_apart_into(target, numbered):
    result = change(PLAIN.replace("for x, y in", f"for {target} in"), precision="fp32", accumulate=4)
    assert f"for i, {numbered} in enumerate(loader):" in result.text


def test_updates_run_over_a_loader_that_is_made_in_the_head_of_the_loop():
    result = change(PLAIN.replace("in loader", "in DataLoader(data, batch_size=4)"), engine=True)
    assert "for update in engine.updates(DataLoader(data, batch_size=4)):" in result.text


def test_what_needs_tensors_of_one_type_is_pointed_at():
    loop = PLAIN.replace(
        "loss = nn", "model.weight.data.new_zeros(4, 1).index_add_(0, y.long()[:, 0], model(x))\n        loss = nn"
    )
    assert change(loop).done[-1] == (
        "look at line 13 of the original: `index_add_` needs both tensors of one type, and autocast may have cast what is "
        "written: if so, `.to` the type of the other"
    )
    assert (
        len(change(PLAIN.replace("loss = nn", "hot = torch.zeros(4, 9).scatter_(1, y.long(), 1)\n        loss = nn")).done) == 2
    )


def test_accumulation_and_scaler_together_read_as_one_would_write_them():
    result = change(PLAIN, precision="fp16", accumulate=4)
    assert result.left == []
    assert after(result, "for epoch") == textwrap.dedent(
        """\
        for epoch in range(2):
            for i, (x, y) in enumerate(loader):
                window_start = i - i % ACCUMULATION_STEPS
                window_size = min(ACCUMULATION_STEPS, len(loader) - window_start)
                is_last = i + 1 == window_start + window_size
                if i == window_start:
                    optimizer.zero_grad()
                with torch.autocast(device_type="cpu", dtype=torch.float16):
                    loss = nn.functional.mse_loss(model(x), y)
                scaler.scale(loss / window_size).backward()
                if is_last:
                    scaler.step(optimizer)
                    scaler.update()
        """
    )


def test_no_sync_is_around_forward_and_backward_of_all_but_the_last_micro_batch():
    assert after(change(PLAIN, precision="fp32", accumulate=4, ddp=True), "        if i ==") == textwrap.dedent(
        """\
                if i == window_start:
                    optimizer.zero_grad()
                with nullcontext() if is_last else ddp_model.no_sync():
                    loss = nn.functional.mse_loss(ddp_model(x), y)
                    (loss / window_size).backward()
                if is_last:
                    optimizer.step()
        dist.destroy_process_group()
        """
    )


@pytest.mark.parametrize(
    ("head", "device"),
    [(HEAD, '"cpu"'), (HEAD + "device = None\n", "next(ddp_model.parameters()).device.type")],
    ids=["nothing moves", "the model says"],
)
def test_scaler_on_several_ranks_reads_its_device_from_what_is_made_by_then(head, device):
    text = change(PLAIN, head=head, precision="fp16", ddp=True).text
    made = text.index(f"scaler = torch.amp.GradScaler({device})\n")
    assert "ddp_model" not in device or text.index("ddp_model = Dist") < made


@pytest.mark.parametrize("name", sorted(p.stem for p in SCRIPTS.glob("*.py") if p.stem != "helper_module"))
def test_every_line_that_no_edit_names_is_kept_with_its_comment(name):
    path = SCRIPTS / f"{name}.py"
    result = convert(path.read_text(), str(path), Wish(precision="fp16", accumulate=4, ddp=True), lambda _: frozenset())
    old, new = ([line.strip() for line in text.splitlines() if line.strip()] for text in (path.read_text(), result.text))
    kept = iter(new)
    gone = [line for line in old if line not in new]
    assert all(any(line == other for other in kept) for line in old if line not in gone)  # in the same order
    assert all(re.search(r"backward|step|numpy|for |loader|Loader|def |model|save|load|epoch", line) for line in gone)
    assert [c for line in old if (c := line.partition("#")[2])] == [
        c for line in new if (c := line.partition("#")[2]) and "was not skipped" not in c
    ]


def test_enumeration_from_one_counts_windows_from_one():
    result = change(
        PLAIN.replace("for x, y in loader", "for n, (x, y) in enumerate(loader, start=1)"), precision="fp32", accumulate=2
    )
    assert "window_start = (n - 1) - (n - 1) % ACCUMULATION_STEPS" in result.text
    assert "if (n - 1) == window_start:" in result.text


def test_argument_goes_on_a_line_of_its_own_and_behind_parentheses():
    loop = "\n\ndef train(model, optimizer):\n" + textwrap.indent(PLAIN, "    ")
    for call, wanted in (
        ("train(\n    model,\n    (optimizer),\n)\n", "train(\n    model,\n    (optimizer),\n    scaler=scaler,\n)\n"),
        ("train(model, (optimizer))\n", "train(model, (optimizer), scaler=scaler)\n"),
    ):
        assert change(loop + call, precision="fp16").text.endswith(wanted)


def test_sum_of_losses_is_not_divided():
    loop = PLAIN.replace("mse_loss(model(x), y)", 'mse_loss(model(x), y, reduction="sum")')
    assert "        loss.backward()\n" in change(loop, precision="fp32", accumulate=4).text


def test_output_that_goes_to_numpy_is_made_fp32_again():
    loop = PLAIN.replace(
        "        loss = nn.functional.mse_loss(model(x), y)\n",
        "        out = model(x)\n        loss = nn.functional.mse_loss(out, y)\n        seen = out.detach().numpy()\n",
    )
    assert "seen = out.detach().float().numpy()" in change(loop).text


def test_pass_that_would_bring_a_fault_is_taken_back():
    result = change(PLAIN, judge=lambda text: frozenset({"some-rule: a fault"} if "autocast" in text else ()))
    assert result.left == ["precision: it would bring a fault: some-rule: a fault"]
    assert result.text == HEAD + PLAIN


ACCUMULATING = """
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.mse_loss(model(x), y) / 4
        loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
"""
GAN = PLAIN + "        other = torch.optim.SGD(model.parameters(), lr=0.1)\n        other.step()\n"
LEFT = {
    "no loop": ("x = 1\n", {}, "no training loop was heard in it: nothing calls `backward` and then an optimizer's `step`"),
    "autocast": (
        PLAIN.replace("        loss = ", '        with torch.autocast("cpu", dtype=torch.bfloat16):\n            loss = '),
        {},
        "precision: the loop has autocast or a loss scaler already",
    ),
    "several optimizers": (
        GAN,
        {},
        "2 optimizers step in it: which losses and scales belong to which is for its author to say",
    ),
    "closure": (
        """
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(data[:][0]), data[:][1])
            loss.backward()
            return loss

        for epoch in range(4):
            optimizer.step(closure)
        """,
        {},
        "the optimizer takes a closure, which may run forward and backward several times in a step",
    ),
    "custom backward": (
        "class Round(torch.autograd.Function):\n    pass\n" + PLAIN,
        {},
        "line 9: `Round` has a backward pass of its own, whose precision is for its author to choose",
    ),
    "probabilities": (
        PLAIN.replace("mse_loss(model(x), y)", "binary_cross_entropy(torch.sigmoid(model(x)), y)"),
        {},
        "precision: line 13: `binary_cross_entropy` takes probabilities, which autocast refuses on a GPU: give "
        "`BCEWithLogitsLoss` what comes before the sigmoid, then convert",
    ),
    "half parameters": (
        PLAIN.replace("\nfor epoch", "\nmodel.half()\nfor epoch"),
        {},
        "precision: the parameters themselves are in half precision: keep them in FP32, autocast casts what it multiplies",
    ),
    "one line": (
        PLAIN.replace("        loss.backward()\n        optimizer.step()", "        loss.backward(); optimizer.step()"),
        {"precision": "fp16"},
        "precision: line 14: several statements stand on one line",
    ),
    "masked labels": (
        PLAIN.replace("mse_loss(model(x), y)", "cross_entropy(model(x), y, ignore_index=-100)"),
        {"precision": "fp32", "accumulate": 4},
        "accumulation: line 14: the loss is a mean over the labels that are not ignored, and micro-batches hold different "
        "numbers of them, so a mean of means would be another loss; with `halfstep.Engine` return their sum and their number",
    ),
    "loader in the head": (
        PLAIN.replace("in loader", "in DataLoader(data, batch_size=4)"),
        {"precision": "fp32", "accumulate": 4},
        "accumulation: line 11: the loader is made in the head of the loop: give it a name before it, then convert",
    ),
    "norm within an expression": (
        PLAIN.replace("        optimizer.step()\n", "        print(nn.utils.clip_grad_norm_(model.parameters(), 1.0))\n")
        + "        optimizer.step()\n",
        {"engine": True},
        "engine: line 15: what the clip returns is used in a way that cannot be followed",
    ),
    "parameters of two models": (
        PLAIN.replace("model(x)", "last(model(x))").replace(
            "\nfor epoch",
            "\nlast = nn.Linear(1, 1)\nparams = [*model.parameters(), *last.parameters()]\n"
            "optimizer = torch.optim.SGD(params, lr=0.1)\nfor epoch",
        ),
        {"engine": True},
        "engine: line 16: 2 models are called, and which of them the optimizer holds cannot be seen",
    ),
    "a stream": (
        PLAIN,
        {
            "precision": "fp32",
            "accumulate": 4,
            "head": HEAD.replace("data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))", STREAM),
        },
        "accumulation: line 19: the batches come from a stream, whose length nobody knows when an epoch begins",
    ),
    "skipped batches": (
        PLAIN.replace(
            "        optimizer.zero_grad()\n", "        if x.sum() > 9:\n            continue\n        optimizer.zero_grad()\n"
        ),
        {"precision": "fp32", "accumulate": 4},
        "accumulation: line 13: `continue` would leave a window unfinished",
    ),
    "norm read for every batch": (
        PLAIN.replace("        optimizer.step()\n", "        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n")
        + "        optimizer.step()\n        x = print(norm)\n        y = norm\n",
        {"precision": "fp32", "accumulate": 4},
        "accumulation: line 17: `norm` is made at the end of a window and read for every batch",
    ),
    "ranks": (
        PLAIN.replace("\nfor epoch", "\nmodel = nn.parallel.DistributedDataParallel(model)\nfor epoch"),
        {"precision": "fp32", "ddp": True},
        "ranks: the program knows of ranks already",
    ),
    "gradients read": (
        PLAIN.replace("loss.backward()\n", "loss.backward()\n        print(model.weight.grad.norm().item())\n"),
        {"engine": True},
        "engine: line 15: gradients are read or written, which the engine holds under its own scale; their norm is in its "
        "updates, as `update.grad_norm`",
    ),
    "losses added up": (
        ACCUMULATING.replace(" / 4", ""),
        {"engine": True},
        "engine: line 13: the losses of an update are not divided by their number in one place of this file, and an engine takes "
        "their mean",
    ),
    "windows over several calls": (
        """
        def one(x, y, i):
            (nn.functional.mse_loss(model(x), y) / 4).backward()
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

        for i, (x, y) in enumerate(loader):
            one(x, y, i)
        """,
        {"engine": True},
        "engine: line 13: the micro-batches of an update come from several calls of the function that trains",
    ),
    "gradients of a tail cleared": (
        ACCUMULATING.replace("for epoch in range(2):\n", "for epoch in range(2):\n    optimizer.zero_grad()\n")
        .replace("% 4 == 3", "% 3 == 2")
        .replace("/ 4", "/ 3"),
        {"engine": True},
        "engine: line 11: gradients that no step has used are cleared, which a window does not do",
    ),
    "norm read before the step": (
        PLAIN.replace(
            "        optimizer.step()\n",
            "        n = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        print(n, y)\n        optimizer.step()\n",
        ),
        {"engine": True},
        "engine: line 16: `n` is read before the step, and an engine knows it after",
    ),
    "norm read as a tensor": (
        PLAIN.replace("        optimizer.step()\n", "        n = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n")
        + "        optimizer.step()\n        print(n.cpu(), y)\n",
        {"engine": True},
        "engine: line 17: `n` is read as a tensor, and an engine gives a number",
    ),
    "gradients cleared before a step": (
        PLAIN.replace(
            "        optimizer.step()\n",
            "        if y.sum() > 9:\n            optimizer.zero_grad()\n            continue\n        optimizer.step()\n",
        ),
        {"engine": True},
        "engine: line 16: gradients that no step has used are cleared, which a window does not do",
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_understood_is_left_with_its_reason(case):
    loop, wish, reason = LEFT[case]
    result = change(loop, **wish)
    assert result.left == [reason]
    assert result.text == wish.get("head", HEAD) + textwrap.dedent(loop)


def test_text_that_is_not_python_is_left():
    result = convert("def (:\n", "script.py", Wish(), lambda _: frozenset())
    assert result.left == ["the file is not Python that can be read"]


@pytest.mark.parametrize("unit", ["  ", "\t", "   "])
def test_indentation_of_the_file_is_used(unit):
    text = (HEAD + PLAIN).replace("    ", unit)
    result = convert(text, "script.py", Wish(precision="fp16", accumulate=2), lambda _: frozenset())
    ast.parse(result.text)
    assert f"\n{unit * 2}with torch.autocast(" in result.text
    assert f"\n{unit * 3}loss = " in result.text


def test_names_that_the_file_uses_are_not_taken():
    result = change(PLAIN.replace("\nfor epoch", "\nscaler = None\nfor epoch"), precision="fp16")
    assert "grad_scaler.scale(loss).backward()" in result.text
    assert "scaler = None" in result.text


@pytest.mark.parametrize("name", ["choices", "nano", "phases", "plain", "reference", "trainer", "validated"])
def test_scripts_with_a_line_missing_are_converted_to_python_or_left(name):
    path = SCRIPTS / f"{name}.py"
    lines = path.read_text().splitlines(keepends=True)
    for missing in range(7, len(lines), max(11, len(lines) // 3)):
        text = "".join(lines[:missing] + lines[missing + 1 :])
        result = convert(text, str(path), Wish(precision="fp16", accumulate=3, ddp=True), lambda _: frozenset())
        if result.text != text:
            ast.parse(result.text)
