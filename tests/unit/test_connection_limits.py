"""Connections to cut: shares by subnet and address, and the places of proven nodes."""

import contextlib
import errno
import os
import resource
import socket
import stat
import threading
from collections.abc import Generator, Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given
from waits import HANG_S

from swarm.wire import connection_limits
from swarm.wire.connection_limits import (
    MAX_WAITING,
    Connection,
    ConnectionBounds,
    ConnectionLimiter,
    fair_level,
    find_excess,
    over_fair_share,
    peer_key,
    peer_subnet,
)

BOUNDS = ConnectionBounds()


def connections_of(host: str, num: int, *, subnet: str = "", since_s: float = 0.0) -> list[Connection]:
    return [Connection(host=host, port=port, subnet=subnet or host, since_s=since_s) for port in range(1, num + 1)]


def cut(connections: list[Connection], known: tuple[str, ...] = (), now_s: float = 1.0) -> dict[str, int]:
    """Connections to cut, by address."""
    excess = find_excess(connections, BOUNDS, known, now_s)
    counts: dict[str, int] = {}
    for connection, _ in excess:
        counts[connection.host] = counts.get(connection.host, 0) + 1
    return counts


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 300))
def test_fair_level_is_the_largest_that_fits(sizes: list[int], total: int) -> None:
    level = fair_level(sizes, total)
    assert sum(min(size, level) for size in sizes) <= total
    assert level == max(sizes, default=0) or sum(min(size, level + 1) for size in sizes) > total


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=80),
    st.integers(0, 40),
    st.integers(1, 20),
    st.integers(1, 10),
)
def test_shares_are_bounded_and_nobody_is_cut_for_one_who_holds_more(
    sources: list[tuple[int, int]], total: int, per_subnet: int, per_address: int
) -> None:
    everyone = [
        Connection(host=f"{subnet}.{host}", port=port, subnet=str(subnet), since_s=0.0)
        for port, (subnet, host) in enumerate(sources)
    ]
    gone = {id(connection) for connection in over_fair_share(everyone, total, per_subnet, per_address)}
    kept = [connection for connection in everyone if id(connection) not in gone]
    assert len(kept) <= total
    before, after = [
        {name: sum(c.subnet == name for c in group) for name in {c.subnet for c in everyone}}
        for group in (everyone, kept)
    ]
    hosts = {c.host: sum(other.host == c.host for other in kept) for c in kept}
    assert max(after.values(), default=0) <= per_subnet and max(hosts.values(), default=0) <= per_address
    if len(before) <= total:  # a place for each: who holds one keeps it
        assert all(after[name] == 1 for name, num in before.items() if num == 1)


def test_a_newcomer_stays_and_the_oldest_connection_of_the_greatest_subnet_goes() -> None:
    flood = [c for number in range(8) for c in connections_of(f"127.0.1.{number}", 128)]
    newcomer = connections_of("127.0.0.1", 1, since_s=0.9)
    gone = cut(flood + newcomer)
    assert "127.0.0.1" not in gone
    assert len(flood) - sum(gone.values()) == 8 * 95  # 767 places in equal shares
    own = [*connections_of("1.2.3.4", 128), *connections_of("1.2.3.4", 1, since_s=0.9)]
    excess = find_excess(own, BOUNDS, (), 1.0)
    assert [(connection.since_s, reason) for connection, reason in excess] == [(0.0, "unproven")]


def test_subnets_that_proved_an_identity_have_places_that_strangers_cannot_take() -> None:
    strangers = [c for number in range(5000) for c in connections_of(f"127.1.{number // 250}.{number % 250}", 1)]
    friend = connections_of("127.0.0.1", 1)
    assert "127.0.0.1" not in cut(friend + strangers, known=("127.0.0.1",))
    assert "127.0.0.1" in cut(strangers + friend)  # of equal age the first stay


def test_addresses_of_one_subnet_share_its_places() -> None:
    whole = [c for number in range(100) for c in connections_of(f"1.2.3.{number}", 10, subnet="1.2.3.0/24")]
    assert len(whole) - sum(cut(whole).values()) == 200 <= BOUNDS.unproven_per_subnet  # two of each address


def test_what_proves_nothing_in_time_goes_and_what_proved_itself_stays() -> None:
    silent, proven = connections_of("127.0.0.1", 2)
    proven.node_id = "ab" * 32
    excess = find_excess([silent, proven], BOUNDS, (), BOUNDS.unproven_s + 1)
    assert [(connection.port, reason) for connection, reason in excess] == [(1, "proved nothing in time")]


def test_a_node_keeps_its_newest_connections() -> None:
    own = [
        Connection(host="127.0.0.1", port=port, subnet="127.0.0.1", since_s=port, node_id="ab" * 32)
        for port in range(BOUNDS.proven_per_node + 2)
    ]
    assert sorted(connection.port for connection, _ in find_excess(own, BOUNDS, (), 100.0)) == [0, 1]


def test_of_proven_connections_the_oldest_of_a_subnet_stay_and_another_subnet_has_its_place() -> None:
    sybils = [
        Connection(host=f"127.1.0.{number % 8}", port=number, subnet=f"127.1.0.{number % 8}", since_s=number / 1000)
        for number in range(4096)
    ]
    for number, connection in enumerate(sybils):
        connection.node_id = f"{number:064x}"
    honest = Connection(host="127.0.0.1", port=1, subnet="127.0.0.1", since_s=9.0, node_id="ff" * 32)
    excess = [connection for connection, _ in find_excess([*sybils, honest], BOUNDS, (), 10.0)]
    assert len(sybils) + 1 - len(excess) <= BOUNDS.proven
    assert honest not in excess and sybils[0] not in excess and sybils[-1] in excess


def test_a_peer_is_the_same_however_it_is_written() -> None:
    assert peer_key("ipv4:127.0.0.1:4001") == ("127.0.0.1", 4001)
    assert peer_key("ipv6:%5B::1%5D:4001") == ("::1", 4001)
    assert peer_key("ipv6:[::ffff:1.2.3.4]:9") == ("1.2.3.4", 9)
    assert peer_subnet("ipv4:1.2.3.4:9") == "1.2.3.0/24"
    assert peer_key("unix:") == ("", 0)


@contextlib.contextmanager
def no_free_descriptor() -> Generator[list[int]]:
    """This process has as many files open as it may; the yielded ones may be closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 64, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        yield taken
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False


def test_a_flood_that_takes_every_descriptor_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, descriptors = threading.Semaphore(0), connection_limits.open_descriptors

    def listed() -> Iterable[int]:
        looks.release()
        return descriptors()

    monkeypatch.setattr(connection_limits, "open_descriptors", listed)
    limiter = ConnectionLimiter(ConnectionBounds(unproven_s=0.0))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        limiter.start(*server.getsockname())
        stack.callback(limiter.stop)
        with no_free_descriptor() as taken:
            for _ in range(2):
                os.close(taken.pop())
            client = stack.enter_context(socket.socket())
            client.connect(server.getsockname())
            stack.enter_context(server.accept()[0])
            while looks.acquire(blocking=False):
                pass
            for _ in range(2):  # the first of these looks is over when the second begins
                assert looks.acquire(timeout=HANG_S)
            assert not limiter.is_open("ipv4:127.0.0.1:1"), "unseen, nobody would count as gone"
            client.settimeout(HANG_S)
            assert is_cut(client)


def test_while_looks_fail_nobody_counts_as_gone_and_the_next_one_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, may_look, descriptors = threading.Semaphore(0), threading.Event(), connection_limits.open_descriptors

    def listed() -> Iterable[int]:
        looks.release()
        if not may_look.is_set():
            raise OSError(errno.EMFILE, "no file is free")
        return descriptors()

    monkeypatch.setattr(connection_limits, "open_descriptors", listed)
    limiter = ConnectionLimiter(ConnectionBounds(unproven_s=0.0))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        limiter.start(*server.getsockname())
        stack.callback(limiter.stop)
        client = stack.enter_context(socket.create_connection(server.getsockname(), timeout=HANG_S))
        stack.enter_context(server.accept()[0])
        for _ in range(2):  # the first of these looks is over when the second begins
            assert looks.acquire(timeout=HANG_S)
        assert limiter.is_open("ipv4:127.0.0.1:1")
        may_look.set()
        assert is_cut(client)


def test_a_socket_that_could_not_be_looked_at_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = ConnectionLimiter(ConnectionBounds(unproven_s=60.0))
    monkeypatch.setattr(limiter, "_run", lambda: None)  # this test looks
    duplicate = os.dup2
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        limiter.start(*server.getsockname())
        stack.callback(limiter.stop)
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        stack.enter_context(server.accept()[0])
        peer = "ipv4:{}:{}".format(*client.getsockname())

        def fail(source: int, target: int, inheritable: bool = True) -> int:
            if stat.S_ISSOCK(os.fstat(source).st_mode):
                raise OSError(errno.EBUSY, "busy")
            return duplicate(source, target, inheritable)

        with monkeypatch.context() as patch:
            patch.setattr(os, "dup2", fail)
            limiter.look()
        assert not limiter.is_open(peer)
        limiter.look()
        assert limiter.is_open(peer)


def test_news_for_a_thread_that_takes_none_are_bounded() -> None:
    limiter = ConnectionLimiter(ConnectionBounds())
    for port in range(MAX_WAITING + 1):
        limiter.prove(f"ipv4:127.0.0.1:{port}", "ab" * 32)
        limiter.cut(f"ipv4:127.0.0.1:{port}")
    assert len(limiter._proofs) == len(limiter._condemned) == MAX_WAITING
