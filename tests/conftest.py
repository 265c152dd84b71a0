"""For all tests."""

import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from swarm.process import defer_gc, freeze_gc

sys.path.append(str(Path(__file__).parent))  # for what tests of several folders share

# both compare wall-clock times, which say nothing about a test on a busy machine
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


REPEAT_S = 10.0


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """A test beyond its limit is told so again and again: asyncio swallows what a signal raises within a callback."""
    done = yield
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, REPEAT_S)
    return done


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` stays short: what takes long and is wider than it is deep runs in `.ci/run`."""
    if "SWARM_SWEEPS" not in os.environ:
        for item in items:
            if item.get_closest_marker("sweep"):
                item.add_marker(pytest.mark.skip(reason="long and wide: .ci/run has it, or SWARM_SWEEPS=1"))


def pytest_configure() -> None:
    """Collecting the tests imports every library there is: as a node does, without searching that for garbage."""
    defer_gc()


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze_gc()
