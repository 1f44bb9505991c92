"""What a rule may ask for, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from halfstep.findings.finding import Edit, Fix, FixRequest, Safety
from halfstep.imagine.converting.outcome import NotSure
from halfstep.imagine.edits import Editor
from halfstep.imagine.fixing import adding, calling, converting, moving, precision, spelling, windows, wrapping

Action = Callable[[Editor, FixRequest], "list[Edit] | None"]
ACTIONS: dict[str, Action] = {
    action.__name__.replace("_", "-"): action
    for action in (
        adding.evaluate,
        adding.save_state,
        adding.set_device,
        adding.set_epoch,
        adding.train,
        calling.call_wrapper,
        calling.count_batches,
        calling.detach,
        calling.drop_factor,
        calling.drop_keyword,
        calling.exchange,
        calling.keyword,
        calling.list_parameters,
        calling.undivide,
        converting.scale,
        converting.share,
        moving.delete_again,
        moving.delete_early,
        moving.hoist,
        moving.move_after,
        moving.move_all_into,
        moving.move_before,
        moving.move_into,
        moving.move_into_before,
        precision.device_of_model,
        precision.keep_fp32,
        precision.seed_of_rank,
        precision.seed_of_worker,
        precision.to_float,
        precision.with_logits,
        spelling.dedent_tail,
        spelling.delete,
        spelling.finfo,
        spelling.modernise,
        spelling.scale_loss,
        spelling.unscale_before,
        spelling.update_after,
        spelling.zero_before,
        windows.count_from_one,
        windows.count_steps,
        windows.divide,
        windows.divide_by_window,
        windows.step_at_end,
        wrapping.first_rank,
        wrapping.no_grad,
        wrapping.no_sync,
        wrapping.sync_at_step,
        wrapping.unless_skipped,
        wrapping.widen_no_sync,
    )
}


def fix_of(editor: Editor, request: FixRequest, safety: Safety) -> Fix | None:
    """The fix that a rule asks for, or None where the text does not allow a sure edit."""
    if request.place.line > len(editor.lines) or (request.other is not None and request.other.path != request.place.path):
        return None
    try:
        edits = ACTIONS[request.action](editor, request)
    except NotSure:
        return None
    return Fix(tuple(edits), safety, request.action) if edits else None


def together(fixes: Iterable[Fix]) -> list[Edit]:
    """The edits of the fixes that can be made at once: each is made whole or not at all, the first come first."""
    taken: list[Edit] = []
    for fix in fixes:
        if not any(_meet(edit, other) for edit in fix.edits for other in taken):
            taken += fix.edits
    return taken


def _meet(one: Edit, two: Edit) -> bool:
    """Whether two edits change the same text, or put the same text at one place."""
    starts, ends = (one.line, one.column), (one.end_line, one.end_column)
    other_starts, other_ends = (two.line, two.column), (two.end_line, two.end_column)
    return one == two or (starts < other_ends and other_starts < ends)
