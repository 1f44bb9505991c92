"""What loops run over, and how long what they run over is."""

import ast

import pytest

from halfstep.events.trace import Trace
from halfstep.events.vocabulary import Backward, EpochBegin, Fetch, Step
from halfstep.imagine.story import tell

HEAD = """
import itertools
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset, WeightedRandomSampler, random_split
from tqdm import tqdm
net = torch.nn.Linear(1, 1)
"""
ROWS = """
class Rows(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        return torch.ones(1)
"""
BODY = "net(x).mean().backward()"


def _heard(text: str) -> Trace:
    return next(t for t in tell(ast.parse(HEAD + text), "t.py").traces if t.has(Backward))


def _batches(loop: str) -> int:
    return sum(1 for _ in _heard(f"{loop}: {BODY}\n").of(Backward))


@pytest.mark.parametrize(
    "loop",
    [
        "for x in tqdm(loader)",
        "for i, x in tqdm(enumerate(loader), total=len(loader))",
        "for i, x in enumerate(tqdm(loader))",
        "for x in progress(loader)",
        "for x in itertools.islice(loader, 9)",
    ],
)
def test_a_wrapped_loader_is_heard_as_the_loader(loop: str) -> None:
    trace = _heard(f"for epoch in range(1):\n    {loop}: {BODY}\n")
    assert len(list(trace.of(Fetch))) == 9
    assert [begin.loader.kind for begin in trace.of(EpochBegin)] == ["loader"]


@pytest.mark.parametrize(
    ("loader", "batches"),
    [
        ("DataLoader(TensorDataset(torch.randn(50, 1)), batch_size=8)", 7),
        ("DataLoader(TensorDataset(torch.randn(50, 1)), batch_size=8, drop_last=True)", 6),
        ("DataLoader(Subset(data, range(12)), 4)", 3),
        ("DataLoader(random_split(data, [0.5, 0.5])[0], batch_size=4)", 5),
        ("DataLoader(TensorDataset(torch.randn(40, 1)), batch_size=4, sampler=DistributedSampler(data))", 5),
        ("DataLoader(TensorDataset(torch.randn(200, 1)), batch_size=1)", 24 + 200 % 24),
        ("DataLoader(TensorDataset(torch.randn(50, 1)), batch_size=args.batch_size)", 9),
        ("DataLoader(data, batch_size=4, sampler=WeightedRandomSampler(w, 7))", 2),
        ("DataLoader(data, batch_size=4, sampler=WeightedRandomSampler(w, unknown))", 9),
        ("DataLoader(unknown, batch_size=8)", 9),
    ],
)
def test_a_loader_is_as_long_as_the_program_says(loader: str, batches: int) -> None:
    data = "data = TensorDataset(torch.randn(40, 1))\n"
    assert _batches(f"{data}for x in {loader}") == batches


def test_a_data_set_of_the_program_says_its_length() -> None:
    assert _batches(f"{ROWS}for x in DataLoader(Rows(), batch_size=6)") == 4


def test_a_cycle_never_ends_an_epoch() -> None:
    trace = _heard(f"for x in itertools.cycle(loader):\n    {BODY}\n")
    assert list(trace.of(EpochBegin)) == []
    assert len(list(trace.of(Backward))) == 18


def test_a_window_that_the_program_does_not_say_has_four_micro_batches() -> None:
    trace = _heard(
        "def train(net, loader, k):\n"
        "    opt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "    for i, x in enumerate(loader):\n"
        f"        {BODY}\n"
        "        if (i + 1) % k == 0:\n"
        "            opt.step()\n"
    )
    assert [step.loops[-1].index for step in trace.of(Step)] == [3, 7]


def test_long_loaders_keep_the_phase_of_a_window_of_five() -> None:
    data = "loader = DataLoader(TensorDataset(torch.randn(100, 1)), batch_size=1)\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
    trace = _heard(f"{data}for i, x in enumerate(loader):\n    {BODY}\n    if (i + 1) % 5 == 0: opt.step()\n")
    assert len(list(trace.of(Backward))) % 5 == 0
