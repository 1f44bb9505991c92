"""Each rank's share of the training data: a sampler in place of `shuffle`, told the epoch."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import EpochBegin
from halfstep.imagine.converting.batches import batch_source
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.reach import add_arguments
from halfstep.imagine.converting.references import origin_of
from halfstep.imagine.converting.syntax import Syntax


def share(program: Program, patch: Patch) -> None:
    """Give the training loader a sampler and tell it the epoch.

    Raises:
        NotSure: the loader is not made in this file, or has a sampler of its own.
    """
    source = batch_source(program)
    if source is None:
        raise NotSure("batches do not come from a DataLoader that could be shared out")
    begun = [e for e in program.all(EpochBegin) if program.syntax.here(e.place) and e.place and e.place.line == source.lineno]
    made = next((program.usual.made(e.loader) for e in begun if program.usual.made(e.loader)), None)
    call = program.syntax.call_at(made.place) if made is not None else None
    if made is None or call is None:
        raise NotSure("the loader is not made in this file, so its data cannot be shared out", source.lineno)
    if made.facts.get("iterable"):
        raise NotSure("the data set is a stream, which must divide itself over the ranks", call.lineno)
    add_sampler(program.syntax, patch, call)
    for event in {e.loops[-1].place: e for e in begun if e.loops}.values():
        _tell_epoch(program, patch, source, event)


def add_sampler(syntax: Syntax, patch: Patch, call: ast.Call) -> None:
    """Give a loader a `DistributedSampler` in place of its shuffling.

    Raises:
        NotSure: its arguments do not allow one.
    """
    keywords = {k.arg: k for k in call.keywords}
    if len(call.args) > 2 or {"sampler", "batch_sampler", None} & set(keywords):
        raise NotSure("the loader has a sampler of its own or arguments that cannot be told apart", call.lineno)
    dataset = call.args[0] if call.args else keywords["dataset"].value if "dataset" in keywords else None
    if dataset is None:
        raise NotSure("the loader has no data set that can be seen", call.lineno)
    text = syntax.text
    sampler = syntax.fresh("train_sampler", "distributed_sampler")
    lines: list[str] = []
    if not isinstance(dataset, (ast.Name, ast.Attribute)):
        if "\n" in text(dataset):
            raise NotSure("the data set is made within the loader's arguments, over several lines", call.lineno)
        name = syntax.fresh("train_dataset", "train_data")
        lines.append(f"{name} = {text(dataset)}")
        patch.replace(dataset, name)
    else:
        name = text(dataset)
    shuffle = keywords.get("shuffle")
    lines.append(f"{sampler} = DistributedSampler({name}, shuffle={text(shuffle.value) if shuffle is not None else 'False'})")
    patch.before(syntax.statement(call), *lines)
    if shuffle is not None:
        patch.replace(shuffle, f"sampler={sampler}")
    else:
        add_arguments(patch, call, f"sampler={sampler}")


def _tell_epoch(program: Program, patch: Patch, source: ast.expr, begun: EpochBegin) -> None:
    place = begun.loops[-1].place
    nodes = program.syntax.nodes_at(place) if place is not None and program.syntax.here(place) else []
    epochs = next((n for n in nodes if isinstance(n, ast.For)), None)
    if epochs is None or not isinstance(epochs.target, ast.Name):
        raise NotSure("epochs are not counted by a `for` loop, so the sampler cannot be told them", place.line if place else None)
    name = epochs.target.id
    if name.startswith("_"):
        name = program.syntax.fresh("epoch")
        patch.replace(epochs.target, name)
    patch.before(epochs.body[0], f"{_loader_at(program, source, epochs, begun)}.sampler.set_epoch({name})")


def _loader_at(program: Program, source: ast.expr, epochs: ast.For, begun: EpochBegin) -> str:
    """The loader as the function that counts the epochs writes it."""
    function = program.syntax.function(epochs)
    if program.syntax.function(source) is function:
        return program.syntax.text(source)
    origin = origin_of(program, source, begun)
    if origin.text.startswith("self.") or origin.function is function or origin.function is None:
        return origin.text
    raise NotSure("the loader cannot be named where the epochs are counted", epochs.lineno)
