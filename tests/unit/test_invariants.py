"""The invariants of a run: a step that is made again is the same one, or the node has said that it could not be."""

from swarm.simulate.invariants import ONCE, REPEAT, Invariants
from swarm.types import JsonDict

NODE = "ab" * 32


def draw(step: int) -> tuple[str, JsonDict]:
    return "draw", {"step": step, "groups": [], "max_reuse": 1, "max_age_steps": 4}


def step(number: int, of_draw: int, digest: str) -> tuple[str, JsonDict]:
    return "step", {"step": number, "draw": of_draw, "digest": digest}


ABANDONED = ("abandoned", {"from": 1, "first": 2, "last": 2})


def broken_by(*events: tuple[str, JsonDict]) -> set[str]:
    invariants = Invariants(repeats_exactly=True)
    for kind, fields in events:
        invariants.check(NODE, kind, fields)
    return set(invariants.violations)


def test_a_step_made_again_from_its_own_draw_is_the_same() -> None:
    made = [draw(1), step(1, 1, "a"), draw(2), step(2, 2, "b")]
    assert not broken_by(*made, step(1, 1, "a"), step(2, 2, "b"))
    assert broken_by(*made, step(1, 1, "a"), step(2, 2, "c")) == {REPEAT}


def test_only_steps_made_again_are_counted_as_such() -> None:
    invariants = Invariants(repeats_exactly=True)
    for kind, fields in (draw(1), step(1, 1, "a"), step(1, 1, "a"), draw(2), step(2, 2, "b"), draw(3), step(3, 3, "c")):
        invariants.check(NODE, kind, fields)
    assert [verdict.detail for verdict in invariants.verdicts() if verdict.name == REPEAT] == ["1 steps made again"]


def test_a_step_made_again_from_another_draw_has_to_be_announced() -> None:
    made = [draw(1), step(1, 1, "a"), draw(2), step(2, 2, "b")]
    assert broken_by(*made, step(1, 1, "a"), draw(3), step(2, 3, "c")) == {REPEAT}
    assert not broken_by(*made, step(1, 1, "a"), ABANDONED, draw(3), step(2, 3, "c"))
    assert broken_by(*made, ABANDONED, step(1, 1, "c")) == {REPEAT}, "what was not abandoned stays as it was"


def test_an_abandoned_draw_leads_to_no_step_and_its_number_to_no_other_draw() -> None:
    made = [draw(1), step(1, 1, "a"), draw(2), step(2, 2, "b"), ABANDONED]
    assert broken_by(*made, step(2, 2, "b")) == {REPEAT}
    assert broken_by(*made, draw(2)) == {ONCE}
