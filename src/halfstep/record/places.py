"""Where the script is: the user's frames on the stack, their lines, and the turns of the loops around them."""

from __future__ import annotations

import dis
import re
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType

from halfstep.events.vocabulary import Place, Turn
from halfstep.record.probes.lines import COMMAND
from halfstep.record.programs import LIBRARY
from halfstep.record.syntax import Loop, Syntax, syntax_of

PACKAGE = str(Path(__file__).parents[1])
_ENGINE = str(Path(PACKAGE) / "engine")
_OUTERMOST = (str(Path(__file__).with_name("running.py")), COMMAND)
_FRAMEWORK = re.compile(
    r"[/\\](accelerate|lightning|lightning_fabric|pytorch_lightning|deepspeed)[/\\]"
    r"|[/\\]transformers[/\\]trainer\w*\.py|[/\\]halfstep[/\\]engine[/\\]"
)
_FOR_ITER = frozenset(code for name, code in dis.opmap.items() if name.startswith("FOR_ITER"))


@dataclass(slots=True, eq=False)
class Site:
    """An instruction of the user's code: its place, and the loops that stand around it."""

    place: Place
    function: str
    loops: tuple[Loop, ...]
    header: Loop | None
    """The loop that this instruction asks for its next item."""


@dataclass(slots=True)
class Code:
    """What is known of a code object, which is kept so that its identity stays its own."""

    code: CodeType
    syntax: Syntax | None
    """None for a library's code."""
    framework: bool = False
    engine: bool = False
    outermost: bool = False
    """Our own code that runs the script, or a command such as `halfstep train`: what lies above it is not the user's."""
    sites: dict[int, Site] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Run:
    """One run of one loop in one frame."""

    loop: Loop
    number: int
    turn: Turn


class Track:
    """How far one frame has come. It lives in the frame's `f_trace`, which nothing reads unless a debugger runs.

    The frame is not kept alive by it: with the frame it goes.
    """

    __slots__ = ("lasti", "runs")

    def __init__(self) -> None:
        self.lasti = -1
        self.runs: list[Run] = []

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """A debugger that starts later may call it: there is nothing to do."""


@dataclass(slots=True, eq=False)
class Here:
    """Where an event happens."""

    place: Place | None
    stack: tuple[Place, ...]
    loops: tuple[Turn, ...]
    function: str
    framework: bool
    """Called through a framework, which scales and divides itself."""
    engine: bool = False
    """Called through our engine, whose divisor is a reference that its step takes out again."""


class Moment(Enum):
    """What an event means for the loop in whose header it may stand."""

    PLAIN = 0
    BEGIN = 1
    """The loop is about to begin."""
    FETCH = 2
    """The loop gets its next item."""
    END = 3
    """The loop has no more items."""


_SEEN = Track()
"""The mark of a library's frame."""


NOWHERE = Here(None, (), (), "", False)


class Places:
    """Walks the stack. Code objects and instructions are looked at once."""

    def __init__(self) -> None:
        self._codes: dict[int, Code] = {}
        self._stacks: dict[tuple[int, ...], tuple[Place, ...]] = {}
        self._runs = 0
        self.files: set[str] = set()
        """The user's files in which events happened."""
        self.fed: set[int] = set()
        """Numbers of the runs of loops that a loader feeds."""

    def here(self, depth: int = 2, moment: Moment = Moment.PLAIN) -> Here:
        """The place of whoever calls, `depth` frames up."""
        frame: FrameType | None = sys._getframe(depth)
        tracking = sys.gettrace() is None
        framework, engine, fresh = False, False, True
        sites: list[Site] = []
        turns: list[Turn] = []
        while frame is not None:
            code = self._codes.get(id(frame.f_code)) or self._meet(frame.f_code)
            if code.outermost:
                break
            if code.syntax is None:
                framework = framework or code.framework
                engine = engine or code.engine
                if tracking:
                    fresh = frame.f_trace is None
                    frame.f_trace = frame.f_trace or _SEEN
            else:
                site = code.sites.get(frame.f_lasti) or self._look(code, frame)
                sites.append(site)
                if tracking:
                    track = frame.f_trace
                    new = not isinstance(track, Track)
                    if not isinstance(track, Track):
                        track = frame.f_trace = Track()
                    runs = self._follow(track, site, frame.f_lasti, fresh, moment if len(sites) == 1 else Moment.PLAIN)
                    own = [run.turn for run in runs]
                    if moment is Moment.END and len(sites) == 1 and runs and runs[-1].loop is site.header:
                        own.pop()
                    turns[:0] = own
                    fresh = new
            frame = frame.f_back
        return self._made(sites, tuple(turns), framework, engine)

    def _made(self, sites: list[Site], turns: tuple[Turn, ...], framework: bool, engine: bool) -> Here:
        if not sites:
            return Here(None, (), turns, "", framework, engine)
        key = tuple(map(id, sites))
        stack = self._stacks.get(key)
        if stack is None:
            stack = self._stacks[key] = tuple(site.place for site in reversed(sites))
        return Here(sites[0].place, stack, turns, sites[0].function, framework, engine)

    def _follow(self, track: Track, site: Site, lasti: int, fresh: bool, moment: Moment) -> list[Run]:
        """The runs of the loops around a site, moved on by what is new since the frame's last event."""
        runs, loops = track.runs, site.loops
        shared = 0
        while shared < len(runs) and shared < len(loops) and runs[shared].loop is loops[shared]:
            shared += 1
        again = lasti < track.lasti or (lasti == track.lasti and fresh)
        if site.header is not None:
            again = self._at_header(runs, shared, site.header, lasti - track.lasti, fresh, moment)
            if moment is not Moment.BEGIN and len(runs) > shared and runs[shared].loop is site.header:
                shared += 1
            if moment is Moment.FETCH:
                loops = (*loops, site.header)
        if again and shared:
            self._turn(runs[shared - 1])
        if again or len(runs) != shared:
            del runs[shared:]
        runs.extend(self._begin(loop) for loop in loops[shared:])
        track.lasti = lasti
        if moment is Moment.FETCH and site.header is not None:
            self.fed.add(runs[-1].number)
        return runs

    @staticmethod
    def _at_header(runs: list[Run], shared: int, header: Loop, moved: int, fresh: bool, moment: Moment) -> bool:
        """Whether a loop has turned: the header's own, or, where that is not running, the one around it."""
        running = len(runs) > shared and runs[shared].loop is header
        if moment is Moment.END:
            return False
        if moment is Moment.BEGIN:
            return moved <= 0
        if running and moment is Moment.FETCH:
            return moved != 0 or fresh
        return moved < 0

    def _begin(self, loop: Loop) -> Run:
        self._runs += 1
        return Run(loop, self._runs, Turn(self._runs, 0, loop.place, loop.over))

    @staticmethod
    def _turn(run: Run) -> None:
        run.turn = Turn(run.number, run.turn.index + 1, run.loop.place, run.loop.over)

    def _meet(self, code: CodeType) -> Code:
        path = code.co_filename
        library = is_library(path)
        syntax = None if library else syntax_of(path)
        framework = library and _FRAMEWORK.search(path) is not None
        known = self._codes[id(code)] = Code(
            code, syntax, framework, engine=path.startswith(_ENGINE), outermost=path in _OUTERMOST
        )
        return known

    def _look(self, code: Code, frame: FrameType) -> Site:
        assert code.syntax is not None
        lasti = frame.f_lasti
        line, end_line, column, end_column = _position(code.code, lasti, frame.f_lineno)
        loops, header = code.syntax.around(code.code.co_name, line, column)
        if lasti < 0 or code.code.co_code[lasti] not in _FOR_ITER:
            header = None
        place = code.syntax.place(line, column, end_line, end_column)
        site = code.sites[lasti] = Site(place, code.code.co_name, loops, header)
        self.files.add(place.path)
        return site


def is_library(path: str) -> bool:
    """Whether a file is part of an installed library, or ours."""
    return path.startswith(PACKAGE) or LIBRARY.search(path) is not None


def _position(code: CodeType, lasti: int, line: int) -> tuple[int, int, int, int]:
    """Line, end line, column, end column of an instruction; Python 3.10 knows the line only."""
    if sys.version_info >= (3, 11) and lasti >= 0:
        for number, found in enumerate(code.co_positions()):
            if number == lasti // 2:
                first, last, column, end = found
                return first or line, last or line, column or 0, end or 0
    return line, line, 0, 0
