"""For all tests."""

import pytest
from hypothesis import HealthCheck, settings

from swarm.process import defer_gc, freeze_gc

# both compare wall-clock times, which say nothing about a test on a busy machine
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


def pytest_configure() -> None:
    """Collecting the tests imports every library there is: as a node does, without searching that for garbage."""
    defer_gc()


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze_gc()
