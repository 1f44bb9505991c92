"""Size, names, and who may do what: read from the source, so that a rule holds for files that nobody has written yet."""

from __future__ import annotations

import ast
from collections import Counter
from importlib import import_module
from statistics import median

import pytest

from architecture.source import ROOT, Source, sources

MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60
LONG_FILES: dict[str, str] = {
    "events/vocabulary.py": "one class an event: a list that is read by looking one up",
}
"""Files that may be longer, each with its reason."""
LONG_FUNCTIONS: dict[str, str] = {}
"""Functions that may be longer, each with its reason."""
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "misc", "base"}

ENVIRONMENT = ("os.environ", "os.getenv", "os.environb", "os.putenv", "environ", "getenv")
READS_THE_ENVIRONMENT = {
    "distributed/env.py": "the one place",
    "measure/cache_folder.py": "where the user's cache folder is, by the rules of the platform",
    "train/launch.py": "sets the threads of the processes that it starts",
}
NAMES_TORCHS_VERSION = {
    "_compat.py": "the one place that decides by it",
    "measure/rate_cache.py": "measured rates hold for one version: it is part of their key",
    "measure/calibrating.py": "a calibration holds for one version, and says for which",
    "cli/env.py": "`halfstep env` reports it",
    "train/folder.py": "a run's folder records it",
}
MAY_END_THE_PROCESS = {
    "__main__.py": "the command line's door for `python -m halfstep`",
    "bench/__main__.py": "the door for a trial's ranks: one that failed ends, so that the launcher ends the others",
    "record/termination.py": "a process that was sent SIGTERM dies of it, also where its main thread stands in a call",
}


def test_files_are_short() -> None:
    long = {source.name: lines for source in sources() if (lines := len(source.text.splitlines())) > MOST_LINES_OF_A_FILE}
    assert {name: lines for name, lines in long.items() if name not in LONG_FILES} == {}


def test_functions_are_short() -> None:
    long = {name: lines for source in sources() for name, lines in source.functions() if lines > MOST_LINES_OF_A_FUNCTION}
    assert {name: lines for name, lines in long.items() if name not in LONG_FUNCTIONS} == {}


def test_functions_are_short_as_a_rule() -> None:
    lengths = sorted(lines for source in sources() for _, lines in source.functions())
    assert median(lengths) <= 8
    assert lengths[len(lengths) * 9 // 10] <= 25


def test_exceptions_of_size_are_still_needed() -> None:
    lines = {source.name: len(source.text.splitlines()) for source in sources()}
    functions = dict(item for source in sources() for item in source.functions())
    assert [name for name in LONG_FILES if lines.get(name, 0) <= MOST_LINES_OF_A_FILE] == []
    assert [name for name in LONG_FUNCTIONS if functions.get(name, 0) <= MOST_LINES_OF_A_FUNCTION] == []


def test_no_package_or_module_has_a_name_that_says_nothing() -> None:
    named = {part.removesuffix(".py") for source in sources() for part in source.name.split("/")}
    assert named & FORBIDDEN_NAMES == set()


def test_every_module_says_what_it_is() -> None:
    assert [source.name for source in sources() if not ast.get_docstring(source.tree)] == []


def users_of(source: Source, *spellings: str) -> list[str]:
    return [f"{source.name}:{line}" for name, line in source.dotted() if name in spellings]


def test_only_cli_prints() -> None:
    found = [place for source in sources() if source.package != "cli" for place in calls(source, "print", "sys.stdout.write")]
    assert found == []


def test_only_cli_ends_the_process() -> None:
    enders = ("exit", "quit", "sys.exit", "os._exit", "os.abort", "SystemExit")
    others = [source for source in sources() if source.package != "cli" and source.name not in MAY_END_THE_PROCESS]
    assert [place for source in others for place in calls(source, *enders)] == []


def calls(source: Source, *functions: str) -> list[str]:
    """Where one of these is called, or raised."""
    found = []
    for node in ast.walk(source.tree):
        called = node.func if isinstance(node, ast.Call) else node.exc if isinstance(node, ast.Raise) else None
        if called is not None and ast.unparse(called) in functions:
            found.append(f"{source.name}:{called.lineno}")
    return found


def test_only_the_launchers_file_reads_the_environment() -> None:
    assert [p for s in sources() if s.name not in READS_THE_ENVIRONMENT for p in users_of(s, *ENVIRONMENT)] == []


def test_only_compat_asks_for_torchs_version() -> None:
    assert [p for s in sources() if s.name not in NAMES_TORCHS_VERSION for p in users_of(s, "torch.__version__")] == []


def test_exceptions_of_habit_are_still_needed() -> None:
    by_name = {source.name: source for source in sources()}
    reads = [name for name in READS_THE_ENVIRONMENT if users_of(by_name[name], *ENVIRONMENT)]
    versions = [name for name in NAMES_TORCHS_VERSION if users_of(by_name[name], "torch.__version__")]
    assert (reads, versions) == (list(READS_THE_ENVIRONMENT), list(NAMES_TORCHS_VERSION))


def test_only_compat_decides_by_torchs_version() -> None:
    """The others report it: none compares."""
    compared = [
        f"{source.name}:{node.lineno}"
        for source in sources()
        if source.name != "_compat.py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Compare) and "__version__" in ast.unparse(node)
    ]
    assert compared == []


def test_no_state_changes_at_module_level() -> None:
    """No `global`: what changes lives in an object."""
    found = [f"{s.name}:{n.lineno}" for s in sources() for n in ast.walk(s.tree) if isinstance(n, ast.Global)]
    assert found == []


PACKAGES = {f"halfstep.{source.package}" for source in sources() if source.path.name == "__init__.py" and source.package}


@pytest.mark.parametrize("package", sorted({"halfstep", *PACKAGES}))
def test_exported_names_exist_and_say_what_they_are(package: str) -> None:
    module = import_module(package)
    exported = [name for name in getattr(module, "__all__", []) if not name.startswith("__")]
    for name in exported:
        value = getattr(module, name)
        if callable(value):
            said = value.__doc__ or f"{name}("
            assert not said.startswith(f"{name}("), f"{package}.{name} has no docstring of its own"


def test_test_files_have_names_of_their_own() -> None:
    """Without packages two test files of one name hide each other."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
