"""Traces are told by hand here: no source, no torch."""

from halfstep.events.trace import Decision, Fact, Story, Trace
from halfstep.events.vocabulary import Backward, Made, Place, Ref, RunBegin, Step, ZeroGrad

OPTIMIZER = Ref("optimizer", 1, "opt")


def test_events_of_several_kinds_come_in_the_order_of_the_run() -> None:
    trace = Trace((RunBegin(serial=0), Backward(serial=1), Step(serial=2, optimizer=OPTIMIZER), Backward(serial=3)))
    assert [event.serial for event in trace.of(Step, Backward)] == [1, 2, 3]
    assert [type(event) for event in trace.of(Step)] == [Step]


def test_a_trace_has_a_kind_if_one_of_those_asked_for_was_heard() -> None:
    trace = Trace((Backward(),))
    assert trace.has(ZeroGrad, Backward)
    assert not trace.has(ZeroGrad)


def test_facts_are_those_of_the_construction_and_none_of_what_was_given() -> None:
    trace = Trace((Made(what=OPTIMIZER, facts={"lr": 0.1}),))
    assert trace.fact(OPTIMIZER, "lr") == 0.1
    assert trace.fact(OPTIMIZER, "momentum", "none") == "none"
    assert trace.fact(Ref("optimizer", 2), "lr") is None
    assert trace.fact(None, "lr", 7) == 7


def test_objects_are_the_same_by_kind_number_and_name_wherever_they_are_seen() -> None:
    assert Ref("optimizer", 1, "opt", Place("a.py", 3)) == OPTIMIZER != Ref("optimizer", 2, "opt")


def test_exception_is_the_unusual_answer_on_data_and_rank_the_answer_for_it() -> None:
    usual = Decision("bad", False, "data", True)
    unusual = Decision("bad", True, "data", False)
    on_one = Decision("rank", 1, "rank", False)
    assert Trace((), (usual,)).exception is None
    assert Trace((), (usual, unusual)).exception is unusual
    assert (Trace((), (usual, on_one)).rank, Trace((), (usual,)).rank) == (1, None)


def test_usual_world_of_a_trace_is_that_of_the_same_start() -> None:
    flag = Decision("amp", True, "flag", True)
    usual, other = Trace((), (flag,), "train"), Trace((), (Decision("amp", False, "flag", False),), "train")
    elsewhere = Trace((), (flag,), "evaluate")
    assert Story((elsewhere, usual, other)).usual(other) is usual
    assert Story((elsewhere, other)).usual(other) is None


def test_facts_of_the_text_are_told_by_kind() -> None:
    facts = (Fact("clearing", Place("a.py", 1), "opt"), Fact("deprecated call", Place("a.py", 2)))
    assert list(Story((), facts).told("clearing")) == [facts[0]]
