"""The directory behind relays: one that withholds adverts, or takes an announcement and drops it, hides nobody."""

import asyncio
import gc
import itertools
from typing import Any, cast

import pytest
from scenes import in_virtual_time

from swarm.clock import ManualClock
from swarm.errors import Unavailable
from swarm.interfaces import PeerAddress
from swarm.loops.relayed_directory import LOOKUP_EVERY_S, PATIENCE_S, RelayedDirectory
from swarm.peers.dht_records import CHECKED_AT_ONCE
from swarm.simulate.virtual.loop import run_virtual
from swarm.testing.builders import make_advert, make_identity
from swarm.types import Advert, NodeId

RELAYS = [PeerAddress(node_id=make_identity(number).node_id, endpoint=f"8.{number}.0.1:7700") for number in range(1, 3)]
OWN = make_identity(9)
TIMEOUT_S = 10.0  # of a call to a relay


class DhtPeer:
    """A DHT peer that reaches nobody; or a few, who do not answer."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.num_peers, self.is_bootstrapped = 0, False
        self.num_announced = 0

    def outlasting(self, advert: Advert) -> Advert:
        return advert

    async def announce(self, advert: Advert) -> None:
        self.num_announced += 1
        if self.num_peers:
            raise Unavailable("DHT announce took over 10.0 s")

    async def lookup(self) -> list[Advert]:
        if self.num_peers:
            raise Unavailable("DHT lookup took over 10.0 s")
        return []

    def seen(self) -> list[Advert]:
        return [make_advert(OWN.node_id)] * len(self.taken)

    async def stop(self) -> None:
        """There is nothing."""

    def take(self, data: bytes, relay: NodeId) -> bool:
        self.taken.append(data)
        return True


class AtRelays:
    """Calls to relays; those in `refusing` refuse."""

    def __init__(self) -> None:
        self.told: list[PeerAddress] = []
        self.asked: list[PeerAddress] = []
        self.refusing: set[PeerAddress] = set()
        self.withholding: set[PeerAddress] = set()
        self.silent: set[PeerAddress] = set()

    async def announce_at(self, relay: PeerAddress, advert: bytes) -> None:
        if relay in self.refusing:
            raise Unavailable("no room")
        self.told.append(relay)

    async def records_at(self, relay: PeerAddress) -> list[bytes]:
        self.asked.append(relay)
        if relay in self.silent:
            await asyncio.sleep(TIMEOUT_S)
            raise Unavailable("no answer")
        if relay in self.refusing:
            raise Unavailable("slow down")
        return [] if relay in self.withholding else [b"advert"]


class Scene:
    def __init__(self) -> None:
        self.clock, self.peer, self.at = ManualClock(), DhtPeer(), AtRelays()
        self.directory = RelayedDirectory(cast(Any, self.peer), cast(Any, self.at), lambda: RELAYS, OWN, self.clock)


async def test_a_relay_that_withholds_adverts_and_drops_announcements_hides_nobody() -> None:
    it = Scene()
    it.at.withholding = {RELAYS[0]}
    for _ in range(4):
        await it.directory.lookup()
        it.clock.advance(LOOKUP_EVERY_S)
    await it.directory.announce(make_advert(OWN.node_id))
    assert it.at.asked == 2 * RELAYS and len(it.peer.taken) == 2
    assert it.at.told == RELAYS


async def test_relays_that_refuse_are_an_error_where_all_do() -> None:
    it = Scene()
    it.at.refusing = {RELAYS[0]}
    await it.directory.announce(make_advert(OWN.node_id))
    await it.directory.lookup()
    assert it.at.told == [RELAYS[1]] and it.peer.taken == [b"advert"]
    it.at.refusing = set(RELAYS)
    with pytest.raises(Unavailable):
        await it.directory.announce(make_advert(OWN.node_id))


async def test_a_dht_peer_of_a_free_key_does_not_stand_for_the_directory() -> None:
    """The network lets through to one that listens on port 443, and it answers nothing."""
    it = Scene()
    it.peer.num_peers = 1
    await it.directory.announce(make_advert(OWN.node_id))
    assert it.at.told == RELAYS and it.peer.num_announced == 1
    assert await it.directory.lookup() == it.peer.seen() != []


async def test_a_relay_that_takes_its_time_keeps_an_advert_from_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    it, announce_at = Scene(), AtRelays.announce_at

    async def slow_first(self: AtRelays, relay: PeerAddress, advert: bytes) -> None:
        if relay == RELAYS[0]:
            await asyncio.Event().wait()
        await announce_at(self, relay, advert)

    monkeypatch.setattr(AtRelays, "announce_at", slow_first)
    announcing = asyncio.ensure_future(it.directory.announce(make_advert(OWN.node_id)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert it.at.told == [RELAYS[1]] and it.peer.num_announced == 1
    announcing.cancel()
    await asyncio.gather(announcing, return_exceptions=True)


@in_virtual_time
async def test_relays_that_say_nothing_cost_one_time_out_together() -> None:
    it, loop = Scene(), asyncio.get_running_loop()
    it.at.silent = set(RELAYS)
    began_s = loop.time()
    await it.directory.lookup()
    await asyncio.wait(it.directory._asked.values())
    assert it.at.asked == RELAYS
    assert loop.time() - began_s <= TIMEOUT_S + PATIENCE_S


@in_virtual_time
async def test_what_a_slow_relay_has_is_taken_though_a_quick_one_withholds_everything() -> None:
    it = Scene()
    records_at = it.at.records_at

    async def slowly(relay: PeerAddress) -> list[bytes]:
        await asyncio.sleep(6.0 if relay == RELAYS[0] else 0.0)
        return await records_at(relay)

    it.at.records_at = slowly  # type: ignore[method-assign]
    it.at.withholding = {RELAYS[1]}
    await it.directory.lookup()
    await asyncio.wait(it.directory._asked.values())
    assert it.peer.taken == [b"advert"]


async def test_relays_are_left_alone_while_a_peer_of_the_configuration_answers() -> None:
    it = Scene()
    it.peer.is_bootstrapped = True
    await it.directory.announce(make_advert(OWN.node_id))
    await it.directory.lookup()
    assert not it.at.told and not it.at.asked and it.peer.num_announced == 1


@pytest.mark.parametrize("silent", ["relays", "DHT"])
def test_who_takes_its_time_holds_up_no_look_up_that_others_answer(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two relays that answered after 20 s, the DHT being asked after them, held up every other look-up by 40 s."""
    num_asked = 0

    async def never(*arguments: Any) -> list[Any]:
        nonlocal num_asked
        num_asked += 1
        await asyncio.Event().wait()
        return []

    async def scene() -> None:
        it, loop, before = Scene(), asyncio.get_running_loop(), asyncio.all_tasks()
        began_s = loop.time()
        for _ in range(4):
            assert len(await it.directory.lookup()) == len(it.peer.taken)
            it.clock.advance(LOOKUP_EVERY_S)
        assert loop.time() - began_s <= 4 * PATIENCE_S
        assert len(it.at.asked) == (4 if silent == "DHT" else 0)
        num_silent = len(RELAYS) if silent == "relays" else 1
        assert num_asked == num_silent, "nobody is asked again while that is under way"
        await it.directory.stop()
        assert asyncio.all_tasks() == before

    if silent == "relays":
        monkeypatch.setattr(AtRelays, "records_at", never)
    else:
        monkeypatch.setattr(DhtPeer, "lookup", never)
    run_virtual(scene())


async def test_a_look_up_fails_where_nobody_answers_and_not_while_one_did() -> None:
    it = Scene()
    it.peer.num_peers = 1
    assert len(await it.directory.lookup()) == 1
    assert len(await it.directory.lookup()) == 1, "the relay is asked again later"
    it.clock.advance(LOOKUP_EVERY_S)
    it.at.refusing = set(RELAYS)
    with pytest.raises(Unavailable):
        await it.directory.lookup()


async def test_an_announcement_or_a_look_up_given_up_as_it_begins_leaves_nothing() -> None:
    it = Scene()
    for call in (it.directory.announce(make_advert(OWN.node_id)), it.directory.lookup()):
        given_up = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
    await it.directory.stop()
    gc.collect()  # a call that was made and never awaited is an error here
    assert len(asyncio.all_tasks()) == 1


async def test_others_have_their_turns_while_thousands_of_adverts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    it, turns = Scene(), list[int]()

    async def thousands(relay: PeerAddress) -> list[bytes]:
        return [b"advert"] * 4096

    async def others() -> None:
        while True:
            turns.append(len(it.peer.taken))
            await asyncio.sleep(0)

    monkeypatch.setattr(it.at, "records_at", thousands)
    other = asyncio.ensure_future(others())
    await it.directory.lookup()
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert max(after - before for before, after in itertools.pairwise(turns)) == CHECKED_AT_ONCE
