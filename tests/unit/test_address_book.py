"""Choice of addresses to dial: failures pause an endpoint, claims are bounded per subnet and in all."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.clock import ManualClock
from swarm.interfaces import PeerAddress
from swarm.peers.address_book import (
    ALIVE_BURST,
    FORGOTTEN_AFTER,
    LONGEST_PAUSE_KNOWN_S,
    LONGEST_PAUSE_S,
    MAX_ENDPOINTS,
    MAX_KNOWN,
    MAX_REMEMBERED,
    QUICK_TRIES,
    STRANGERS_BURST,
    STRANGERS_PER_S,
    SUBNET_BURST,
    SUBNET_PER_S,
    AddressBook,
    budget_key_of,
    save_known_peers,
)
from swarm.types import NodeId


def everybody(node_id: NodeId, credential: bytes) -> bool:
    return True


def book_at(clock: ManualClock, anchors: tuple[PeerAddress, ...] = ()) -> AddressBook:
    return AddressBook(clock, random.Random(0), anchors)


def peer(number: int, endpoint: str = "") -> PeerAddress:
    return PeerAddress(node_id=f"{number:064x}", endpoint=endpoint or f"127.0.0.1:{1 + number}")


def dials(book: AddressBook, clock: ManualClock, addresses: list[PeerAddress], seconds: int) -> int:
    """Number of dials, all of which fail, to claimed addresses when each is tried once a second."""
    before = book.num_failed
    for _ in range(seconds):
        for address in addresses:
            if book.begin_dial(address):
                book.record_failure(address)
        clock.advance(1.0)
    return book.num_failed - before


def test_a_thousand_keys_with_one_dead_endpoint_cost_a_few_dials_in_the_first_minute() -> None:
    clock = ManualClock()
    claims = [peer(number, "198.51.100.7:22") for number in range(1000)]
    assert dials(book_at(clock), clock, claims, seconds=60) <= 4


@pytest.mark.parametrize(
    "endpoint",
    [
        lambda n: f"8.8.8.{n % 256}:{1 + n}",
        lambda n: f"[2001:4860:4860:{n:x}::1]:22",
        lambda n: f"n{n}.example.org:22",
        lambda n: f"{134744072 + 0 * n}:{1 + n}",  # 8.8.8.8 in one number, at any port
        lambda n: f"8.8.0x808:{1 + n}",
    ],
)
def test_whatever_is_claimed_a_subnet_gets_three_dials_and_one_a_minute(endpoint: Callable[[int], str]) -> None:
    clock = ManualClock()
    claims = [peer(number, endpoint(number)) for number in range(300)]
    assert dials(book_at(clock), clock, claims, seconds=600) <= SUBNET_BURST + 600 * SUBNET_PER_S + 1


def test_claims_of_any_kind_cost_a_dial_every_other_second_in_all() -> None:
    clock = ManualClock()
    book = book_at(clock)
    claims = [peer(number, f"{11 + number % 90}.{number // 90}.0.1:22") for number in range(2000)]
    assert dials(book, clock, claims, seconds=300) <= STRANGERS_BURST + 300 * STRANGERS_PER_S
    local = [peer(number, f"10.0.0.1:{number + 1}") for number in range(2000)]
    assert dials(book, clock, local, seconds=300) <= STRANGERS_BURST + 300 * STRANGERS_PER_S
    # keys that are alive are not bound by subnets, but by the same budget
    clock.advance(600.0)
    num_begun = sum(book.begin_dial(address, is_alive=True) for address in claims)
    assert num_begun <= STRANGERS_BURST


def test_a_live_key_that_claims_address_after_address_of_one_subnet_gets_as_little() -> None:
    clock = ManualClock()
    book = book_at(clock)
    for number in range(600):
        address = peer(1, f"8.8.8.{number % 256}:{1 + number}")
        if book.begin_dial(address, is_alive=True):
            book.record_failure(address)
        clock.advance(1.0)
    assert book.num_failed <= ALIVE_BURST + 600 * SUBNET_PER_S + 1


def test_claims_of_strangers_do_not_keep_a_live_newcomer_of_their_subnet_out() -> None:
    clock = ManualClock()
    book = book_at(clock)
    dials(book, clock, [peer(number, f"8.8.8.{number % 256}:{1 + number}") for number in range(300)], seconds=50)
    newcomer = peer(1000, "8.8.8.8:7700")
    assert not book.begin_dial(newcomer) and book.begin_dial(newcomer, is_alive=True)
    far = [peer(2000 + number, f"{11 + number}.0.0.1:22") for number in range(80)]
    dials(book, clock, far, seconds=60)
    follower = peer(3000, "9.9.9.9:7700")
    assert book.begin_dial(follower, is_alive=True), "a reserve is left for those that called us"


def test_dials_that_are_answered_cost_nothing() -> None:
    clock = ManualClock()
    book = book_at(clock)
    for number in range(MAX_KNOWN):
        address = peer(number, f"8.8.8.{number % 256}:{1 + number}")
        assert book.begin_dial(address)
        book.record_answer(address)
    assert book.num_failed == 0 and len(book.known) == MAX_KNOWN


def test_a_known_peer_is_tried_three_times_at_once_and_then_ever_more_seldom() -> None:
    clock = ManualClock()
    book, address = book_at(clock), peer(1)
    book.record_answer(address)
    for _ in range(QUICK_TRIES):
        assert book.may_dial(address)
        book.record_failure(address)
    pauses: list[float] = []
    for _ in range(8):
        waited_s = 0.0
        while not book.may_dial(address):
            clock.advance(0.5)
            waited_s += 0.5
        pauses.append(waited_s)
        book.record_failure(address)
    assert 2.5 <= pauses[0] <= 5.0 and pauses[4] > pauses[1]
    assert max(pauses) <= LONGEST_PAUSE_KNOWN_S + 0.5
    book.record_answer(address)
    book.record_working(address)
    assert book.may_dial(address)


def test_a_peer_that_never_answers_again_is_forgotten() -> None:
    clock = ManualClock()
    book, address = book_at(clock), peer(1)
    book.record_answer(address)
    for _ in range(FORGOTTEN_AFTER):
        book.record_failure(address)
    assert not book.known
    clock.advance(LONGEST_PAUSE_S + 1)
    assert book.may_dial(address), "its endpoint may be somebody else's by then"


def test_an_endpoint_belongs_to_who_answered_there_whoever_claims_it() -> None:
    clock = ManualClock()
    book, owner, claim = book_at(clock), peer(1, "8.8.8.8:1"), peer(2, "8.8.8.8:1")
    assert book.begin_dial(claim)
    book.record_other(claim, owner.node_id)
    assert book.is_known(owner) and not book.is_known(claim)
    assert not book.may_dial(claim) and book.may_dial(owner)
    assert not any(book.may_dial(peer(number, owner.endpoint)) for number in range(3, 1000))
    # it moved, and another one listens at its old port
    moved = peer(1, "8.8.8.8:2")
    book.record_answer(moved)
    book.record_answer(claim)
    assert book.is_known(moved) and book.is_known(claim) and len(book.known) == 2


def test_a_peer_whose_address_works_is_not_moved_to_one_that_forwards_to_it() -> None:
    clock = ManualClock()
    book, owner, proxy = book_at(clock), peer(1, "8.8.8.8:1"), peer(2, "9.9.9.9:1")
    book.record_answer(owner)
    assert book.begin_dial(proxy)
    book.record_other(proxy, owner.node_id)
    assert book.is_known(owner) and not book.may_dial(proxy)
    for _ in range(QUICK_TRIES):  # its address works no longer: the other one may be its new one
        book.record_failure(owner)
    book.record_other(proxy, owner.node_id)
    assert book.is_known(peer(1, proxy.endpoint)) and not book.is_known(owner)


def test_dead_claims_to_a_live_endpoint_do_not_make_it_pause() -> None:
    clock = ManualClock()
    book, owner = book_at(clock), peer(1, "8.8.8.8:1")
    book.record_answer(owner)
    assert dials(book, clock, [peer(number, owner.endpoint) for number in range(2, 500)], seconds=60) == 0
    assert book.may_dial(owner)


def test_tables_are_bounded_and_newcomers_make_room_for_newcomers() -> None:
    clock = ManualClock()
    book = book_at(clock)
    old = [peer(number) for number in range(100)]
    for address in old:
        book.record_answer(address)
    clock.advance(10.0)
    for number in range(1000, 3000):
        book.record_answer(peer(number))
        clock.advance(0.01)
    assert len(book.known) == MAX_KNOWN and all(book.is_known(address) for address in old)
    for number in range(2 * MAX_ENDPOINTS):
        book.record_failure(peer(number, f"10.0.{number % 256}.{number // 256}:9"))
    assert len(book._failures) <= MAX_ENDPOINTS and len(book._owners) == len(book.known)


# --- on the disk ------------------------------------------------------------------------------------------


def test_peers_that_work_are_known_after_a_restart_with_their_standing(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "known-peers.json"
    book = book_at(clock)
    for number in range(100):
        book.record_answer(peer(number))
        clock.advance(1.0)
    for _ in range(QUICK_TRIES):
        book.record_failure(peer(0))
    save_known_peers(path, book.to_remember())
    clock.advance(1e6)
    after = book_at(clock)
    after.restore(path, everybody)
    assert list(after.known) == [peer(number).node_id for number in range(1, 1 + MAX_REMEMBERED)]
    assert [p.since_s for p in after.known.values()] == [book.known[node_id].since_s for node_id in after.known]


def test_who_may_not_take_part_any_more_is_not_taken_from_the_disk(tmp_path: Path) -> None:
    book, path = book_at(ManualClock()), tmp_path / "known-peers.json"
    for number in range(3):
        book.record_answer(peer(number))
        book.known[peer(number).node_id].credential = b"%d" % number
    save_known_peers(path, book.to_remember())
    after = book_at(ManualClock())
    after.restore(path, lambda node_id, credential: credential != b"1")
    assert {p.credential for p in after.known.values()} == {b"0", b"2"}


GOOD = {"node_id": "1" * 64, "endpoint": "127.0.0.1:7", "since_s": 5.0, "credential": ""}


@pytest.mark.parametrize(
    ("content", "num_peers"),
    [
        (b"", 0),
        (b"\xff\xfe", 0),
        (b"[" * 60_000, 0),
        (b"null", 0),
        (b'{"peers": 5}', 0),
        (b'{"peers": {"a": 1}}', 0),
        (json.dumps({"peers": [GOOD, 1, None, {}, [GOOD]]}).encode(), 1),
        (json.dumps({"peers": [GOOD | {"endpoint": "0.0.0.0:1"}, GOOD | {"endpoint": 5}]}).encode(), 0),
        (json.dumps({"peers": [GOOD | {"since_s": float("nan")}, GOOD | {"node_id": "x"}]}).encode(), 0),
        (json.dumps({"peers": [GOOD] * 3}).encode(), 1),
        (json.dumps({"peers": [GOOD] * 3}).encode()[:-9], 0),
        (json.dumps({"peers": [GOOD | {"node_id": f"{n:064x}"} for n in range(9)]}).encode(), 1),
    ],
)
def test_rubbish_on_the_disk_is_passed_over(tmp_path: Path, content: bytes, num_peers: int) -> None:
    path = tmp_path / "known-peers.json"
    path.write_bytes(content)
    book = book_at(ManualClock())
    book.restore(path, everybody)
    assert len(book.known) == num_peers and all(p.since_s <= ManualClock().now_s() for p in book.known.values())
    book.restore(tmp_path / "missing", everybody)
    save_known_peers(tmp_path / "no" / "such" / "folder.json", book.to_remember())  # says so in the log


def test_units_are_subnets_domains_and_local_ports() -> None:
    assert budget_key_of("8.8.8.8:1") == budget_key_of("8.8.8.9:2") == "8.8.8.0/24"
    assert budget_key_of("[::ffff:8.8.8.8]:1") == "8.8.8.0/24"
    assert budget_key_of("a.example.org:1") == budget_key_of("b.c.Example.org:2") == "example.org"
    assert len({budget_key_of(e) for e in ("127.0.0.1:1", "127.0.0.1:2", "10.0.0.1:1", "[::1]:1", "node:1")}) == 5
