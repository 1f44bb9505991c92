"""What the resolved text of a program says besides its events: deprecated names, classes of data sets and modules."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from halfstep.events.trace import Fact
from halfstep.events.vocabulary import Place


def facts_of(tree: ast.Module, path: str) -> list[Fact]:
    """All facts of one file."""
    names = _with_aliases(tree, imported_names(tree))
    found: list[Fact] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            dotted = dotted_name(node.func, names)
            if dotted is not None and dotted.startswith(("torch.cuda.amp.", "torch.cpu.amp.")):
                found.append(
                    Fact("deprecated call", place_of(node, path), dotted, {"func": ast.unparse(node.func), "node": node})
                )
            held = dotted_name(node.args[0], names) if _last(node.func) == "partial" and node.args else None
            if held is not None and held.startswith(("torch.cuda.amp.", "torch.cpu.amp.")):
                found.append(Fact("deprecated call", place_of(node, path), held, {"node": node, "made later": True}))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for decorator in node.decorator_list:
                dotted = dotted_name(decorator, names)
                if dotted in ("torch.cuda.amp.autocast", "torch.cpu.amp.autocast"):
                    found.append(Fact("deprecated call", place_of(decorator, path), dotted, {"node": decorator}))
    return [*found, *_swapped(tree, path), *_bf16_options(tree, path), *_clearings(tree, path), *_periodic(tree, path)]


def _with_aliases(tree: ast.Module, names: dict[str, str]) -> dict[str, str]:
    """With the names that are given, once and nowhere else, to a part of a library."""
    nodes = list(ast.walk(tree))
    stored = Counter(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    given = [(n.targets[0], n.value) for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1]
    found = [(t.id, dotted_name(value, names)) for t, value in given if isinstance(t, ast.Name) and stored[t.id] == 1]
    return {**{name: dotted for name, dotted in found if dotted is not None}, **names}


def _clearings(tree: ast.Module, path: str) -> list[Fact]:
    """Where the text clears gradients of which name or steps it, with the function or class around it, run or not."""
    kinds = {"zero_grad": "clearing", "step": "stepping"}
    found: list[Fact] = []
    for top in tree.body:
        for node in ast.walk(top):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in kinds:
                around: dict[str, object] = {"around": place_of(top, path)}
                named = [node.func.value, *(node.args if node.func.attr == "step" else ())]
                found += [Fact(kinds[node.func.attr], place_of(node, path), _last(name), around) for name in named]
    return found


def _periodic(tree: ast.Module, path: str) -> list[Fact]:
    """Steps of which name the text takes once in so many turns, which may be more than are imagined."""
    branches = (n for n in ast.walk(tree) if isinstance(n, ast.If) and any(isinstance(m, ast.Mod) for m in ast.walk(n.test)))
    calls = (n for branch in branches for part in branch.body for n in ast.walk(part) if isinstance(n, ast.Call))
    return [
        Fact("periodic step", place_of(call, path), _last(call.func.value))
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    ]


_WARM = re.compile(r"warm", re.I)


def _arguments(function: ast.FunctionDef) -> list[str]:
    """The names of its parameters, but for the object that a method is of."""
    return [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]


def _swapped(tree: ast.Module, path: str) -> list[Fact]:
    """Calls whose warm-up and total arguments stand in each other's place."""
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name != "__init__")
    params = {n.name: _arguments(n) for n in functions}
    made = ((n.name, part) for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for part in n.body)
    params |= {name: _arguments(n) for name, n in made if isinstance(n, ast.FunctionDef) and n.name == "__init__"}
    params |= dict(_partly_given(tree, params))
    found: list[Fact] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        func, args = _called(node)
        names = _parameters(_last(func), params)
        if not any(_WARM.search(n) for n in names):
            continue
        pairs = [(p, _last(a)) for p, a in zip(names, args, strict=False)]
        pairs += [(k.arg, _last(k.value)) for k in node.keywords if k.arg]
        warm = next((a for p, a in pairs if _WARM.search(p)), "")
        total = next((a for p, a in pairs if not _WARM.search(p) and _WARM.search(a)), "")
        if warm and not _WARM.search(warm) and total:
            found.append(Fact("swapped arguments", place_of(node, path), f"`{warm}` and `{total}`"))
    return found


def _parameters(name: str, params: dict[str, list[str]]) -> list[str]:
    return params.get(name) or (KNOWN_SCHEDULE if re.fullmatch(r"get_\w+_schedule_with_warmup", name) else [])


def _called(node: ast.Call) -> tuple[ast.expr, list[ast.expr]]:
    """What is called, now or later by `partial`, and what it is given."""
    return (node.args[0], node.args[1:]) if _last(node.func) == "partial" and node.args else (node.func, node.args)


def _partly_given(tree: ast.Module, params: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Names of functions that `partial` has given some arguments, with the parameters that are left."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _last(node.value.func) == "partial":
            func, args = _called(node.value)
            named = {k.arg for k in node.value.keywords}
            left = [p for p in _parameters(_last(func), params)[len(args) :] if p not in named]
            yield from ((_last(target), left) for target in node.targets)


KNOWN_SCHEDULE = ["optimizer", "num_warmup_steps", "num_training_steps"]


def _last(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return str(node.slice.value)
    return node.id if isinstance(node, ast.Name) else ""


_OPTION = re.compile(r"dtype|precision|bf16|bfloat", re.I)
_BF16 = ("bfloat16", "bf16")


def _bf16_options(tree: ast.Module, path: str) -> list[Fact]:
    """Options of the program that ask for bfloat16: arguments, parameters, fields and settings."""
    found: list[Fact] = []
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.Call) and _last(node.func) == "add_argument" and node.args:
            flag = node.args[0]
            name = str(flag.value).lstrip("-") if isinstance(flag, ast.Constant) else ""
            pairs = [(name, k.value) for k in node.keywords if k.arg in ("default", "choices")]
        elif isinstance(node, (ast.FunctionDef, ast.Lambda)):
            spec = node.args
            pairs = [(a.arg, d) for a, d in zip(spec.args[len(spec.args) - len(spec.defaults) :], spec.defaults, strict=False)]
            pairs += [(a.arg, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=False)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            pairs = [(node.target.id, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = [(_last(t), node.value) for t in node.targets]
        elif isinstance(node, ast.Dict):
            pairs = [(str(k.value), v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
        elif isinstance(node, ast.keyword) and node.arg:
            pairs = [(node.arg, node.value)]
        for name, value in pairs:
            if name and _OPTION.search(name) and value is not None and _asks_bf16(value):
                found.append(Fact("bf16 option", place_of(node, path), name))
    return found


def _asks_bf16(value: ast.expr) -> bool:
    return any(
        (isinstance(n, ast.Constant) and n.value in _BF16) or (isinstance(n, ast.Attribute) and n.attr == "bfloat16")
        for n in ast.walk(value)
    )


def place_of(node: ast.AST, path: str) -> Place:
    """Where a node stands."""
    return Place(
        path,
        getattr(node, "lineno", 1),
        getattr(node, "col_offset", 0),
        getattr(node, "end_lineno", 0) or 0,
        getattr(node, "end_col_offset", 0) or 0,
    )


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Full dotted paths of the imported names."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """The full dotted path of an expression, if it is a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])
