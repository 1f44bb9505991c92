"""`halfstep watch` writes a page, saves a bad batch and runs it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.cli.main import main

BAD = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x).log())


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for update in range(6):
    optimizer.zero_grad()
    loss = model(torch.rand(8, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
print("trained")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(BAD)
    return path


def test_a_bad_batch_is_saved_told_on_a_page_and_found_again(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--html", "out/page.html", "--profile", "train.py"]) == 1
    told = capsys.readouterr()
    assert "the forward of the model (`log`) is the first value that is not finite" in told.out
    assert "\nLoss                           !!!!!! " in told.out
    assert told.err.endswith("halfstep watch: the report is out/page.html\n")
    page = Path("out/page.html").read_text()
    assert "<h1>train.py</h1>" in page
    assert "return self.head(self.body(x).log())" in page
    assert "Time per phase" in page

    assert main(["watch", "--replay", "halfstep-watch/update-0-rank-0.pt"]) == 1
    told = capsys.readouterr()
    first = "the forward of the model (`log`) is the first value that is not finite: `log` is not finite in FP32 either"
    assert told.out == f"Run again, {first}.\nWhen it was saved, {first}.\n"

    script.write_text(BAD.replace(".log()", ""))
    assert main(["watch", "--replay", "halfstep-watch/update-0-rank-0.pt", "train.py"]) == 0
    assert "nothing that is not finite was found: run again, its forwards and backwards are finite" in capsys.readouterr().out


def test_a_replay_of_no_file_is_refused(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", "--replay", "none.pt"]) == 2
    assert capsys.readouterr().err == "halfstep: none.pt cannot be read: No such file or directory.\n"
