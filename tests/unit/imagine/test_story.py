import ast

from halfstep.events.trace import Trace
from halfstep.events.vocabulary import Backward, Clip, EpochBegin, Fetch, Step, ZeroGrad
from halfstep.imagine.story import tell

LOOP = """
import torch
from torch import nn


def train(model, loader, accumulate=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for i, (x, y) in enumerate(loader):
            (nn.functional.mse_loss(model(x), y) / accumulate).backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
"""


def _only(text: str) -> Trace:
    (trace,) = (t for t in tell(ast.parse(text), "t.py").traces if t.has(Backward))
    return trace


def test_two_epochs_of_nine_micro_batches_with_two_full_windows_and_a_tail_are_heard() -> None:
    trace = _only(LOOP)
    assert len(list(trace.of(EpochBegin))) == 2
    assert len(list(trace.of(Fetch))) == len(list(trace.of(Backward))) == 18
    assert [step.loops[-1].index for step in trace.of(Step)] == [3, 7, 8, 3, 7, 8]


def test_division_of_the_loss_is_heard_with_its_value() -> None:
    assert {d.value for b in _only(LOOP).of(Backward) for d in b.divisors} == {4.0}


def test_loss_reaches_the_optimizer_of_its_model_only() -> None:
    trace = _only(
        "import torch\n"
        "a, b = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)\n"
        "oa, ob = torch.optim.SGD(a.parameters(), 0.1), torch.optim.SGD(b.parameters(), 0.1)\n"
        "b(torch.randn(1)).mean().backward()\n"
    )
    assert [[o.name for o in backward.optimizers] for backward in trace.of(Backward)] == [["ob"]]


def test_context_manager_of_the_program_surrounds_what_is_inside() -> None:
    trace = _only(
        "import torch\n"
        "from contextlib import contextmanager\n"
        "@contextmanager\n"
        "def low():\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n"
        "        yield\n"
        "net = torch.nn.Linear(1, 1)\n"
        "with low():\n"
        "    loss = net(torch.randn(1)).mean()\n"
        "loss.backward()\n"
    )
    (backward,) = trace.of(Backward)
    assert backward.region is None
    assert [region.dtype for region in backward.forward_regions] == ["float16"]


def test_generator_of_the_program_drives_its_loop() -> None:
    trace = _only(
        "import torch\n"
        "net = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "def batches(n):\n"
        "    for _ in range(n):\n"
        "        yield torch.randn(1)\n"
        "for x in batches(3):\n"
        "    net(x).mean().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    assert [type(e) for e in trace.of(Backward, Step, ZeroGrad)] == [Backward, Step, ZeroGrad] * 3


def test_unknown_flag_opens_two_worlds_with_one_answer_each() -> None:
    story = tell(
        ast.parse(
            "import torch\n"
            "def train(model, loader, clip=False):\n"
            "    optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
            "    for x in loader:\n"
            "        model(x).mean().backward()\n"
            "        if clip:\n"
            "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "        optimizer.step()\n"
        ),
        "t.py",
    )
    heard = {t.decisions[0].answer: len(list(t.of(Clip))) for t in story.traces if t.has(Backward)}
    assert heard == {False: 0, True: 9}


def test_program_that_raises_on_its_path_is_not_heard() -> None:
    story = tell(ast.parse("import torch\nraise SystemExit\ntorch.randn(1).backward()"), "t.py")
    assert [t for t in story.traces if t.root == ""] == []
