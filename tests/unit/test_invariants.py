"""The invariants of a run: a step that is made again is the same one, or the node has said that it could not be."""

from swarm.simulate.invariants import ADMITTED, EXISTED, ONCE, REPEAT, Invariants
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


FOLLOWER, STRANGER = "cd" * 32, "ef" * 32


def group(producer: str, policy: str, digest: str = "0a" * 32, **more: object) -> JsonDict:
    return {"digest": digest, "producer": producer, "policy": policy, **more}


def drawn(local: bool, producer: str, policy: str) -> tuple[str, JsonDict]:
    groups = [group(producer, policy, age=0, use=1, local=local)]
    return "draw", {"step": 1, "groups": groups, "max_reuse": 1, "max_age_steps": 4}


def broken_in(*events: tuple[str, str, JsonDict]) -> set[str]:
    invariants = Invariants()
    for node, kind, fields in events:
        invariants.check(node, kind, fields)
    invariants.finish({})
    return set(invariants.violations)


def test_local_groups_are_of_the_own_lineage_and_those_of_followers_were_admitted() -> None:
    made, came = (FOLLOWER, "put", group(FOLLOWER, NODE)), (NODE, "admitted", group(FOLLOWER, NODE))
    assert not broken_in(made, came, (NODE, *drawn(True, FOLLOWER, NODE)))
    assert broken_in(made, (NODE, *drawn(True, FOLLOWER, NODE))) == {ADMITTED}, "never admitted"
    assert broken_in(made, came, (NODE, *drawn(False, FOLLOWER, NODE))) == {ADMITTED}, "counted as of another lineage"
    assert broken_in(made, came, (NODE, *drawn(True, FOLLOWER, FOLLOWER))) == {ADMITTED}, "of another lineage"
    assert broken_in((NODE, *drawn(True, NODE, NODE))) == {ADMITTED}, "never stored"


def test_rollouts_name_versions_that_were_published_whenever_that_becomes_known() -> None:
    published = [(NODE, "published", {"policy": NODE, "step": step, "digest": f"d{step}"}) for step in (3, 4)]
    right = (FOLLOWER, "put", group(FOLLOWER, NODE, versions=[[3, "d3"], [4, "d4"]]))
    assert not broken_in(right, *published)
    for versions in ([[4, "other"]], [[5, "d5"]], [[3, "d3"], [4, ""]]):
        for kind in ("put", "admitted"):
            assert broken_in(*published, (FOLLOWER, kind, group(FOLLOWER, NODE, versions=versions))) == {EXISTED}
    claimed = (NODE, "admitted", group(STRANGER, STRANGER, versions=[[7, "any"]]))
    assert not broken_in(*published, claimed), "nothing is known of a lineage from outside the run"


def test_the_owner_may_generate_with_a_version_that_a_kill_kept_from_being_published() -> None:
    published = (NODE, "published", {"policy": NODE, "step": 3, "digest": "d3"})
    assert not broken_in(published, (NODE, "put", group(NODE, NODE, versions=[[4, "d4"]])))
    assert broken_in(published, (NODE, "put", group(NODE, NODE, versions=[[5, "d5"]]))) == {EXISTED}
    assert broken_in(published, (NODE, "put", group(NODE, NODE, versions=[[3, "d4"]]))) == {EXISTED}
