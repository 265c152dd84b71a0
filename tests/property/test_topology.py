"""Whom nodes follow: everyone is reached from everyone, and a peer that comes or goes changes little."""

import hashlib
import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.interfaces import PeerAddress
from swarm.peers.topology import choose_neighbours, rank
from swarm.types import NodeId

Graph = Mapping[NodeId, frozenset[NodeId]]

SWARMS = st.sets(st.integers(0, 10**6), min_size=2, max_size=40)
LIMITS = st.integers(1, 8)
KEPT = st.none() | st.integers(0, 9)  # seed of the order in which each node keeps peers


def peer(number: int, host: str = "127.0.0.1") -> PeerAddress:
    return PeerAddress(
        node_id=hashlib.sha256(str(number).encode()).hexdigest(), endpoint=f"{host}:{1 + number % 65535}"
    )


def follows(peers: list[PeerAddress], limit: int, seed: int | None = None) -> Graph:
    """Whom each node follows when all know the same; with a seed each keeps peers in an order of its own."""
    graph: dict[NodeId, frozenset[NodeId]] = {}
    for own in peers:
        kept = [] if seed is None else random.Random(f"{seed} {own.node_id}").sample(peers, len(peers))
        kept = [other for other in kept if other != own]
        graph[own.node_id] = frozenset(n.node_id for n in choose_neighbours(own.node_id, peers, limit, kept))
    return graph


def distances(graph: Graph, start: NodeId) -> dict[NodeId, int]:
    """Steps from a node to each that can be reached."""
    found, queue = {start: 0}, [start]
    for node in queue:
        for neighbour in graph[node] - found.keys():
            found[neighbour] = found[node] + 1
            queue.append(neighbour)
    return found


def turned(graph: Graph) -> Graph:
    return {node: frozenset(other for other in graph if node in graph[other]) for node in graph}


def is_strongly_connected(graph: Graph) -> bool:
    start = next(iter(graph))
    return all(len(distances(g, start)) == len(graph) for g in (graph, turned(graph)))


@given(numbers=SWARMS, limit=LIMITS, seed=KEPT)
def test_everyone_is_reached_from_everyone(numbers: set[int], limit: int, seed: int | None) -> None:
    graph = follows([peer(number) for number in numbers], limit, seed)
    assert is_strongly_connected(graph)
    assert all(len(chosen) == min(limit, len(numbers) - 1) for chosen in graph.values())
    assert all(node not in chosen for node, chosen in graph.items())


@given(numbers=SWARMS, limit=LIMITS, newcomer=st.integers(10**6 + 1, 2 * 10**6), seed=KEPT)
def test_a_peer_that_comes_or_goes_changes_at_most_one_neighbour_of_a_node(
    numbers: set[int], limit: int, newcomer: int, seed: int | None
) -> None:
    peers, added = [peer(number) for number in numbers], peer(newcomer)
    for own in peers:
        kept = [] if seed is None else random.Random(f"{seed} {own.node_id}").sample(peers, len(peers))
        kept = [other for other in kept if other != own]
        without = {n.node_id for n in choose_neighbours(own.node_id, peers, limit, kept)}
        with_it = {n.node_id for n in choose_neighbours(own.node_id, [*peers, added], limit, kept)}
        assert len(without - with_it) <= 1
        assert with_it - without <= {added.node_id}, "nothing else takes the place of what is there"


@given(numbers=SWARMS, limit=LIMITS)
def test_the_choice_does_not_depend_on_the_order_of_peers(numbers: set[int], limit: int) -> None:
    peers = [peer(number) for number in numbers]
    own, kept = peers[0], peers[1::2]
    assert choose_neighbours(own.node_id, peers, limit, kept) == choose_neighbours(
        own.node_id, peers[::-1], limit, kept
    )


def test_a_node_does_not_choose_itself_and_nobody_where_there_is_no_place() -> None:
    own, near = peer(1), peer(2)
    assert choose_neighbours(own.node_id, [own, near], 8) == [near]
    assert choose_neighbours(own.node_id, [own], 8) == []
    assert choose_neighbours(own.node_id, [own, near], 0) == []


@pytest.mark.parametrize(("limit", "longest", "seed"), [(8, 5, None), (3, 9, None), (8, 5, 1), (3, 12, 1)])
def test_two_hundred_nodes_are_a_few_steps_apart_and_share_the_load(limit: int, longest: int, seed: int | None) -> None:
    graph = follows([peer(number) for number in range(200)], limit, seed)
    assert is_strongly_connected(graph)
    assert max(max(distances(graph, node).values()) for node in graph) <= longest
    followers = Counter(neighbour for chosen in graph.values() for neighbour in chosen)
    assert len(followers) == 200 and max(followers.values()) <= 3 * limit


def test_peers_known_longest_keep_half_of_the_places_whoever_ranks_first() -> None:
    """Ids that rank before all others at a node cost a second of hashing each."""
    own, old = peer(0), [peer(number) for number in range(1, 9)]
    ground = sorted((peer(number) for number in range(1000, 5000)), key=lambda p: rank(own.node_id, p.node_id))[:100]
    kept = [*old, *ground]
    assert len(set(choose_neighbours(own.node_id, kept, 8, kept)) & set(old)) >= 4
    assert not set(choose_neighbours(own.node_id, kept, 8)) & set(old), "by rank alone they would have every place"


def test_a_subnet_of_the_public_network_has_two_places_of_eight_unless_nobody_else_wants_them() -> None:
    own = peer(0)
    one = [peer(number, f"1.2.3.{number % 256}") for number in range(1, 200)]
    others = [peer(200 + number, f"1.3.{number}.1") for number in range(6)]
    chosen = choose_neighbours(own.node_id, [*one, *others], 8, one)
    assert len(set(chosen) & set(one)) == 2 and set(others) <= set(chosen)
    assert len(choose_neighbours(own.node_id, one, 8)) == 8, "all of a laboratory may be in one subnet"
    local = [peer(number) for number in range(1, 200)]
    assert len(set(choose_neighbours(own.node_id, [*local, *others], 8, local)) & set(local)) >= 5
