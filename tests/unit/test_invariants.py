"""The invariants of a run: a step that is made again is the same one, or the node has said that it could not be."""

from dataclasses import replace
from typing import Any

from logged_events import make

from swarm.events import (
    DrawsAbandoned,
    Event,
    GroupAdmitted,
    GroupPut,
    GroupsDrawn,
    GroupUse,
    StepMade,
    VersionName,
    VersionPublished,
)
from swarm.report.invariants import ADMITTED, EXISTED, ONCE, REPEAT, Invariants

NODE = "ab" * 32


def draw(step: int) -> GroupsDrawn:
    return make(GroupsDrawn, draw_step=step)


def step(number: int, of_draw: int, digest: str) -> StepMade:
    return make(StepMade, step=number, draw_step=of_draw, digest=digest)


ABANDONED = DrawsAbandoned(from_step=1, first=2, last=2)


def broken_by(*events: Event) -> set[str]:
    invariants = Invariants(repeats_exactly=True)
    for event in events:
        invariants.check(NODE, event)
    return set(invariants.violations)


def test_a_step_made_again_from_its_own_draw_is_the_same() -> None:
    made = [draw(1), step(1, 1, "a"), draw(2), step(2, 2, "b")]
    assert not broken_by(*made, step(1, 1, "a"), step(2, 2, "b"))
    assert broken_by(*made, step(1, 1, "a"), step(2, 2, "c")) == {REPEAT}


def test_only_steps_made_again_are_counted_as_such() -> None:
    invariants = Invariants(repeats_exactly=True)
    for event in (draw(1), step(1, 1, "a"), step(1, 1, "a"), draw(2), step(2, 2, "b"), draw(3), step(3, 3, "c")):
        invariants.check(NODE, event)
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


FOLLOWER, OUTSIDER, GROUP = "cd" * 32, "ef" * 32, "0a" * 32


def put(producer: str, policy: str, *versions: VersionName) -> GroupPut:
    return GroupPut(**stored(producer, policy, versions), num_tokens=1)


def admitted(producer: str, policy: str, *versions: VersionName) -> GroupAdmitted:
    return GroupAdmitted(**stored(producer, policy, versions), via=producer, age_s=0.0)


def stored(producer: str, policy: str, versions: tuple[VersionName, ...]) -> dict[str, Any]:
    names = {"digest": GROUP, "producer": producer, "policy_id": policy, "versions": versions}
    return {**names, "env": "sums", "oldest_step": 0, "size_bytes": 1, "reward_mean": 0.0}


def drawn(is_own_policy: bool, producer: str, policy: str) -> GroupsDrawn:
    group = GroupUse(digest=GROUP, producer=producer, policy_id=policy, age_steps=0, is_own_policy=is_own_policy)
    return replace(draw(1), groups=(group,))


def broken_in(*events: tuple[str, Event]) -> set[str]:
    invariants = Invariants()
    for node, event in events:
        invariants.check(node, event)
    invariants.finish({})
    return set(invariants.violations)


def test_local_groups_are_of_the_own_lineage_and_those_of_followers_were_admitted() -> None:
    made, came = (FOLLOWER, put(FOLLOWER, NODE)), (NODE, admitted(FOLLOWER, NODE))
    assert not broken_in(made, came, (NODE, drawn(True, FOLLOWER, NODE)))
    assert broken_in(made, (NODE, drawn(True, FOLLOWER, NODE))) == {ADMITTED}, "never admitted"
    assert broken_in(made, came, (NODE, drawn(False, FOLLOWER, NODE))) == {ADMITTED}, "counted as of another lineage"
    assert broken_in(made, came, (NODE, drawn(True, FOLLOWER, FOLLOWER))) == {ADMITTED}, "of another lineage"
    assert broken_in((NODE, drawn(True, NODE, NODE))) == {ADMITTED}, "never stored"


def published(step: int, digest: str) -> VersionPublished:
    return VersionPublished(policy_id=NODE, step=step, digest=digest)


def test_rollouts_name_versions_that_were_published_whenever_that_becomes_known() -> None:
    known = [(NODE, published(step, f"d{step}")) for step in (3, 4)]
    right = (FOLLOWER, put(FOLLOWER, NODE, (3, "d3"), (4, "d4")))
    assert not broken_in(right, *known)
    for versions in ([(4, "other")], [(5, "d5")], [(3, "d3"), (4, "")]):
        for event in (put(FOLLOWER, NODE, *versions), admitted(FOLLOWER, NODE, *versions)):
            assert broken_in(*known, (FOLLOWER, event)) == {EXISTED}
    claimed = (NODE, admitted(OUTSIDER, OUTSIDER, (7, "any")))
    assert not broken_in(*known, claimed), "nothing is known of a lineage from outside the run"


def test_the_owner_may_generate_with_a_version_that_a_kill_kept_from_being_published() -> None:
    known = (NODE, published(3, "d3"))
    assert not broken_in(known, (NODE, put(NODE, NODE, (4, "d4"))))
    assert broken_in(known, (NODE, put(NODE, NODE, (5, "d5")))) == {EXISTED}
    assert broken_in(known, (NODE, put(NODE, NODE, (3, "d4")))) == {EXISTED}
