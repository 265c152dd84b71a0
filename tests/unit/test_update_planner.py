"""The known patches of a trainer, and the planned chain."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.testing.builders import make_identity
from swarm.types import PolicyVersion
from swarm.weight_sync.update_planner import MAX_REFUSALS, KnownPatches, News, UpdatePlanner
from swarm.weights import patch_graph
from swarm.weights.codec import Codec
from swarm.weights.manifest import Manifest, layout_digest, seal_manifest
from swarm.weights.patch_graph import Patch
from swarm.weights.payload import CHUNK_BYTES, chunk_digest
from swarm.weights.tensors import TensorSpec

OWNER = make_identity(1)
SPECS = (TensorSpec(name="w", dtype="bfloat16", shape=(2,)),)


def version(step: int, branch: str = "") -> PolicyVersion:
    return PolicyVersion(policy_id=OWNER.node_id, step=step, digest=chunk_digest(f"{step} {branch}".encode()))


def patch(step: int, base: int | None, num_chunks: int = 1, branch: str = "", base_branch: str | None = None) -> Patch:
    on = branch if base_branch is None else base_branch
    manifest = Manifest(
        version=version(step, branch),
        base=None if base is None else version(base, on),
        codec=Codec.FULL if base is None else Codec.DELTA,
        layout=layout_digest(SPECS),
        tensors=SPECS if base is None else (),
        hashes=(bytes(32),),
        payload_bytes=num_chunks * CHUNK_BYTES,
        chunks=tuple(chunk_digest(f"{branch}{on} {base}-{step} {at}".encode()) for at in range(num_chunks)),
    )
    return Patch(manifest=manifest, sealed=seal_manifest(manifest, OWNER))


def planner_of(*patches: Patch, held: PolicyVersion | None = None, max_chunks: int = 1000) -> UpdatePlanner:
    """Nothing of it is on the disk, which has room for so many chunks."""
    planner = UpdatePlanner(KnownPatches(OWNER.node_id), max_chunks * CHUNK_BYTES)
    for each in patches:
        assert planner.known.add(each, is_from_owner=True)[0] is News.NEW
        planner.set_missing(each, each.manifest.chunks)
    planner.set_held(held)
    return planner


def steps(patches: tuple[Patch, ...]) -> list[tuple[int | None, int]]:
    return [(None if each.manifest.base is None else each.manifest.base.step, each.version.step) for each in patches]


def test_the_owner_replaces_a_branch_from_its_first_differing_step_and_nobody_else_does() -> None:
    known = KnownPatches(OWNER.node_id)
    for each in (patch(0, None), patch(1, 0), patch(2, 1), patch(3, 2)):
        known.add(each, is_from_owner=True)
    other = patch(2, 1, branch="b", base_branch="")
    assert known.add(other, is_from_owner=False) == (News.CONFLICT, [])
    assert known.head == version(3)
    news, gone = known.add(other, is_from_owner=True)
    assert news is News.NEW and [each.version.step for each in gone] == [2, 3]
    assert known.head == version(2, "b") and len(known.patches) == 3


def test_a_patch_from_an_abandoned_base_is_of_another_branch() -> None:
    known = KnownPatches(OWNER.node_id)
    known.add(patch(2, None, branch="b"), is_from_owner=True)
    assert known.add(patch(3, 2), is_from_owner=False)[0] is News.CONFLICT


def test_a_rewind_forgets_what_was_beyond_it() -> None:
    known = KnownPatches(OWNER.node_id)
    for each in (patch(0, None), patch(1, 0), patch(2, 1)):
        known.add(each, is_from_owner=True)
    assert [each.version.step for each in known.rewind(1)] == [2]
    assert known.head == version(1) and known.rewind(1) == []


def test_a_rewound_follower_takes_the_anchor_since_nothing_starts_from_what_it_holds() -> None:
    planner = planner_of(patch(4, None, 9), patch(5, 4), held=version(6, "abandoned"))
    assert steps(planner.plan) == [(None, 4), (4, 5)]


def test_an_abandoned_branch_stays_abandoned_although_its_step_was_forgotten() -> None:
    """0 and 1, then 2, 3 and 4 of another branch; the patch to 3 was forgotten, so 4 is reached from 3 alone."""
    branch = patch(2, 1, branch="b", base_branch=""), patch(3, 2, branch="b"), patch(4, 3, branch="b")
    planner = planner_of(patch(0, None), patch(1, 0))
    for each in (patch(2, 1), patch(3, 2), *branch):
        planner.known.add(each, is_from_owner=True)
        planner.set_missing(each, each.manifest.chunks)
    planner.known.forget({branch[1].digest})
    planner.set_held(version(3))
    assert steps(planner.plan) == [(None, 0), (0, 1), (1, 2)] and not planner.known.is_behind(2, version(3))
    planner.set_held(version(3, "b"))  # merely forgotten: no reason to go back
    assert steps(planner.plan) == [(3, 4)] and planner.known.is_behind(2, version(3, "b"))


def test_the_cheapest_chain_is_planned_and_what_lies_on_the_disk_costs_next_to_nothing() -> None:
    patches = [patch(step, step - 1, 3) for step in range(1, 5)]
    catch_up, anchor = patch(4, 0, 5), patch(4, None, 40)
    planner = planner_of(patch(0, None, 40), *patches, catch_up, anchor, held=version(0))
    assert steps(planner.plan) == [(0, 4)]
    for each in patches[:3]:  # fetched before the catch-up patch was news of
        for chunk in each.manifest.chunks:
            planner.add_chunk(chunk)
    planner.replan()
    assert steps(planner.plan) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert list(planner.missing_chunks()) == list(patches[3].manifest.chunks)
    assert steps(planner.ready()) == [(0, 1), (1, 2), (2, 3)]


def test_equal_weights_need_no_payload_whatever_they_are_called() -> None:
    unnamed = PolicyVersion(policy_id="", step=0, digest=version(0).digest)
    planner = planner_of(patch(0, None, 9), held=unnamed)
    assert steps(planner.ready()) == [(None, 0)]
    planner.record_applied(version(0))
    assert planner.plan == () and planner.is_ready


def test_who_is_led_back_to_weights_of_before_takes_them_under_their_new_name() -> None:
    """0, then 1, then 2 with the weights of 0, whose anchor lies on the disk and would be the cheapest way there."""
    first, on = patch(0, None), patch(1, 0)
    manifest = patch(2, 1).manifest
    back = replace(manifest, version=replace(manifest.version, digest=first.version.digest))
    again = Patch(manifest=back, sealed=seal_manifest(back, OWNER))
    planner = planner_of(first, on, again, held=on.version)
    for chunk in (*first.manifest.chunks, *again.manifest.chunks):
        planner.add_chunk(chunk)
    assert steps(planner.plan) == [(1, 2)] and planner.ready() == planner.plan


@pytest.mark.parametrize("is_unusable", [False, True])
def test_a_refused_version_is_tried_again_and_then_passed_by(is_unusable: bool) -> None:
    planner = planner_of(patch(0, None), patch(1, 0), patch(2, 1), patch(2, 0, 2), held=version(0))
    for _ in range(MAX_REFUSALS):
        assert steps(planner.plan) == [(0, 1), (1, 2)] or steps(planner.plan) == [(0, 2)]
        planner.record_refusal(version(2), is_unusable=is_unusable)
        planner.replan()
    assert steps(planner.plan) == [(0, 1)]
    newest = patch(3, 2)
    planner.known.add(newest, is_from_owner=True)
    planner.set_missing(newest, newest.manifest.chunks)
    around = patch(3, 0, 4)
    planner.known.add(around, is_from_owner=True)
    planner.set_missing(around, around.manifest.chunks)
    planner.replan()
    if is_unusable:
        assert steps(planner.plan) == [(0, 3)], "not through what cannot be made"
    else:
        assert steps(planner.plan) in ([(0, 1), (1, 2), (2, 3)], [(0, 2), (2, 3)]), "it is only staged on the way"


def test_an_engine_that_took_nothing_for_a_while_goes_on_with_patches() -> None:
    planner = planner_of(patch(0, None, 90), patch(1, 0), patch(2, 1), held=version(0))
    for step in (2, 1):  # its disk is full, say
        for _ in range(MAX_REFUSALS):
            assert planner.plan[-1].version.step == step
            planner.record_refusal(version(step), is_unusable=False)
            planner.replan()
    assert planner.plan == ()
    newest, anchor = patch(3, 2), patch(3, None, 90)
    for each in (newest, anchor):
        planner.known.add(each, is_from_owner=True)
        planner.set_missing(each, each.manifest.chunks)
    planner.replan()
    assert steps(planner.plan) == [(0, 1), (1, 2), (2, 3)]
    for number in (1, 2):
        planner.set_missing(list(planner.known.patches)[number], [])
    assert planner.ready() == (), "what was refused is no target while the rest is fetched"
    planner.set_missing(newest, [])
    assert steps(planner.ready()) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("max_chunks", [1000, 250], ids=["not to be had", "no room"])
def test_that_no_chain_leads_to_the_newest_is_found_in_one_look(
    max_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_edges, heappush = 0, patch_graph.heappush

    def counted(frontier: list[Any], reached: Any) -> None:
        nonlocal num_edges
        num_edges += 1
        heappush(frontier, reached)

    chain = [patch(0, None, 200), *(patch(step, step - 1) for step in range(1, 100))]
    planner = planner_of(*chain, max_chunks=max_chunks)
    monkeypatch.setattr(patch_graph, "heappush", counted)
    planner.mark_unobtainable(chain[60].manifest.chunks[0])
    assert planner.plan[-1].version.step == min(59, max_chunks - 200)
    planner.mark_unobtainable(chain[0].manifest.chunks[0])
    assert planner.plan == () and num_edges <= 3 * len(chain)


def test_each_chunk_is_looked_at_a_few_times_in_all_also_beside_an_idle_holder_that_lacks_them() -> None:
    num_looks = 0
    planner = planner_of(patch(0, None, 1000))
    queue = planner.queue

    def lacks(_: bytes) -> bool:
        nonlocal num_looks
        num_looks += 1
        return False

    for at, chunk in enumerate(list(planner.missing_chunks())):
        assert queue.first("idle", lacks) is None
        assert queue.first("origin", lambda _: True) == at and queue[at] == chunk
        planner.add_chunk(chunk)
    assert num_looks == 1000 and planner.queue is queue and queue.first("origin", lambda _: True) is None


def test_a_chunk_that_did_not_come_or_that_a_holder_has_now_is_asked_for_again() -> None:
    queue = planner_of(patch(0, None, 3)).queue
    assert queue.first("a", lambda chunk: chunk != queue[0]) == 1
    assert queue.first("a", lambda _: True) == 1
    queue.rescan()
    assert queue.first("a", lambda _: True) == 0


def test_no_chain_leads_over_a_chunk_that_nobody_has_until_somebody_has_it() -> None:
    short_chain, long_chain = patch(1, 0), patch(1, None, 9)
    planner = planner_of(short_chain, long_chain, held=version(0))
    planner.mark_unobtainable(short_chain.manifest.chunks[0])
    assert steps(planner.plan) == [(None, 1)]
    planner.mark_obtainable(short_chain.manifest.chunks)
    assert steps(planner.plan) == [(0, 1)]


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_a_plan_starts_at_what_is_held_or_at_nothing_and_each_patch_where_the_last_one_ended(seed: int) -> None:
    rng = random.Random(seed)
    patches = [patch(0, None, 5)]
    for step in range(1, rng.randrange(2, 8)):
        patches += [patch(step, base, rng.randrange(1, 4)) for base in {step - 1, rng.randrange(step)}]
        patches += [patch(step, None, 5)] if rng.random() < 0.3 else []
    held = rng.choice([None, version(rng.randrange(4)), version(99, "gone")])
    planner = planner_of(*patches, held=held)
    for each in patches:
        if rng.random() < 0.4:
            planner.set_missing(each, [])
    planner.replan()
    at = None if held is None else held.digest
    for number, each in enumerate(planner.plan):
        base = each.manifest.base
        assert (base is None and number == 0) or (base is not None and base.digest == at)
        at = each.version.digest
    if planner.plan:
        assert planner.plan[-1].version == planner.known.head


def test_a_chain_that_the_disk_has_no_room_for_is_made_in_parts_or_replaced_by_a_smaller_one() -> None:
    chain = [patch(0, None, 3), *(patch(step, step - 1, 3) for step in range(1, 6))]
    planner = planner_of(*chain, max_chunks=10)
    assert steps(planner.plan) == [(None, 0), (0, 1), (1, 2)] and len(list(planner.missing_chunks())) == 9
    for chunk in list(planner.missing_chunks()):
        planner.add_chunk(chunk)
    planner.replan()
    assert steps(planner.plan) == [(None, 0), (0, 1), (1, 2)], "what is on the disk takes up room as well"
    planner.record_applied(version(2))
    assert steps(planner.plan) == [(2, 3), (3, 4), (4, 5)]
    anchor = patch(5, None, 10)
    planner.known.add(anchor, is_from_owner=True)
    planner.set_missing(anchor, anchor.manifest.chunks)
    planner.set_held(None)
    assert steps(planner.plan) == [(None, 5)], "dearer, as three of the chain are here, but it has room"
    assert planner_of(patch(0, None, 3), max_chunks=2).plan == ()


def test_an_engine_is_not_led_back_while_the_rest_is_still_fetched() -> None:
    anchor, onward = patch(4, None, 2), patch(7, 4)
    planner = planner_of(anchor, onward, held=version(6))  # the patch from 6 to 7 was never news of
    assert steps(planner.plan) == [(None, 4), (4, 7)]
    for chunk in anchor.manifest.chunks:
        planner.add_chunk(chunk)
    assert planner.ready() == ()
    for chunk in onward.manifest.chunks:
        planner.add_chunk(chunk)
    assert steps(planner.ready()) == [(None, 4), (4, 7)]


def test_an_engine_stays_where_it_is_while_nothing_newer_can_be_had() -> None:
    onward = patch(6, 5)
    planner = planner_of(patch(4, None), onward, held=version(5))
    planner.mark_unobtainable(onward.manifest.chunks[0])
    assert planner.plan == ()
