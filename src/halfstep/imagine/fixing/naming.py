"""How a source writes the objects that a fix needs, and where it can name them."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import Place
from halfstep.imagine.converting.syntax import FunctionNode
from halfstep.imagine.edits import Editor
from halfstep.imagine.facts import imported_names


def distributed(editor: Editor) -> str | None:
    """What the source calls `torch.distributed`."""
    names = imported_names(editor.syntax.tree)
    found = next((name for name, path in names.items() if path == "torch.distributed"), None)
    whole = any(
        isinstance(n, ast.Import) and any(a.name == "torch.distributed" for a in n.names) for n in ast.walk(editor.syntax.tree)
    )
    return found or ("torch.distributed" if whole else None)


def assigned(editor: Editor, place: Place | None) -> str | None:
    """The one name of what is made at a place."""
    call = editor.call(place)
    statement = editor.syntax.parents.get(call) if call is not None else None
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target = statement.targets[0]
    if not isinstance(target, (ast.Name, ast.Attribute)):
        return None
    text = ast.unparse(target)
    root = editor.syntax.function(statement) or editor.syntax.tree
    stored = [
        n for n in ast.walk(root) if isinstance(n, type(target)) and isinstance(n.ctx, ast.Store) and ast.unparse(n) == text
    ]
    return text if len(stored) == 1 else None


def sees(editor: Editor, text: str, at: ast.AST, made: ast.AST | None = None) -> bool:
    """Whether a name or an attribute of `self` can be read at a node, and means what was made at another."""
    function = editor.syntax.function(at)
    home = editor.syntax.function(made) if made is not None else None
    if text.startswith("self."):
        owner = editor.syntax.owner(function)
        return owner is not None and (made is None or editor.syntax.owner(home) is owner)
    while function is not None:
        if text in _names(editor, function):
            return made is None or home is function
        function = editor.syntax.function(function)
    return text.isidentifier() and (home is None if made is not None else text in _stored(editor, None))


def _names(editor: Editor, function: FunctionNode) -> set[str]:
    spec = function.args
    return {a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)} | _stored(editor, function)


def _stored(editor: Editor, function: FunctionNode | None) -> set[str]:
    root: ast.AST = function if function is not None else editor.syntax.tree
    found = (n for n in ast.walk(root) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return {n.id for n in found if editor.syntax.function(n) is function}
