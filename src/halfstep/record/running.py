"""Runs a script or a module as Python itself would, in this process."""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from halfstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Ending:
    """How a script ended: its exit code, and in words what ended it early."""

    code: int = 0
    words: str = ""
    said: str = ""
    """What Python would have written to standard error."""
    replayed: str = ""
    """What came of the saved batch that was run again instead of the training."""


class Replayed(BaseException):
    """A saved batch was run again, which ends the script. Not an error, and no `except Exception` may stop it."""

    def __init__(self, words: str, *, reproduced: bool) -> None:
        super().__init__(words)
        self.ending = Ending(int(reproduced), replayed=words)


def check(target: str, *, module: bool) -> None:
    """Make sure that there is something to run.

    Raises:
        UsageError: There is no such script.
    """
    if not module and not Path(target).is_file():
        raise UsageError(f"there is no script {target!r} to watch. Give a file, or `-m` and the name of a module.")


def run(target: str, args: list[str], *, module: bool) -> Ending:
    """Run to the end, whatever the end is."""
    try:
        with _as_main(target, args, module):
            if module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                source = Path(target).read_bytes()
                exec(compile(source, str(Path(target).resolve()), "exec"), vars(sys.modules["__main__"]))
    except SystemExit as end:
        return _exited(end)
    except Replayed as end:
        return end.ending
    except KeyboardInterrupt as error:
        return Ending(130, "it was interrupted (Ctrl-C)", _without_us(error))
    except BaseException as error:
        return Ending(1, in_words(error), _without_us(error))
    return Ending()


def _exited(end: SystemExit) -> Ending:
    if end.code is None or isinstance(end.code, int):
        code = end.code or 0
        return Ending(code, f"it ended itself with exit code {code}" if code else "")
    return Ending(1, "it ended itself with a message", f"{end.code}\n")


def in_words(error: BaseException) -> str:
    """What an error ended, for a report."""
    text = str(error).strip().splitlines()
    return f"it raised {type(error).__name__}" + (f": {text[0][:200].rstrip('.')}" if text else "")


def _without_us(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


@contextmanager
def _as_main(target: str, args: list[str], module: bool) -> Iterator[None]:
    """`sys.argv`, `sys.path` and `__main__` as the script expects them."""
    saved = sys.argv, sys.path[0], sys.modules["__main__"]
    sys.argv = [target, *args]
    sys.path[0] = str(Path.cwd()) if module else str(Path(target).resolve().parent)
    if not module:
        main = ModuleType("__main__")
        main.__dict__.update(__file__=str(Path(target).resolve()), __builtins__=__builtins__, __cached__=None)
        sys.modules["__main__"] = main
    try:
        yield
    finally:
        sys.argv, sys.path[0], sys.modules["__main__"] = saved
