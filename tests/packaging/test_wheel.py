"""The wheel that users get."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of an empty environment into which pip installed the wheel and what it asks for, and nothing else."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(place), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    venv.create(place / "env", with_pip=True)
    python = place / "env" / "bin" / "python"
    [wheel] = place.glob("halfstep-*.whl")
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), wheel]
    subprocess.run(install, check=True, capture_output=True, timeout=900)
    return python


def test_wheel_holds_the_type_marker(installed):
    code = "import halfstep, pathlib; print((pathlib.Path(halfstep.__file__).parent / 'py.typed').exists(), halfstep.__file__)"
    exists, place = subprocess.check_output([installed, "-c", code], text=True, cwd="/").split()
    assert exists == "True"
    assert "site-packages" in place


def test_wheel_trains(installed):
    code = """
import torch
from halfstep import Engine
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = Engine(model, optimizer, loss=lambda model, x: model(x).square().mean(), precision="fp32")
print([update.applied for update in engine.updates([torch.ones(3, 2)] * 2)])
"""
    assert subprocess.check_output([installed, "-c", code], text=True, cwd="/").strip() == "[True, True]"


def test_wheel_brings_the_command(installed):
    command = Path(installed).parent / "halfstep"
    assert subprocess.check_output([command, "--version"], text=True, cwd="/").startswith("halfstep 0.")
