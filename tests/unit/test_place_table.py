"""The places and connections of a relay: who gets one, and who makes room."""

import pytest

from swarm.errors import Unavailable
from swarm.relay.place_table import DIAL_BACKS_BURST, PlaceTable, RelayLimits


def _table(**limits: int) -> PlaceTable:
    return PlaceTable(RelayLimits(**limits), standing=lambda node_id: int(node_id.startswith("known")))


def _fill(table: PlaceTable, *places: tuple[str, str]) -> list[str]:
    """Gives places to nodes of subnets; returns whose ended."""
    ended: list[str] = []
    for node_id, subnet in places:
        table.add(node_id, subnet, lambda node_id=node_id: ended.append(node_id))
    return ended


def test_the_newest_place_of_the_subnet_with_most_makes_room() -> None:
    table = _table(places=3)
    assert _fill(table, ("a", "x"), ("b", "x"), ("c", "x"), ("d", "y")) == ["c"]
    assert table.get("d") is not None and table.get("c") is None and len(table) == 3


def test_a_node_of_higher_standing_gets_the_place_of_one_of_lower() -> None:
    table = _table(places=2)
    assert _fill(table, ("a", "x"), ("b", "y"), ("known", "z")) == ["b"]


def test_where_all_subnets_have_one_place_a_newcomer_gets_none() -> None:
    table = _table(places=2)
    with pytest.raises(Unavailable, match="all 2 places are taken"):
        _fill(table, ("a", "x"), ("b", "y"), ("c", "z"))


def test_a_subnet_has_no_more_than_its_places() -> None:
    with pytest.raises(Unavailable, match="2 nodes of your network"):
        _fill(_table(places_per_subnet=2), ("a", "x"), ("b", "x"), ("c", "x"))


def test_a_newer_place_of_a_node_outlasts_the_end_of_its_older_one() -> None:
    table = _table()
    older = table.add("a", "x", lambda: None)
    newer = table.add("a", "x", lambda: None)
    table.remove(older)  # its call ends late
    assert table.get("a") is newer and table.num_free == RelayLimits().places - 1
    table.remove(newer)
    table.remove(newer)
    assert len(table) == 0


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        ({"connections": 1}, "all"),
        ({"connections_per_node": 1}, "node"),
        ({"connections_per_caller": 1}, "caller"),
        ({"connections_per_subnet": 1}, "subnet"),
    ],
)
def test_a_connection_counts_at_each_bound_until_it_ends(limits: dict[str, int], kind: str) -> None:
    table = _table(**limits)
    for _ in range(2):
        with table.connection("a", "caller", "x"):
            assert table.num_connections == 1
            with (
                pytest.raises(Unavailable, match=rf"1 relayed connections \({kind}\)"),
                table.connection("a", "caller", "x"),
            ):
                pass
    assert table.num_connections == 0


def test_a_subnet_has_a_few_dial_backs_at_once() -> None:
    table = _table()
    for _ in range(int(DIAL_BACKS_BURST)):
        table.take_dial_back("x", 0.0)
    with pytest.raises(Unavailable, match="3 dial-backs in a minute"):
        table.take_dial_back("x", 0.0)
    table.take_dial_back("y", 0.0)
