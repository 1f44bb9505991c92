"""Programs that a script starts: a script or module for this same Python is run under watch, once it imports torch.

Imports no torch itself: a program that does not train costs nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from halfstep.record.running import run

ASKED = "asked"
"""The file in the folder of the run that says what the probes are asked to do."""
LIBRARY = re.compile(r"[/\\](site-packages|dist-packages)[/\\]|[/\\]lib[/\\]python3[^/\\]*[/\\]|^<")
"""The paths of installed code."""
_PLAIN_OPTION = re.compile(r"-[bBdEOqRsuv]+|-[WX].+")
_BEGIN = "import sys; sys.path[0] = {root!r}; from halfstep.record.programs import main; sys.exit(main(sys.argv[1:]))"


def followed(args: Any, folder: Path) -> list[str] | None:
    """The command that runs the same under watch; None for what is no script or module for this Python."""
    words = list(_words(args))
    found = shutil.which(words[0]) if words else None
    if found is None:
        return None
    if not _is_this_python(found):
        if not _begins_with_this_python(Path(found)):
            return None
        words = [sys.executable, found, *words[1:]]
    options, rest = _split(words[1:])
    if not rest or (rest[0] != "-m" and (LIBRARY.search(os.path.abspath(rest[0])) or not Path(rest[0]).is_file())):
        return None
    root = str(Path(__file__).parents[2])
    return [words[0], *options, "-c", _BEGIN.format(root=root), str(folder), *rest]


def script_in(args: Any) -> str:
    """The user's own Python script in a command; empty where there is none."""
    words = [] if isinstance(args, (str, bytes)) else list(_words(args))
    return next((word for word in words if word.endswith(".py") and not LIBRARY.search(os.path.abspath(word))), "")


def _words(args: Any) -> Iterator[str]:
    """The words of a command; none where it is a line for a shell, or holds bytes."""
    if isinstance(args, (list, tuple)) and all(isinstance(word, (str, os.PathLike)) for word in args):
        yield from map(str, args)


def _is_this_python(path: str) -> bool:
    here = os.path.abspath(sys.executable)
    return os.path.dirname(os.path.abspath(path)) == os.path.dirname(here) and os.path.samefile(path, here)


def _begins_with_this_python(path: Path) -> bool:
    """Whether it is a script that this Python was installed for, such as `torchrun`."""
    with path.open("rb") as file:
        first = file.readline(1024)
    return first.startswith(b"#!") and first[2:].strip() == os.fsencode(sys.executable)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Python's own options, and the script, or `-m` and the module, with its arguments; nothing where it is neither."""
    for at, word in enumerate(words):
        if word in ("-W", "-X") or (at and words[at - 1] in ("-W", "-X")):
            continue
        if word == "-m" or not word.startswith("-"):
            return words[:at], words[at:]
        if not _PLAIN_OPTION.fullmatch(word):
            break
    return [], []


class _AfterTorch(MetaPathFinder):
    """Calls once torch has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find torch as Python would, and wrap what runs it."""
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main(words: list[str]) -> int:
    """Run a program whose command was changed by `followed`: its folder, then the script or module with its arguments."""
    folder, rest = Path(words[0]), words[1:]
    begun: list[Any] = []

    def begin() -> None:
        from halfstep.record.processes import joined

        if folder.is_dir():
            begun.append(joined(folder))

    sys.meta_path.insert(0, _AfterTorch(begin))
    is_module = rest[0] == "-m"
    target, args = (rest[1], rest[2:]) if is_module else (rest[0], rest[1:])
    ending = run(target, args, module=is_module)
    for process in begun:
        process.end(ending)
    sys.stderr.write(ending.said)
    return 0 if ending.replayed else ending.code
