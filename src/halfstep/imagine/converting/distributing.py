"""Several ranks: a process group, a wrapper for the training passes, a share of the data for each, and one that saves."""

from __future__ import annotations

import ast

from halfstep.events.vocabulary import Forward, Load, Made, Save
from halfstep.imagine.converting.imports import ensure
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.converting.patch import Patch
from halfstep.imagine.converting.program import Program
from halfstep.imagine.converting.reach import add_arguments
from halfstep.imagine.converting.references import Origin, origin_of
from halfstep.imagine.converting.refusals import has_ranks
from halfstep.imagine.converting.sharing import share
from halfstep.imagine.converting.syntax import DEFINITIONS, Block, FunctionNode, end_line

ON_WRAPPER = frozenset({"train", "eval", "parameters", "named_parameters", "zero_grad", "no_sync", "to", "cuda"})
"""What a DDP wrapper answers as the model itself does."""


def distribute(program: Program) -> tuple[str, list[str]]:
    """The text for several ranks under `torchrun`, and what was done.

    Raises:
        NotSure: the loop is left; the message says why.
    """
    if has_ranks(program):
        raise NotSure("the program knows of ranks already")
    patch = Patch(program.syntax)
    dist = program.syntax.fresh("dist", "torch_distributed")
    ensure(
        patch,
        "import os",
        f"import torch.distributed as {dist}",
        "from torch.nn.parallel import DistributedDataParallel",
        "from torch.utils.data.distributed import DistributedSampler",
    )
    first = _start_group(program, patch, dist)
    _wrap_model(program, patch)
    share(program, patch)
    _save_once(program, patch, dist)
    _name_no_device(program, patch)
    _load_anywhere(program, patch)
    return patch.text(), [
        f"process group from line {first} on, DistributedDataParallel in training, a sampler that hears the epoch, rank 0 saves",
        "each rank keeps the batch size, so an update covers as many batches as there are ranks; start it with torchrun",
        "printing and evaluation happen on every rank, evaluation on all of its data",
    ]


def _start_group(program: Program, patch: Patch, dist: str) -> int:
    """Join the ranks before anything is made, and leave when all is done.

    No backend is named: torch then has gloo for tensors of the CPU and the GPU's own for the GPU's, whatever the device will be.
    """
    block, first, last = _life(program)
    patch.before(
        block[first],
        f"{dist}.init_process_group()",
        "if torch.cuda.is_available():",
        f'{program.syntax.unit(block[first])}torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
    )
    end = f"{dist}.destroy_process_group()"
    if isinstance(block[-1], ast.Return):
        patch.before(block[-1], end)
    else:
        patch.after(block[max(last, len(block) - 1)], end)
    return block[first].lineno


def _life(program: Program) -> tuple[Block, int, int]:
    """The innermost block in which model and loader are made and used."""
    kinds = ("model", "loader", "optimizer")
    making = [m for m in program.usual.of(Made) if m.what.kind in kinds and program.frames(m)]
    training = next((f for f in program.usual.of(Forward) if f.grad_enabled), None)
    if training is None:
        raise NotSure("the model's forward pass is not heard")
    for frame in reversed(program.frames(training)):
        for block, index in program.syntax.blocks_up(frame.statement):
            where = [program.index_in(block, m) for m in making]
            if all(i is not None for i in where):
                return block, min([index, *(i for i in where if i is not None), *_devices(block, index)]), index
    raise NotSure("model and loader are not made where their loop can be followed from")


def _devices(block: Block, before: int) -> list[int]:
    """The statements that ask for a device by name."""
    return [i for i, s in enumerate(block[:before]) if not isinstance(s, DEFINITIONS) and "torch.device(" in ast.unparse(s)]


def _wrap_model(program: Program, patch: Patch) -> None:
    origins: dict[tuple[FunctionNode | None, str], list[Origin]] = {}
    for event in {e.stack: e for e in program.all(Forward) if e.grad_enabled}.values():
        call = program.syntax.call_at(event.place)
        if call is None:
            raise NotSure("the model runs outside of this file")
        origin = origin_of(program, call.func, event)
        key = (None if origin.text.startswith("self.") else origin.function, origin.text)
        origins.setdefault(key, []).append(origin)
    if len(origins) != 1:
        raise NotSure(f"{len(origins)} models are called in training")
    (_, text), found = origins.popitem()
    prefix = "self." if text.startswith("self.") else ""
    wrapper = prefix + program.syntax.fresh("ddp_model", "wrapped_model")
    statement = _wrapped_after(program, found[0])
    patch.after(statement, f"{wrapper} = DistributedDataParallel({text})")
    for node in {n for origin in found for n in origin.nodes}:
        patch.replace(node, wrapper)
    for function, name in {r for origin in found for r in origin.received}:
        _reach_through(program, patch, function, name)


def _wrapped_after(program: Program, origin: Origin) -> ast.stmt:
    """The last statement that makes or moves the model, or gives it to the optimizer, before the loop."""
    syntax = program.syntax
    if origin.text.startswith("self."):
        owner = syntax.owner(origin.function)
        scope: ast.AST = owner if owner is not None else syntax.tree
    else:
        scope = origin.function if origin.function is not None else syntax.tree
    found = [syntax.statement(node) for node in ast.walk(scope) if _changes(node, origin.text)]
    stored = [s for s in found if isinstance(s, ast.Assign)]
    if not stored:
        raise NotSure(f"where `{origin.text}` is made cannot be seen")
    block, _ = syntax.block(stored[0])
    return max((s for s in found if s in block and not isinstance(s, (ast.For, ast.While))), key=end_line)


def _changes(node: ast.AST, name: str) -> bool:
    """Whether a node gives a model its name, moves it or hands out its parameters."""
    if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
        return ast.unparse(node) == name
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in ("to", "cuda", "parameters") and ast.unparse(node.func.value) == name


def _reach_through(program: Program, patch: Patch, function: FunctionNode, name: str) -> None:
    """A function that is handed the wrapper asks the model behind it for what is the model's own."""
    for node in ast.walk(function):
        own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        if own and isinstance(node, ast.Attribute) and node.attr not in ON_WRAPPER:
            patch.replace(node.value, f"{name}.module")


def _save_once(program: Program, patch: Patch, dist: str) -> None:
    for event in {e.stack: e for e in program.all(Save)}.values():
        call = program.syntax.call_at(event.place)
        if call is None:
            raise NotSure("a checkpoint is written outside of this file, by every rank")
        if "rank" in event.guards:
            continue
        statement = program.syntax.statement(call)
        patch.wrap(statement, statement, f"if {dist}.get_rank() == 0:")
        if _is_loaded_again(program):
            patch.after(statement, f"{dist}.barrier()")


def _is_loaded_again(program: Program) -> bool:
    """Whether a file is read after one was written."""
    for trace in program.traces:
        first = next((s.serial for s in trace.of(Save)), None)
        if first is not None and any(e.serial > first and e.target is None for e in trace.of(Load)):
            return True
    return False


def _name_no_device(program: Program, patch: Patch) -> None:
    """`cuda:0` is one rank's device; `cuda` is each rank's own."""
    for node in ast.walk(program.syntax.tree):
        if isinstance(node, ast.Constant) and node.value == "cuda:0":
            patch.replace(node, program.syntax.text(node).replace("cuda:0", "cuda"))


def _load_anywhere(program: Program, patch: Patch) -> None:
    """A checkpoint of rank 0 must not be loaded onto rank 0's device by all."""
    for event in program.all(Load):
        call = program.syntax.call_at(event.place)
        if call is not None and event.target is None and not event.map_location:
            add_arguments(patch, call, 'map_location="cpu"')
