"""Shares of the limit of open files: those of gRPC and of pages leave room for the rest."""

import resource

import pytest

from swarm.open_files import allow_descriptors, places_for_pages, places_for_relayed
from swarm.relay.reservation_table import RelayLimits
from swarm.relay.ticket_port import MAX_SILENT
from swarm.telemetry.page_server import MAX_CONNECTIONS
from swarm.wire.server import ServerLimits

ENDLESS = resource.RLIM_INFINITY


class Limit:
    """The limit of open files of a process, as the system keeps it."""

    def __init__(self, soft: int, hard: int) -> None:
        self.now = (soft, hard)

    def get(self, _: int) -> tuple[int, int]:
        return self.now

    def set(self, _: int, limits: tuple[int, int]) -> None:
        self.now = limits


@pytest.mark.parametrize(
    ("soft", "hard"),
    [(256, 256), (256, ENDLESS), (1024, 1024), (1024, 2048), (1024, 4096), (1024, 7000), (1024, ENDLESS), (8192, 8192)],
)
def test_connections_and_pages_leave_files_for_the_rest(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
    limit = Limit(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", limit.get)
    monkeypatch.setattr(resource, "setrlimit", limit.set)
    connections, pages = allow_descriptors(ServerLimits().connections), places_for_pages(MAX_CONNECTIONS)
    allowed = limit.now[0]
    assert connections >= allowed // 2 and pages >= min(MAX_CONNECTIONS, allowed // 8)
    assert connections + pages + min(512, allowed // 4) <= allowed
    relayed, silent = places_for_relayed(RelayLimits().connections), places_for_relayed(MAX_SILENT)
    assert min(relayed, silent) >= min(MAX_SILENT, allowed // 16)
    assert connections // 2 + pages + 4 * relayed + silent + min(512, allowed // 16) <= allowed
    bounds = ServerLimits().bounds.scaled(connections / ServerLimits().connections)
    assert bounds.unproven_of_strangers + bounds.unproven_of_known + bounds.proven <= connections / 2
    assert min(bounds.unproven_of_strangers, bounds.unproven_of_known, bounds.proven) >= connections // 32


def test_without_a_limit_there_is_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limit(ENDLESS, ENDLESS)
    monkeypatch.setattr(resource, "getrlimit", limit.get)
    assert (allow_descriptors(6144), places_for_pages(512), places_for_relayed(512)) == (6144, 512, 512)
