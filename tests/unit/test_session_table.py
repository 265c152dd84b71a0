"""Sessions of free keys: whoever opens many makes room for those who open few."""

import pytest

from swarm.clock import ManualClock
from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.wire.server import LONGEST_PAUSE_S, ServerLimits, Sessions

LIMITS = ServerLimits(sessions_total=64, sessions_per_subnet=16)


def test_sessions_of_few_addresses_keep_no_newcomer_out() -> None:
    sessions = Sessions(Identity.create(), "run", ManualClock(), LIMITS)
    for number in range(64):
        sessions._open_session(f"{number:064x}", f"ipv4:127.1.0.{number // 16}:{1000 + number}")
    token = sessions._open_session("ab" * 32, "ipv4:127.0.0.1:9")
    assert sessions._sessions[token].node_id == "ab" * 32 and len(sessions._sessions) == 64


def test_a_subnet_has_its_bound_and_its_newest_sessions() -> None:
    sessions = Sessions(Identity.create(), "run", ManualClock(), LIMITS)
    tokens = [sessions._open_session(f"{number:064x}", f"ipv4:1.2.3.{number}:9") for number in range(40)]
    assert list(sessions._sessions) == tokens[-16:]


def test_a_new_hello_on_a_connection_takes_the_place_of_its_session() -> None:
    sessions = Sessions(Identity.create(), "run", ManualClock(), LIMITS)
    tokens = [sessions._open_session("ab" * 32, "ipv4:127.0.0.1:9") for _ in range(3)]
    assert list(sessions._sessions) == tokens[-1:]


def test_where_everybody_has_one_session_a_newcomer_waits() -> None:
    sessions = Sessions(Identity.create(), "run", ManualClock(), LIMITS)
    for number in range(64):
        sessions._open_session(f"{number:064x}", f"ipv4:127.0.1.{number}:9")
    with pytest.raises(Unavailable, match="sessions are open"):
        sessions._open_session("ab" * 32, "ipv4:127.0.2.1:9")


def test_a_subnet_has_two_refusals_a_second_however_many_connections_it_has() -> None:
    sessions = Sessions(Identity.create(), "run", ManualClock())
    pauses = [sessions.refused(f"ipv4:1.2.3.4:{port}", Unavailable("no")).pause_s for port in range(1, 101)]
    assert pauses[:4] == [0.0] * 4
    assert sum(pause > 0 for pause in pauses) == 96 and pauses[-1] == 48.0
    assert sessions.refused("ipv4:5.6.7.8:1", Unavailable("no")).pause_s == 0.0  # another subnet does not wait


def test_refusals_that_wait_are_few_and_a_prompt_one_cuts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[str] = []
    sessions = Sessions(Identity.create(), "run", clock := ManualClock(), ServerLimits(concurrent_calls=80))
    monkeypatch.setattr(sessions.connections, "cut", cut.append)
    waiting = [sessions.refused(f"ipv4:1.2.3.4:{port}", Unavailable("no")).pause_s for port in range(1, 31)]
    assert sum(pause > 0 for pause in waiting) == 10 and len(cut) == 16
    assert sessions.refused("ipv4:5.6.7.8:1", Unavailable("no")).pause_s == 0.0 and len(cut) == 16
    clock.advance(LONGEST_PAUSE_S)
    assert sessions.refused("ipv4:1.2.3.4:1", Unavailable("no")).pause_s == 0.0 and not sessions._paused
