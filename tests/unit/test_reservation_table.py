"""The reservations and connections of a relay: who gets one, and who makes room."""

from contextlib import ExitStack

import pytest

from swarm.errors import NotHeld, TooLarge, Unavailable
from swarm.relay.reservation_table import (
    DIAL_BACKS_BURST,
    DIALLED_S,
    HeldReservation,
    RelayLimits,
    ReservationTable,
    check_port,
)


def _table(**limits: float) -> ReservationTable:
    return ReservationTable(RelayLimits(**limits), standing=lambda node_id: int(node_id.startswith("known")))  # type: ignore[arg-type]


def _fill(table: ReservationTable, *nodes: tuple[str, str]) -> list[str]:
    """Gives reservations to nodes of subnets; returns whose ended."""
    ended: list[str] = []
    for node_id, subnet in nodes:
        table.add(node_id, subnet, lambda node_id=node_id: ended.append(node_id))
    return ended


def test_the_newest_reservation_of_the_subnet_with_most_makes_room() -> None:
    table = _table(reservations=3)
    assert _fill(table, ("a", "x"), ("b", "x"), ("c", "x"), ("d", "y")) == ["c"]
    assert table.get("d") is not None and table.get("c") is None and len(table) == 3


def test_a_node_of_higher_standing_takes_over_from_one_of_lower() -> None:
    assert _fill(_table(reservations=2), ("a", "x"), ("b", "y"), ("known", "z")) == ["b"]
    assert _fill(_table(reservations_per_subnet=2), ("a", "x"), ("b", "x"), ("known", "x")) == ["b"]


@pytest.mark.parametrize("limits", [{"reservations": 2}, {"reservations_per_subnet": 2}])
def test_where_nobody_has_more_a_newcomer_gets_none(limits: dict[str, float]) -> None:
    subnets = ("x", "y", "z") if "reservations" in limits else ("x", "x", "x")
    with pytest.raises(Unavailable, match="2 reservations are taken"):
        _fill(_table(**limits), *zip("abc", subnets, strict=True))


def test_a_newer_reservation_of_a_node_outlasts_the_end_of_its_older_one() -> None:
    table, ended = _table(), list[str]()
    older = table.add("a", "x", lambda: ended.append("older"))
    newer = table.add("a", "x", lambda: None)
    table.remove(older)  # its call ends late
    assert ended == ["older"] and table.get("a") is newer and table.num_free == RelayLimits().reservations - 1
    table.remove(newer)
    table.remove(newer)
    assert len(table) == 0


@pytest.mark.parametrize(
    "bound", ["connections", "connections_per_node", "connections_per_caller", "connections_per_subnet"]
)
def test_a_connection_counts_at_each_bound_until_it_ends(bound: str) -> None:
    table = _table(**{bound: 1})
    for _ in range(2):
        with table.connection("a", "caller", "x", lambda: None):
            assert table.num_connections == table.num_connections_to("a") == 1
            with pytest.raises(Unavailable), table.connection("a", "caller", "x", lambda: None):
                pass
    assert table.num_connections == table.num_connections_to("a") == 0


def test_the_newest_connection_of_the_subnet_with_most_makes_room() -> None:
    table, ended = _table(connections_per_node=2), list[str]()
    with ExitStack() as stack:
        for caller, subnet in (("b", "x"), ("c", "x"), ("d", "y")):
            stack.enter_context(table.connection("a", caller, subnet, lambda caller=caller: ended.append(caller)))
        assert ended == ["c"] and table.num_connections_to("a") == 2
    assert table.num_connections == 0, "one that made room is not counted down twice"


def test_a_connection_may_take_the_place_of_one_that_ends_at_once() -> None:
    table, older = _table(connections=1), ExitStack()
    older.enter_context(table.connection("a", "eve", "x", end=older.close))
    with table.connection("a", "known ada", "y", end=lambda: None):
        assert table.num_connections == table.num_connections_to("a") == 1
    older.close()
    assert table.num_connections == table.num_connections_to("a") == 0


def test_a_node_that_was_dialled_is_connected_to_for_a_while() -> None:
    table = _table()
    with pytest.raises(NotHeld):
        table.way_to("a", 0.0)
    table.note_dialled("a", "192.0.2.1:7700", 0.0)
    assert table.way_to("a", DIALLED_S) == "192.0.2.1:7700"
    with pytest.raises(NotHeld):
        table.way_to("a", DIALLED_S + 1)
    _fill(table, ("a", "x"))
    assert isinstance(table.way_to("a", 0.0), HeldReservation)


def test_a_subnet_has_a_few_dial_backs_and_asks_at_once() -> None:
    table = _table(asks_burst=3)
    for count, number in ((table.count_dial_back, int(DIAL_BACKS_BURST)), (table.count_ask, 3)):
        for _ in range(number):
            count("x", 0.0)
        with pytest.raises(Unavailable, match="more than"):
            count("x", 0.0)
        count("y", 0.0)


@pytest.mark.parametrize("port", [0, 22, 442, 65536])
def test_ports_of_other_services_are_not_dialled_back(port: int) -> None:
    check_port(443)
    check_port(7700)
    with pytest.raises(TooLarge, match=f"port {port}"):
        check_port(port)


def test_who_relays_nothing_says_so() -> None:
    with pytest.raises(Unavailable, match="does not relay"):
        ReservationTable(RelayLimits(reservations=0)).add("n", "x", lambda: None)
