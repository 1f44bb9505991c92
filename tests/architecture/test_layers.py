"""Imports point down the table of layers; below the torch line nothing imports torch; a command starts without it."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from architecture.source import PACKAGE, Source, sources

TABLE = Path(__file__).with_name("layers.txt").read_text().splitlines()
LINE = next(number for number, row in enumerate(TABLE) if row.startswith("---"))
LAYERS = [row.split() for row in TABLE if not row.startswith("---")]
LAYER = {package: number for number, row in enumerate(LAYERS) for package in row}
BELOW_THE_LINE = [package for number, row in enumerate(TABLE) if number > LINE for package in row.split()]
STRANGERS = [("precision", "distributed"), ("rules", "imagine")]
"""Pairs that must not know each other, whichever way: the engine joins the first, a trace the second."""
BEFORE_TORCH = ["torch", "numpy", "transformers", "safetensors", "rich", "pydantic"]


@cache
def edges() -> dict[tuple[str, str], str]:
    """Every import of one package by another, with one place where it is."""
    found: dict[tuple[str, str], str] = {}
    for source in sources():
        for module, line in source.imports():
            parts = module.split(".")
            if parts[0] == "halfstep" and len(parts) > 1 and source.package not in (None, parts[1]):
                found.setdefault((str(source.package), parts[1]), f"{source.name}:{line}")
    return found


def test_every_package_is_in_the_table() -> None:
    assert {source.package for source in sources()} - {None} <= LAYER.keys()


def test_imports_point_down_or_stay_in_their_layer() -> None:
    up = {f"{a} -> {b}": place for (a, b), place in edges().items() if b in LAYER and LAYER[b] < LAYER[a]}
    assert up == {}


def test_no_two_packages_import_each_other_by_any_way_round() -> None:
    graph: dict[str, set[str]] = {package: set() for package in LAYER}
    for a, b in edges():
        if b in LAYER:
            graph[a].add(b)
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(("a", "b"), STRANGERS)
def test_strangers_do_not_know_each_other(a: str, b: str) -> None:
    assert {edge: place for edge, place in edges().items() if set(edge) == {a, b}} == {}


def test_what_is_imported_of_halfstep_exists() -> None:
    packages = {path.stem if path.suffix == ".py" else path.name for path in PACKAGE.iterdir()}
    assert {b for _, b in edges()} - packages - {"__version__"} == set()


@pytest.mark.parametrize("package", BELOW_THE_LINE)
def test_below_the_torch_line_no_file_imports_torch(package: str) -> None:
    assert [place for source in sources() if source.package == package for place in torch_imports(source)] == []


def torch_imports(source: Source) -> list[str]:
    heavy = ("torch", "transformers", "safetensors", "peft", "datasets")
    above = {f"halfstep.{name}" for name, layer in LAYER.items() if name not in BELOW_THE_LINE}
    return [
        f"{source.name}:{line} imports {module}"
        for module, line in source.imports()
        if module.split(".")[0] in heavy or ".".join(module.split(".")[:2]) in above
    ]


def loaded_after(code: str) -> set[str]:
    """Which of the heavy modules a fresh process has loaded after `code`."""
    asked = f"{code}\nimport sys; print([name for name in {BEFORE_TORCH!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(eval(done.stdout.splitlines()[-1]))


def test_importing_halfstep_loads_nothing_heavy() -> None:
    assert loaded_after("import halfstep; halfstep.__version__") == set()


HELP = """
from halfstep.cli.main import main
try:
    main({words!r})
except SystemExit as end:
    assert end.code == 0
"""


@pytest.mark.parametrize("words", ["--help", "--version", "train --help", "check --help", "env --help"])
def test_help_does_not_import_torch(words: str) -> None:
    assert "torch" not in loaded_after(HELP.format(words=words.split()))


def test_importing_everything_below_the_line_loads_no_torch() -> None:
    modules = [
        ".".join(source.path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for source in sources()
        if source.package in BELOW_THE_LINE and source.path.name != "__init__.py"
    ]
    assert modules
    assert "torch" not in loaded_after("import importlib\n" + "\n".join(f"importlib.import_module({m!r})" for m in modules))


def test_the_engine_is_loaded_when_it_is_first_asked_for() -> None:
    assert "torch" in loaded_after("import halfstep; halfstep.Engine")
