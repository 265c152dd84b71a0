"""For all tests."""

import pytest

from swarm.process import defer_gc, freeze_gc


def pytest_configure() -> None:
    """Collecting the tests imports every library there is: as a node does, without searching that for garbage."""
    defer_gc()


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze_gc()
