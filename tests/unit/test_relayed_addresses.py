"""Addresses behind relays: who is blamed for a dial that fails, and what claims to a relay cost those behind it."""

import random

from swarm.clock import ManualClock
from swarm.interfaces import PeerAddress
from swarm.peers.address_book import LEADING_TRIES, AddressBook
from swarm.testing.builders import make_identity

RELAY = f"8.8.8.8:7700/{make_identity(1).node_id}"
OTHER = f"9.9.9.9:7700/{make_identity(2).node_id}"


def behind(relay: str, number: int) -> PeerAddress:
    return PeerAddress(node_id=make_identity(10 + number).node_id, endpoint=relay)


def book_at(clock: ManualClock) -> AddressBook:
    return AddressBook(clock, random.Random(0))


def is_tried(book: AddressBook, address: PeerAddress) -> bool:
    """True where the book lets us dial it; then nobody answers."""
    if not book.begin_dial(address):
        return False
    book.record_failure(address, "3.3.3.0/24")
    return True


def test_claims_to_relays_that_lead_nowhere_count_against_their_author() -> None:
    clock = ManualClock()
    book, liar = book_at(clock), behind(RELAY, 0)
    assert is_tried(book, liar)
    assert book.num_false_claims(liar.node_id) == 1
    assert book.num_false_claims(make_identity(9).node_id, "3.3.3.0/24") == 1


def test_a_relay_that_turns_does_not_harm_who_is_behind_it() -> None:
    book = book_at(ManualClock())
    there, later = behind(RELAY, 0), behind(RELAY, 1)
    assert book.begin_dial(there)
    book.record_answer(there)
    for node in (there, later):
        assert is_tried(book, node)
        assert book.num_false_claims(node.node_id) == 0
        assert not book.may_dial(node), "but it pauses"
        assert book.best_address(node.node_id, (RELAY, OTHER)).endpoint == OTHER, "and the next relay is tried at once"


def test_false_claims_to_a_relay_that_works_do_not_keep_those_behind_it_out() -> None:
    clock = ManualClock()
    book = book_at(clock)
    first = behind(RELAY, 0)
    assert book.begin_dial(first)
    book.record_answer(first)
    assert sum(is_tried(book, behind(RELAY, number)) for number in range(1, 7)) == 6
    assert book.begin_dial(behind(RELAY, 20))


def test_a_relay_that_led_somewhere_once_is_an_address_like_others_after_many_failures() -> None:
    clock = ManualClock()
    book = book_at(clock)
    first = behind(RELAY, 0)
    assert book.begin_dial(first)
    book.record_answer(first)
    num_tried = 0
    for number in range(1, 400):
        clock.advance(2.0)
        num_tried += is_tried(book, behind(RELAY, number))
    assert LEADING_TRIES <= num_tried <= LEADING_TRIES + 3 + 800 / 60, "then three, and one a minute"


def test_dead_adverts_do_not_use_up_the_only_way_out() -> None:
    """Our own relay is the only way out, and all adverts lead through it: 40 nodes that left, and one that is there."""
    clock = ManualClock()
    book = book_at(clock)
    nodes = [behind(RELAY, number) for number in range(41)]
    relay = nodes[0].relay
    assert relay is not None
    book.relays = (relay,)
    num_tried = 0
    for node in nodes:
        num_tried += is_tried(book, node)
        clock.advance(2.0)
    assert num_tried == 41


def test_where_nothing_answers_but_our_own_relay_it_is_asked_first_until_something_else_does() -> None:
    clock = ManualClock()
    book = book_at(clock)
    relay = PeerAddress(node_id=make_identity(50).node_id, endpoint="8.8.0.1:443")
    book.relays = (relay,)
    nodes = [
        PeerAddress(node_id=make_identity(60 + number).node_id, endpoint=f"8.{number}.0.1:7700") for number in range(5)
    ]

    def best(node: PeerAddress) -> PeerAddress:
        return book.best_address(node.node_id, (node.endpoint,))

    def through(node: PeerAddress) -> PeerAddress:
        return PeerAddress(node_id=node.node_id, endpoint=f"{relay.endpoint}/{relay.node_id}")

    for node in nodes[:3]:
        assert best(node) == node
        book.record_failure(node)
    assert best(nodes[3]) == nodes[3], "dead addresses say nothing of our network"
    for node in nodes[:2]:
        assert best(node) == through(node)
        book.record_answer(through(node))
    assert best(nodes[3]) == through(nodes[3])
    book.record_answer(through(nodes[3]))
    assert best(nodes[4]).relay == relay, "an answer through it says nothing of the others"
    book.record_answer(nodes[4])
    assert best(nodes[2]) != nodes[2] and best(nodes[4]) == nodes[4]
    clock.advance(3600.0)
    assert best(nodes[2]) == nodes[2]
