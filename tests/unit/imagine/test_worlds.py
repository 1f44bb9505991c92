from halfstep.imagine.worlds import MAX_WORLDS, Exploration, World


def _ask(world: World, *names: str) -> tuple[object, ...]:
    return tuple(world.choose(name, (True, False), 0, "flag", None) for name in names)


def test_same_question_has_one_answer_in_a_world() -> None:
    world = World({"amp": 1})
    assert _ask(world, "amp", "amp", "ddp") == (False, False, True)


def test_first_world_gives_every_usual_answer_and_the_next_differ_in_one() -> None:
    exploration, answers = Exploration(), []
    for world in exploration.worlds():
        answers.append(_ask(world, "a", "b"))
        exploration.learn(world)
    assert answers[:3] == [(True, True), (False, True), (True, False)]
    assert set(answers) == {(True, True), (False, True), (True, False), (False, False)}


def test_number_of_worlds_is_bounded() -> None:
    exploration, count = Exploration(), 0
    for world in exploration.worlds():
        count += 1
        _ask(world, *(f"flag {i}" for i in range(40)))
        exploration.learn(world)
    assert count == MAX_WORLDS
