"""Turns of answers that are scored: newcomers by what they used lately, slow answers aside, a place for each kind."""

import asyncio
import random

from swarm.environments.sandbox.scoring_turns import HALF_LIFE_S, NUM_PLACES, SLOW_FOR_S, Lane, ScoringTurns
from swarm.interfaces import Producer
from swarm.simulate.virtual.loop import run_virtual
from swarm.types import NodeId


class Bench:
    """Turns with a clock that stands, and who had them."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = ScoringTurns(lambda: self.now_s)
        self.order: list[str] = []
        self.release = asyncio.Event()

    async def take(self, producer: Producer, lane: Lane | None = None) -> None:
        async with self.turns.of(producer, lane or self.turns.lane_of(producer, "")):
            self.order.append(producer.node_id)
            await self.release.wait()


def make_producer(name: str, origin: str = "", is_known: bool = False, **changes: bool) -> Producer:
    return Producer(node_id=NodeId(name), is_known=is_known, origin=origin, **changes)


async def test_newcomers_hold_two_places_one_of_them_where_a_slow_answer_runs() -> None:
    bench = Bench()
    tasks = [asyncio.create_task(bench.take(make_producer(f"new {i}"))) for i in range(4)]
    await asyncio.sleep(0)
    assert len(bench.order) == NUM_PLACES - 1
    known = asyncio.create_task(bench.take(make_producer("known", is_known=True)))
    await asyncio.sleep(0)
    assert bench.order[-1] == "known"
    tasks.append(asyncio.create_task(bench.take(make_producer("slow"), Lane.SLOW)))
    bench.release.set()
    await asyncio.gather(known, *tasks)
    assert len(bench.order) == 6


async def test_slow_answers_hold_one_place_however_many_there_are() -> None:
    bench = Bench()
    slow = [asyncio.create_task(bench.take(make_producer(f"slow {i}"), Lane.SLOW)) for i in range(5)]
    await asyncio.sleep(0)
    assert bench.order == ["slow 0"]
    newcomer = asyncio.create_task(bench.take(make_producer("new")))
    await asyncio.sleep(0)
    assert bench.order == ["slow 0", "new"]
    bench.release.set()
    await asyncio.gather(newcomer, *slow)


async def test_a_newcomer_goes_before_those_whose_subnet_used_more_lately() -> None:
    bench = Bench()
    busy = [asyncio.create_task(bench.take(make_producer(f"busy {i}", origin="a"))) for i in range(3)]
    busy += [asyncio.create_task(bench.take(make_producer(f"other {i}", origin="b"))) for i in range(3)]
    await asyncio.sleep(0)
    assert bench.order == ["busy 0", "other 0"], "one place for each subnet"
    bench.turns.charge(make_producer("busy 0", origin="a"), 0.05)
    bench.turns.charge(make_producer("other 0", origin="b"), 0.04)
    late = asyncio.create_task(bench.take(make_producer("late", origin="c")))
    await asyncio.sleep(0)
    bench.release.set()
    await asyncio.gather(late, *busy)
    assert bench.order[2] == "late"


async def test_keys_of_one_subnet_are_served_by_what_each_of_them_used() -> None:
    bench = Bench()
    first = asyncio.create_task(bench.take(make_producer("first", origin="a")))
    await asyncio.sleep(0)
    bench.turns.charge(make_producer("heavy", origin="a"), 0.05)
    rest = [asyncio.create_task(bench.take(make_producer(name, origin="a"))) for name in ("heavy", "light")]
    await asyncio.sleep(0)
    bench.release.set()
    await asyncio.gather(first, *rest)
    assert bench.order == ["first", "light", "heavy"]


async def test_who_sent_slow_answers_goes_aside_for_a_while_and_so_does_its_subnet_while_it_is_unknown() -> None:
    bench, culprit = Bench(), make_producer("culprit", origin="a")
    neighbour, friend = make_producer("neighbour", origin="a"), make_producer("friend", origin="a", is_known=True)
    bench.turns.note_overrun(culprit, "")
    lanes = [bench.turns.lane_of(producer, "") for producer in (culprit, neighbour, friend)]
    assert lanes == [Lane.SLOW, Lane.SLOW, Lane.KNOWN]
    bench.now_s = SLOW_FOR_S
    assert bench.turns.lane_of(culprit, "") is Lane.NEW


def test_known_keys_of_one_subnet_with_slow_answers_are_one_beside_others() -> None:
    async def scene() -> float:
        now_s = asyncio.get_running_loop().time
        turns = ScoringTurns(now_s)

        async def score(producer: Producer) -> None:
            async with turns.of(producer, Lane.SLOW):
                await asyncio.sleep(0.4)
                turns.charge(producer, 0.4, is_slow=True)

        async def flood(name: str) -> None:
            while True:
                await score(make_producer(name, origin="a", is_known=True))

        async with asyncio.TaskGroup() as tasks:
            flooding = [tasks.create_task(flood(f"key {number}")) for number in range(32)]
            await asyncio.sleep(60.0)
            worst_s = 0.0
            for _ in range(20):
                began_s = now_s()
                await score(make_producer("honest", origin="b", is_known=True))
                worst_s = max(worst_s, now_s() - began_s)
            for task in flooding:
                task.cancel()
        return worst_s

    assert run_virtual(scene()) < 1.5


def test_slow_answers_that_a_neighbour_passes_on_send_none_of_its_others_aside() -> None:
    bench = Bench()
    culprit, honest = (make_producer(name, origin="relayed by x", is_relayed=True) for name in ("culprit", "honest"))
    bench.turns.note_overrun(culprit, "")
    assert bench.turns.lane_of(culprit, "") is Lane.SLOW
    assert bench.turns.lane_of(honest, "") is Lane.NEW


async def place_of(bench: Bench, late: Producer, *before: Producer) -> int:
    """Number of earlier callers that are served before a known producer that used more than they did lately."""
    bench.turns.charge(late, 0.02)
    holding = asyncio.create_task(bench.take(make_producer("first", is_known=True)))
    holding_too = [asyncio.create_task(bench.take(make_producer(f"new {number}"))) for number in range(2)]
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(bench.take(producer)) for producer in (*before, late)]
    await asyncio.sleep(0)
    bench.release.set()
    await asyncio.gather(holding, *holding_too, *tasks)
    return bench.order.index(late.node_id) - 3


async def test_free_keys_with_an_admitted_group_each_do_not_hold_up_who_is_established() -> None:
    """64 subnets, each of which sends one good group first, and then all of them at once."""
    sybils = [make_producer(f"s{number}", origin=f"s{number}", is_known=True) for number in range(64)]
    member = make_producer("member", origin="member", is_known=True, is_established=True)
    assert await place_of(Bench(), member, *sybils) <= 3


async def test_who_is_known_and_not_established_has_one_turn_of_eight() -> None:
    bench = Bench()
    members = [make_producer(f"m{i}", origin=f"m{i}", is_known=True, is_established=True) for i in range(24)]
    assert await place_of(bench, make_producer("other", origin="o", is_known=True), *members) <= 8 + NUM_PLACES


async def test_known_keys_of_one_subnet_are_one_beside_a_known_one_of_another() -> None:
    bench = Bench()
    keys = [make_producer(f"k{number}", origin="a", is_known=True) for number in range(32)]
    for key in keys:
        bench.turns.charge(key, 0.01)
    assert await place_of(bench, make_producer("honest", origin="b", is_known=True), *keys) == 0


async def test_what_was_used_is_forgotten_by_half_every_half_life() -> None:
    bench = Bench()
    old, new = make_producer("old", origin="a"), make_producer("new", origin="b")
    bench.turns.charge(old, 0.1)
    bench.now_s = 2 * HALF_LIFE_S
    bench.turns.charge(new, 0.05)
    holders = [asyncio.create_task(bench.take(make_producer(f"h{i}"))) for i in range(2)]
    await asyncio.sleep(0)
    rest = [asyncio.create_task(bench.take(producer)) for producer in (new, old)]
    await asyncio.sleep(0)
    bench.release.set()
    await asyncio.gather(*holders, *rest)
    assert bench.order[2:] == ["old", "new"]


async def test_turns_that_are_cancelled_leave_nothing() -> None:
    turns, rng = ScoringTurns(lambda: 0.0), random.Random(3)

    async def take(number: int) -> None:
        producer = make_producer(str(number), is_known=number % 3 == 0)
        async with turns.of(producer, Lane.SLOW if number % 3 == 1 else turns.lane_of(producer, "")):
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    for _ in range(200):
        tasks = [asyncio.create_task(take(rng.randrange(6))) for _ in range(8)]
        for _ in range(rng.randrange(5)):
            await asyncio.sleep(0)
        for task in rng.sample(tasks, 3):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not any(turns._holding) and not any(turns._waiting) and not turns._num_waiting
