"""Fixes that conversions make as well: a loss scaler, a share of the data for each rank.

What converts is imported where it is asked for: `check` starts sooner without it.
"""

from __future__ import annotations

from halfstep.findings.finding import Edit, FixRequest
from halfstep.imagine.edits import Editor


def scale(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """The loop gets a loss scaler for the device in the text."""
    from halfstep.imagine.converting.imports import ensure
    from halfstep.imagine.converting.patch import Patch
    from halfstep.imagine.converting.program import Program
    from halfstep.imagine.converting.refusals import refuse
    from halfstep.imagine.converting.scaling import add_scaler

    program = Program(editor.source, request.place.path)
    refuse(program)
    if program.made("scaler") or program.others:
        return None
    patch = Patch(program.syntax)
    ensure(patch, "import torch")
    add_scaler(program, patch, auto=False, device=f'"{request.text}"')
    return patch.edits()


def share(editor: Editor, request: FixRequest) -> list[Edit] | None:
    """A loader gives each rank its share of the data."""
    from halfstep.imagine.converting.imports import ensure
    from halfstep.imagine.converting.patch import Patch
    from halfstep.imagine.converting.sharing import add_sampler

    call = editor.call(request.place)
    if call is None:
        return None
    patch = Patch(editor.syntax)
    ensure(patch, "from torch.utils.data.distributed import DistributedSampler")
    add_sampler(editor.syntax, patch, call)
    return patch.edits()
