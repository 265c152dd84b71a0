"""Whom nodes follow: everyone is reached from everyone, and a peer that comes or goes changes little."""

import hashlib
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.peers.topology import choose_neighbours
from swarm.testing.builders import make_advert
from swarm.types import Advert, NodeId

Graph = Mapping[NodeId, frozenset[NodeId]]

SWARMS = st.sets(st.integers(0, 10**6), min_size=2, max_size=40)
LIMITS = st.integers(1, 8)


def advert(number: int, endpoints: tuple[str, ...] = ("127.0.0.1:1",)) -> Advert:
    node_id = hashlib.sha256(str(number).encode()).hexdigest()
    return make_advert(node_id, endpoints=endpoints)


def follows(adverts: list[Advert], limit: int) -> Graph:
    """Whom each node follows when all see the same."""
    return {a.node_id: frozenset(n.node_id for n in choose_neighbours(a.node_id, adverts, limit)) for a in adverts}


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


@given(numbers=SWARMS, limit=LIMITS)
def test_everyone_is_reached_from_everyone(numbers: set[int], limit: int) -> None:
    graph = follows([advert(number) for number in numbers], limit)
    assert is_strongly_connected(graph)
    assert all(len(chosen) == min(limit, len(numbers) - 1) for chosen in graph.values())
    assert all(node not in chosen for node, chosen in graph.items())


@given(numbers=SWARMS, limit=LIMITS, newcomer=st.integers(10**6 + 1, 2 * 10**6))
def test_a_peer_that_comes_or_goes_changes_at_most_one_neighbour_of_a_node(
    numbers: set[int], limit: int, newcomer: int
) -> None:
    adverts, added = [advert(number) for number in numbers], advert(newcomer)
    without, with_it = follows(adverts, limit), follows([*adverts, added], limit)
    for node, chosen in without.items():
        assert len(chosen - with_it[node]) <= 1
        assert with_it[node] - chosen <= {added.node_id}, "nothing else takes the place of what is there"


@given(numbers=SWARMS, limit=LIMITS)
def test_the_choice_does_not_depend_on_the_order_of_adverts(numbers: set[int], limit: int) -> None:
    adverts = [advert(number) for number in numbers]
    assert follows(adverts, limit) == follows(adverts[::-1], limit)


def test_nobody_is_chosen_who_cannot_be_dialled() -> None:
    own, near, unreachable = advert(1), advert(2), advert(3, endpoints=())
    assert choose_neighbours(own.node_id, [own, unreachable, near], 8) == [near]
    assert choose_neighbours(own.node_id, [own, unreachable], 8) == []
    assert choose_neighbours(own.node_id, [own, near], 0) == []


@pytest.mark.parametrize(("limit", "longest"), [(8, 5), (3, 9)])
def test_two_hundred_nodes_are_a_few_steps_apart_and_share_the_load(limit: int, longest: int) -> None:
    graph = follows([advert(number) for number in range(200)], limit)
    assert is_strongly_connected(graph)
    assert max(max(distances(graph, node).values()) for node in graph) <= longest
    followers = Counter(neighbour for chosen in graph.values() for neighbour in chosen)
    assert len(followers) == 200 and max(followers.values()) <= 3 * limit
