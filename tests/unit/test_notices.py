"""Notices of groups: origins take turns, nothing is lost or judged twice over breaks, and all of it is bounded."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from swarm.config import ReplayConfig
from swarm.episode import Actions
from swarm.errors import Unavailable
from swarm.exchange.admission import Admission
from swarm.interfaces import Producer, StreamItem, Verdict
from swarm.loops import notices as notices_module
from swarm.loops.notices import MAX_AT_ONCE, MAX_WAITING, Notice, Notices
from swarm.simulate.virtual.loop import run_virtual
from swarm.testing.builders import ScriptedVerifier, make_advert, make_group, make_identity, make_sealed
from swarm.types import Cursor, Digest, NodeId, SealedGroup, StreamFilter

from .neighbour_bench import FIRST, SECOND, Bench, Neighbour, play, scene

SLOW = "slow"
NEIGHBOUR = "n"


def make_notice(number: int, origin: str = "a", size_bytes: int = 1) -> Notice:
    return Notice(number.to_bytes(32), size_bytes, origin)


def make_notices(*waiting: Notice, known: Callable[[NodeId], bool] = lambda _: True) -> Notices:
    notices = Notices(NEIGHBOUR, 100, known)
    for notice in waiting:
        notices.put(notice)
    return notices


# --- the table ------------------------------------------------------------------------------------------


def test_of_one_origin_one_is_under_way_and_its_next_follows_in_order() -> None:
    notices = make_notices(make_notice(1), make_notice(2), make_notice(3, "b"))
    first, other = notices.take(), notices.take()
    assert (first, other) == (make_notice(1), make_notice(3, "b")) and not notices.has_next()
    notices.end(first)
    assert notices.take() == make_notice(2)


def test_what_the_neighbour_made_itself_is_fetched_though_all_places_are_taken() -> None:
    notices = make_notices(*(make_notice(number, f"o{number}") for number in range(MAX_AT_ONCE + 1)))
    for _ in range(MAX_AT_ONCE):
        notices.take()
    assert not notices.has_next()
    notices.put(make_notice(99, NEIGHBOUR))
    assert notices.take().origin == NEIGHBOUR and not notices.has_next()


def test_two_of_the_largest_size_are_under_way_at_a_time() -> None:
    notices = make_notices(*(make_notice(number, f"o{number}", size_bytes=100) for number in range(3)))
    first = notices.take()
    notices.take()
    assert not notices.has_next()
    notices.end(first)
    assert notices.has_next()


def test_free_keys_whose_groups_fill_a_honest_neighbour_neither_delay_nor_displace_those_of_known_origins() -> None:
    """Each free key made one group that takes long."""

    def is_known(origin: NodeId) -> bool:
        return origin == "honest"

    honest = [make_notice(5000 + number, "honest") for number in range(4)]
    notices = make_notices(*(make_notice(number, f"o{number}") for number in range(MAX_WAITING)), known=is_known)
    while notices.has_next():
        notices.take()  # whose verdict nobody waits for
    for notice in honest:
        notices.put(notice)
    for number in range(MAX_WAITING):
        notices.put(make_notice(1000 + number, f"p{number}"))
    taken = list[Notice]()
    while notices.has_next():
        taken.append(notices.take())
        notices.end(taken[-1])
    assert taken == honest and len(notices) <= MAX_WAITING


def test_an_origin_that_nobody_knows_has_one_turn_of_eight() -> None:
    notices = make_notices(*(make_notice(number, "k") for number in range(20)), known=lambda origin: origin == "k")
    notices.put(make_notice(99, "new"))
    order = list[NodeId]()
    while notices.has_next():
        notice = notices.take()
        notices.end(notice)
        order.append(notice.origin)
    assert order.index("new") == 7


def test_where_no_room_comes_the_origin_with_most_loses_its_oldest_and_nobody_waits_twice() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        notices = make_notices(*(make_notice(number, "flood") for number in range(MAX_WAITING)))
        began_s = loop.time()
        for number in range(1000, 1050):
            await notices.add(make_notice(number, "honest"))
        assert loop.time() - began_s == notices_module.PATIENCE_S
        assert len(notices) == MAX_WAITING and notices.num_dropped == 50
        while notices.has_next():
            notices.end(notices.take())
        assert not notices._notices and not notices._is_stuck

    run_virtual(main())


def test_a_burst_that_is_worked_off_loses_nothing() -> None:
    async def main() -> None:
        notices, taken = make_notices(), 0

        async def work() -> None:
            nonlocal taken
            while True:
                await notices.changed.until(notices.has_next)
                notice = notices.take()
                await asyncio.sleep(0.2)
                notices.end(notice)
                taken += 1

        worker = asyncio.create_task(work())
        for number in range(3 * MAX_WAITING):
            await notices.add(make_notice(number))
        await asyncio.sleep(60.0)
        worker.cancel()
        assert taken == 3 * MAX_WAITING and not notices.num_dropped

    run_virtual(main())


# --- the stream of a neighbour --------------------------------------------------------------------------


class SlowVerifier(ScriptedVerifier):
    """Takes a minute for answers of some."""

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        if any(SLOW in str(actions) for actions in episodes):
            await asyncio.sleep(60.0)
        return await super().verify(env, task_id, episodes, producer)


class Relaying(Neighbour):
    """Announces what others made and sends its own, over lines that break."""

    def __init__(self, node_id: NodeId, groups: list[SealedGroup], rng: random.Random, breaks: float = 0.0) -> None:
        super().__init__(node_id, [])
        self.groups, self.rng, self.breaks = groups, rng, breaks
        self.by_digest = {sealed.digest: sealed for sealed in groups}

    async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        await asyncio.sleep(self.after_s)
        for number, sealed in enumerate(self.groups):
            if number < cursor.sequence:
                continue
            await asyncio.sleep(self.rng.random() / 10)
            if self.rng.random() < self.breaks:
                raise Unavailable("the line broke")
            yield StreamItem(
                cursor=Cursor(epoch="e", sequence=number + 1),
                digest=sealed.digest,
                size_bytes=sealed.size_bytes,
                sealed=sealed if sealed.producer == self.node_id else None,
                producer=sealed.producer,
            )
        await asyncio.Event().wait()

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        await asyncio.sleep(self.rng.random() / 10)
        if self.rng.random() < self.breaks:
            raise Unavailable("the line broke")
        self.fetched.append(digest)
        return self.by_digest[digest]


@pytest.mark.parametrize("seed", range(4))
def test_over_breaks_every_announced_group_is_admitted_once_whatever_waits(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged, admit, rng = Counter[Digest](), Admission.admit, random.Random(seed)
    makers = [FIRST, SECOND, *(make_identity(20 + number) for number in range(5))]
    neighbours = makers[:2]

    async def count(self: Admission, sealed: SealedGroup, via: NodeId) -> Any:
        judged[sealed.digest] += 1
        return await admit(self, sealed, via)

    async def scene(bench: Bench) -> None:
        groups = list[SealedGroup]()
        for task_id in range(120):
            maker = rng.choice(makers)
            wrong = SLOW if maker in makers[4:] and rng.random() < 0.2 else "??"
            texts = [str(task_id % 10), wrong] * 4
            created_at_s = bench.clock.now_s() + 60.0  # it takes a while until all of them came
            group = make_group(maker.node_id, task_id=task_id, texts=texts, created_at_s=created_at_s)
            groups.append(make_sealed(group, maker))
        for identity in neighbours:
            bench.add(Relaying(identity.node_id, groups, rng, breaks=0.1))
        await asyncio.sleep(1500.0)
        assert bench.agent.ingest.num_admitted == len(groups) and bench.agent.num_failures == 0
        of_others = [sealed for sealed in groups if sealed.producer not in {each.node_id for each in neighbours}]
        assert {judged[sealed.digest] for sealed in of_others} == {1} and not len(bench.agent.ingest.fetching)

    monkeypatch.setattr(Admission, "admit", count)
    play(scene, {"verifier": SlowVerifier()}, replay=ReplayConfig(max_age_s=3600.0))


@scene({"verifier": SlowVerifier()})
async def test_what_waits_when_a_stream_ends_is_fetched_by_the_next_one_of_that_neighbour(bench: Bench) -> None:
    """More adverts than places change what is asked of a neighbour, and its stream is replaced."""
    slow = make_group(SECOND.node_id, texts=["7", SLOW] * 4, created_at_s=bench.clock.now_s())
    behind = make_group(SECOND.node_id, task_id=8, created_at_s=bench.clock.now_s())
    groups = [make_sealed(group, SECOND) for group in (slow, behind)]
    bench.add(Relaying(FIRST.node_id, groups, random.Random(0)))
    await asyncio.sleep(10.0)
    bench.adverts += [make_advert(make_identity(50 + number).node_id) for number in range(20)]
    await asyncio.sleep(120.0)
    assert bench.agent.ingest.num_admitted == 2


class Stalling(Relaying):
    """Announces what others made before anybody else does, and delivers nothing."""

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        self.fetched.append(digest)
        await asyncio.sleep(timeout_s)
        raise Unavailable("not in time")


@scene()
async def test_neighbours_that_announce_first_and_do_not_deliver_withhold_an_origin_for_seconds_only(
    bench: Bench,
) -> None:
    """Three of them, one after the other; each could have all of FETCH_TIMEOUT_S."""
    victim = bench.made(1)
    for number in range(3):
        bench.add(Stalling(make_identity(30 + number).node_id, [victim], random.Random(number)))
    honest = Relaying(SECOND.node_id, [victim], random.Random(9))
    honest.after_s = 1.0
    bench.add(honest)
    await asyncio.sleep(25.0)
    assert bench.agent.ingest.num_admitted == 1
    await asyncio.sleep(200.0)
    assert bench.agent.ingest.num_admitted == 1 and not bench.agent.num_failures


@scene()
async def test_a_neighbour_that_fails_to_deliver_is_asked_again_after_longer_and_longer_waits(bench: Bench) -> None:
    class Refusing(Relaying):
        async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
            self.fetched.append(digest)
            raise Unavailable("not now")

    own = make_sealed(make_group(FIRST.node_id, created_at_s=bench.clock.now_s()), FIRST)
    neighbour = Refusing(FIRST.node_id, [bench.made(1), own], random.Random(0))
    bench.add(neighbour)
    await asyncio.sleep(60.0)
    assert 5 < len(neighbour.fetched) < 20
    assert bench.agent.ingest.num_admitted == 1, "what it made itself comes all the same"
