"""The repeated blocks of a model: what is gathered, and computed again, one at a time."""

from __future__ import annotations

from collections import defaultdict

from torch import nn


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The layers of the longest run of children of one class: a transformer's blocks, a ResNet's stages.

    Leaves (a `Linear`, a `ReLU`) are no blocks. Empty where nothing repeats.
    """
    best: list[nn.Module] = []
    for parent in module.modules():
        by_class: dict[type[nn.Module], list[nn.Module]] = defaultdict(list)
        for child in parent.children():
            if any(True for _ in child.children()):
                by_class[type(child)].append(child)
        best = max([best, *by_class.values()], key=len)
    return best if len(best) > 1 else []


def all_blocks(module: nn.Module) -> list[nn.Module]:
    """Every block: of the classes that a model of transformers calls indivisible, else the repeated ones.

    An encoder and a decoder both have blocks, of one class or two.
    """
    names = {name for part in module.modules() for name in (getattr(part, "_no_split_modules", None) or ())}
    named = [part for part in module.modules() if type(part).__name__ in names and any(True for _ in part.children())]
    inner = {id(below) for block in named for below in block.modules() if below is not block}
    return [block for block in named if id(block) not in inner] or repeated_blocks(module)
