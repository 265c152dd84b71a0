"""For all tests."""

import pytest

from swarm.process import begin_start, settle


def pytest_configure() -> None:
    """Collecting the tests imports every library there is: as a node does, without searching that for garbage."""
    begin_start()


def pytest_collection_finish(session: pytest.Session) -> None:
    settle()
