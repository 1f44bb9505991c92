"""A script converted to several ranks, run by torchrun on two, is the original on batches of twice the size."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from halfstep.imagine.converting.conversion import convert
from halfstep.imagine.converting.outcome import Wish

SCRIPTS = Path(__file__).parent / "test_convert_scripts"
RUNNER = """
import os, sys, torch
from torch.optim.optimizer import register_optimizer_step_post_hook
heard = []
def after(optimizer, args, kwargs):
    heard.append(torch.cat([p.detach().flatten().clone() for g in optimizer.param_groups for p in g["params"]]))
register_optimizer_step_post_hook(after)
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), {"__name__": "__main__"})
torch.save(torch.stack(heard), f"updates{os.environ.get('RANK', '')}.pt")
"""


def run(text, folder, ranks):
    (folder / "script.py").write_text(text)
    (folder / "runner.py").write_text(RUNNER)
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    words = [sys.executable, *launch, "runner.py", "script.py"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"updates{r}.pt") for r in (range(ranks) if ranks else [""])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "small", "large", "accumulate"),
    [
        ("phases", "batch_size=8", "batch_size=16", 1),
        ("trainer", "batch_size=8", "batch_size=16", 1),
        ("validated", "batch_size=8", "batch_size=32", 2),
    ],
)
def test_two_ranks_are_one_with_batches_of_twice_the_size(name, small, large, accumulate, tmp_path):
    text = (
        (SCRIPTS / f"{name}.py").read_text().replace("shuffle=True", "shuffle=False").replace("drop_last=True", "drop_last=False")
    )
    result = convert(text, "script.py", Wish(precision="fp32", ddp=True, accumulate=accumulate), lambda _: frozenset())
    assert result.left == []
    assert ("no_sync" in result.text) == (accumulate > 1)
    # the sampler deals samples out one by one: batch k of both ranks together is batch k of the large loader
    (whole,) = run(text.replace(small, large), tmp_path, 0)
    first, second = run(result.text, tmp_path, 2)
    assert torch.equal(first, second)
    short = min(len(first), len(whole))
    torch.testing.assert_close(first[:short], whole[:short], rtol=1e-4, atol=1e-6)
    assert len(first) == len(whole)
