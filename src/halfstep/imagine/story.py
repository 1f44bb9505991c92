"""Tells the story of a program: imagines it from its starts, in its worlds."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter

from halfstep.events.trace import Fact, Story, Trace
from halfstep.events.vocabulary import Backward, Made, RunBegin, RunEnd, Turn
from halfstep.imagine.cursors import say_ends
from halfstep.imagine.facts import facts_of
from halfstep.imagine.interpreter import Interpreter
from halfstep.imagine.naming import hinted, is_index
from halfstep.imagine.project import Project
from halfstep.imagine.resolving import trace_of
from halfstep.imagine.state import MICRO_BATCHES, WHOLE_WINDOWS, Budget, OutOfBudget, Raised, Restart, Signal
from halfstep.imagine.values import Bound, Class, Count, Function, Module, Unknown, Value, tagged
from halfstep.imagine.worlds import Exploration, World

STEPS = 80_000
MAX_EVENTS = 30_000
"""Events heard of one file, over all its worlds."""
MAX_ROOTS = 10
MAX_FUNCTIONS = 400
INTERESTING = frozenset(
    {
        *("backward", "manual_backward", "step", "zero_grad", "unscale_", "update", "clip_grad_norm_", "clip_grad_value_"),
        *("GradScaler", "autocast", "DataLoader", "save", "eval"),
    }
)
"""A function that calls one of these may be a start worth imagining."""


WORTH = frozenset({"backward", "manual_backward", "autocast", "GradScaler", "DataLoader", "DistributedSampler"})
"""Calls without which no rule can hear anything in a run."""


def tell(tree: ast.Module, path: str) -> Story:
    """The story of one file (and of the neighbours that it imports)."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 6000))
    try:
        return _Teller(Project(tree, path), Budget(STEPS)).tell()
    finally:
        sys.setrecursionlimit(limit)


class _Teller:
    def __init__(self, project: Project, budget: Budget) -> None:
        self.project = project
        self.budget = budget
        self.entered: set[int] = set()
        self.heard = 0
        self.micro_batches, self.phase = MICRO_BATCHES, WHOLE_WINDOWS

    def tell(self) -> Story:
        called = _calls(self.project.main.tree)
        if not called & WORTH and not _copies_to_host(self.project.main.tree):
            return Story((), tuple(self._facts()))
        traces = self._explore("")
        for root in self._roots():
            if id(self.nodes[root]) not in self.entered and self.heard < MAX_EVENTS:
                traces += self._explore(root)
        return Story(tuple(traces), tuple(self._facts()))

    def _facts(self) -> list[Fact]:
        return facts_of(self.project.main.tree, self.project.main.path)

    def _roots(self) -> list[str]:
        """Functions and methods that may be starts, callers before those they call."""
        self.nodes: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        for node in self.project.main.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.nodes[node.name] = node
            elif isinstance(node, ast.ClassDef):
                for inner in node.body:
                    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        self.nodes[f"{node.name}.{inner.name}"] = inner
        called = {name: _calls(node) for name, node in self.nodes.items()}
        wanted = {name for name in self.nodes if called[name] & INTERESTING} if len(self.nodes) < MAX_FUNCTIONS else set()
        if _copies_to_host(self.project.main.tree):
            wanted |= {name for name, node in self.nodes.items() if _copies_to_host(node)}
        self.named: dict[str, list[str]] = {}
        for name in self.nodes:
            for known_as in name.split("."):
                self.named.setdefault(known_as, []).append(name)
        reach = (
            {name: self._reaching(name, called) for name in self.nodes} if wanted else {name: set[str]() for name in self.nodes}
        )
        useful = [name for name in self.nodes if not HIDDEN.search(name) and ({name} | reach[name]) & set(wanted)]
        order = {name: index for index, name in enumerate(self.nodes)}
        callers = Counter(name for other in useful for name in reach[other] - {other})
        return sorted(useful, key=lambda name: (-len(reach[name] & wanted), callers[name], order[name]))[:MAX_ROOTS]

    def _reaching(self, name: str, called: dict[str, set[str]]) -> set[str]:
        seen: set[str] = set()
        todo = [name]
        while todo:
            for last in called.get(todo.pop(), set()):
                for other in self.named.get(last, ()):
                    if other not in seen:
                        seen.add(other)
                        todo.append(other)
        return seen

    def _explore(self, root: str) -> list[Trace]:
        exploration = Exploration()
        traces: list[Trace] = []
        for world in exploration.worlds():
            trace = self._run(root, world)
            if trace is not None:
                traces.append(trace)
                self.heard += len(trace.events)
            if self.budget.steps < 0 or self.heard > MAX_EVENTS:
                break
            exploration.learn(world)
        return traces

    def _run(self, root: str, world: World) -> Trace | None:
        self.micro_batches, self.phase = MICRO_BATCHES, WHOLE_WINDOWS
        for _ in range(3):
            self.project.fresh()
            machine = Interpreter(self.project, world, self.budget, micro_batches=self.micro_batches, phase=self.phase)
            try:
                return self._hear(machine, root)
            except Restart as restart:
                self.micro_batches, self.phase = restart.micro_batches, restart.phase
                world.asked.clear()
            except (OutOfBudget, RecursionError):
                return None
            finally:
                self.entered |= machine.entered
        return None

    def _hear(self, machine: Interpreter, root: str) -> Trace | None:
        repeated = False
        nothing = ast.Pass()
        machine.module = self.project.main
        machine.emit(RunBegin, nothing)
        try:
            self._run_module(machine, self.project.main, quietly=bool(root))
            if root:
                machine.drafts[:] = [d for d in machine.drafts if d.kind is Made and d.fields["what"].kind == "device choice"]
                machine.memo["root"] = root
                repeated = self._start(machine, root)
        except Raised:
            return None
        except Signal:
            pass
        machine.module = self.project.main
        say_ends(machine, nothing)
        machine.emit(RunEnd, nothing)
        window = machine.largest_window
        if window * 2 + 1 > machine.micro_batches and machine.micro_batches == MICRO_BATCHES and window <= 16:
            raise Restart(2 * window + 1, machine.phase)
        if machine.shortened and window > 1 and machine.phase % window:
            raise Restart(machine.micro_batches, window * max(1, WHOLE_WINDOWS // window))
        return trace_of(machine, root, repeated)

    def _run_module(self, machine: Interpreter, module: Module, quietly: bool) -> None:
        name = module.name
        module.name = "imported" if quietly else name
        module.done = False
        try:
            machine.load(module)
            machine.scope, machine.module = module.scope, module
        finally:
            module.name = name

    def _start(self, machine: Interpreter, root: str) -> bool:
        """Call a function that nothing calls, as an imaginary caller would."""
        owner, _, name = root.rpartition(".")
        scope = self.project.main.scope
        func: Value = scope.names.get(owner or name)
        if isinstance(func, Class):
            node = self.project.main.tree
            instance = machine.instantiate(func, self._arguments(machine, func.lookup("__init__"), skip=1), {}, node)
            method = func.lookup(name)
            func = Bound(instance, name, method) if isinstance(method, Function) else None
        target = func.target if isinstance(func, Bound) else func
        if not isinstance(target, Function) or target.generator:
            return False
        return self._call_root(machine, func, target)

    def _call_root(self, machine: Interpreter, func: Value, target: Function) -> bool:
        skip = 1 if isinstance(func, Bound) and "staticmethod" not in target.decorators else 0
        given = self._arguments(machine, target, skip)
        names = [a.arg for a in target.signature.args][skip:]
        epoch_like = "epoch" in names or re.search(r"epoch", target.name) is not None
        once = len(machine.drafts)
        for turn in range(2 if epoch_like else 1):
            machine.call(func, self._with_index(names, given, turn), {}, self.project.main.tree)
        step_like = not any(
            isinstance(d.fields.get("loops"), tuple) and d.fields["loops"] for d in machine.drafts[once:] if d.kind is Backward
        )
        if step_like and not epoch_like and any(d.kind is Backward for d in machine.drafts):
            for turn in range(1, 2 * machine.micro_batches):
                machine.loops.append(Turn(0, turn, None, "count"))
                machine.call(func, self._with_index(names, given, turn), {}, self.project.main.tree)
                machine.loops.pop()
            for draft in machine.drafts[once:]:
                if draft.kind is not Made and not draft.fields["loops"]:
                    draft.fields["loops"] = (Turn(0, 0, None, "count"),)
        return epoch_like or step_like

    def _with_index(self, names: list[str], given: list[Value], turn: int) -> list[Value]:
        index = tagged(turn, frozenset({"index"}))
        return [index if is_index(n) or n in ("epoch", "global_step") else v for n, v in zip(names, given, strict=False)]

    def _arguments(self, machine: Interpreter, func: Value, skip: int) -> list[Value]:
        """Unknown values for the parameters of a start, with their defaults as the usual answers; settings as they are made."""
        if not isinstance(func, Function):
            return []
        spec = func.signature
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)][skip:]
        while func.inner is not None:
            func = func.inner
        defaults = func.defaults[-len(names) :] if names else []
        made: list[Value] = []
        for index, name in enumerate(names):
            at = index - (len(names) - len(defaults))
            settings = self._settings() if at < 0 and SETTINGS.search(name) else None
            if settings is not None:
                made.append(machine.instantiate(settings, [], {}, self.project.main.tree))
            else:
                made.append(_argument(name, defaults[at] if at >= 0 else None, at >= 0))
        return made

    def _settings(self) -> Class | None:
        """The class of the program that holds its settings, if there is just one and it has all defaults."""
        classes = [v for v in self.project.main.scope.names.values() if isinstance(v, Class) and "dataclass" in v.decorators]
        named = [c for c in classes if SETTINGS.search(c.name)]
        parts = {n.id for c in named for n in ast.walk(c.node) if isinstance(n, ast.Name)}
        named = [c for c in named if c.name not in parts] or named
        fields = [s for c in named for s in c.node.body if isinstance(s, ast.AnnAssign)]
        return named[0] if len(named) == 1 and all(s.value is not None for s in fields) else None


HIDDEN = re.compile(r"(^|\.)__(?!call__)\w*$")
"""Methods that Python itself calls, but for the one by which an object is called."""
SETTINGS = re.compile(r"(config|cfg|conf|args|arguments|opts?|options|settings|hparams|hp)$", re.I)
"""What settings are called, and classes of them."""


def _argument(name: str, default: Value, has_default: bool) -> Value:
    if has_default and (default is None or isinstance(default, (bool, str))):
        return Unknown(name, default=default, has_default=True)
    if has_default:
        return hinted(name, default)
    return hinted(name, Unknown(name))


def _copies_to_host(tree: ast.AST) -> bool:
    """Whether copies to the host are made without waiting, which matter without training too."""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and any(k.arg == "non_blocking" for k in n.keywords))
    return any("cpu" in ast.unparse(call) for call in calls)


def _calls(node: ast.AST) -> set[str]:
    found: set[str] = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            func = inner.func
            found.add(func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else "")
    return found - {""}


__all__ = ["Count", "tell"]
