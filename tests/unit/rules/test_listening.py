"""The listening functions on traces told by hand: what each would say wrongly if a condition of it were the other way round."""

from halfstep.events.trace import Fact, Story, Trace
from halfstep.events.vocabulary import (
    Backward,
    EpochBegin,
    Event,
    Place,
    Ref,
    RunEnd,
    ScalerUpdate,
    Step,
    Turn,
    Unscale,
    ZeroGrad,
)
from halfstep.rules.listening import (
    accumulation,
    call_site,
    cleared_elsewhere,
    cleared_in,
    hear,
    in_loader_loop,
    optimizers,
    same_turn,
    whole,
    windows,
)

OPT, OTHER = Ref("optimizer", 1, "opt"), Ref("optimizer", 2, "other")
SCALER, LOADER = Ref("scaler", 3, "scaler"), Ref("loader", 4, "loader")
HERE, THERE, CALL = Place("a.py", 5), Place("a.py", 9), Place("a.py", 20)


def _trace(*kinds: str, over: str = "loader", tags: frozenset[str] = frozenset()) -> Trace:
    """`b` is a backward pass in the next turn of one loop, `s` a step and `z` a clearing in the same turn."""
    events: list[Event] = []
    turn = -1
    for kind in "".join(kinds):
        turn += kind == "b"
        loops = (Turn(1, max(turn, 0), None, over, tags),)
        serial = len(events)
        if kind == "b":
            events.append(Backward(serial=serial, optimizers=(OPT,), loops=loops, stack=(HERE,)))
        elif kind == "s":
            events.append(Step(serial=serial, optimizer=OPT, loops=loops, place=THERE))
        elif kind == "z":
            events.append(ZeroGrad(serial=serial, optimizers=(OPT,), loops=loops))
        elif kind == "e":
            events.append(EpochBegin(serial=serial, loader=LOADER, index=0))
    return Trace((*events, RunEnd(serial=len(events))))


def test_windows_are_the_backward_passes_between_steps_and_the_last_may_have_none() -> None:
    parts = windows(_trace("bbsbbsb"), OPT)
    assert [(w.size, w.step is not None) for w in parts] == [(2, True), (2, True), (1, False)]


def test_cleared_micro_batches_are_a_window_that_was_wiped() -> None:
    assert [(w.size, w.wiped) for w in windows(_trace("bzbs"), OPT)] == [(1, True), (1, False)]


def test_a_window_over_two_epochs_has_crossed() -> None:
    assert [w.crossed for w in windows(_trace("ebebs"), OPT)] == [True]
    assert [w.crossed for w in windows(_trace("ebsebs"), OPT)] == [False, False]


def test_an_optimizer_that_steps_after_each_micro_batch_does_not_accumulate() -> None:
    assert accumulation(_trace("bszbszbsz"), OPT) is None


def test_accumulation_has_the_most_frequent_size() -> None:
    way = accumulation(_trace("bsz", "bbbbsz", "bbbbsz"), OPT)
    assert way is not None
    assert (way.size, way.guarded, way.wiped, way.counted) == (4, True, False, False)


def test_clearing_for_every_micro_batch_is_accumulation_that_is_wiped() -> None:
    way = accumulation(_trace("bzbzbzbs", "zbzbzbzbs"), OPT)
    assert way is not None
    assert (way.size, way.wiped) == (4, True)


def test_a_loop_that_counts_to_the_window_is_counted() -> None:
    way = accumulation(_trace("bbsz", "bbsz", over="count", tags=frozenset({"accum"})), OPT)
    assert way is not None
    assert way.counted


def test_gradients_are_scaled_until_they_are_unscaled_or_stepped() -> None:
    events = (
        Backward(serial=0, optimizers=(OPT,), scaler=SCALER),
        Unscale(serial=1, scaler=SCALER, optimizer=OPT),
        Step(serial=2, optimizer=OPT, scaler=SCALER),
        ScalerUpdate(serial=3, scaler=SCALER),
        RunEnd(serial=4),
    )
    told = [(type(e).__name__, a[OPT].scaled, a[OPT].not_updated is not None) for e, a in hear(Trace(events))]
    assert told == [
        ("Backward", False, False),
        ("Unscale", True, False),
        ("Step", False, True),
        ("ScalerUpdate", False, True),
        ("RunEnd", False, False),
    ]


def test_only_a_clearing_after_a_backward_pass_clears() -> None:
    assert cleared_in(_trace("zbsbs")) == set()
    assert cleared_in(_trace("bszbs")) == {OPT}


def test_a_clearing_in_the_text_counts_where_it_was_not_run_around_the_step() -> None:
    trace = _trace("bsbs")
    around = {"around": Place("a.py", 1, 0, 12)}
    near, far = Fact("clearing", Place("a.py", 7), "opt", around), Fact("clearing", Place("a.py", 40), "opt", {"around": CALL})
    assert cleared_elsewhere(trace, Story((trace,), (near,)), OPT)
    assert not cleared_elsewhere(trace, Story((trace,), (far,)), OPT)
    assert not cleared_elsewhere(trace, Story((trace,), (near,)), OTHER)
    run = Trace((ZeroGrad(place=Place("a.py", 7), optimizers=(OPT,)),))
    assert not cleared_elsewhere(trace, Story((trace, run), (near,)), OPT)


def test_optimizers_come_in_the_order_of_their_first_step() -> None:
    assert optimizers(Trace((Step(optimizer=OTHER), Step(optimizer=OPT), Step(optimizer=OTHER)))) == [OTHER, OPT]


def test_the_call_site_is_in_the_function_that_leads_to_both_events() -> None:
    inside = Step(optimizer=OPT, place=HERE, stack=(CALL, HERE))
    assert call_site(inside, Backward(stack=(Place("a.py", 21),))) == CALL
    assert call_site(inside, Backward(stack=(CALL, THERE))) == HERE
    assert call_site(inside, None) == HERE


def test_events_are_in_the_same_turn_as_far_as_both_are_in_loops() -> None:
    first, second = Turn(1, 0), Turn(1, 1)
    assert same_turn(Backward(loops=(first, Turn(2, 3))), Step(optimizer=OPT, loops=(first,)))
    assert not same_turn(Backward(loops=(first,)), Step(optimizer=OPT, loops=(second,)))


def test_a_loop_over_batches_is_told_from_one_over_numbers() -> None:
    assert in_loader_loop(Backward(loops=(Turn(1, 0, None, "count"), Turn(2, 0, None, "loader"))))
    assert not in_loader_loop(Backward(loops=(Turn(1, 0, None, "count"),)))


def test_an_absence_means_something_for_objects_that_were_heard_whole() -> None:
    given, escaped = Ref("optimizer", 5, given=True), Ref("optimizer", 6, escaped=True)
    once, again = Trace(()), Trace((), repeated=True)
    assert whole(once, given)
    assert not whole(again, given)
    assert not whole(once, escaped)
    assert not whole(once, None)
