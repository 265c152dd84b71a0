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
NIGHTLY = "SWARM_NIGHTLY"  # variable of the environment


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, object, object]:
    """A test beyond its limit is told so again and again: asyncio swallows what a signal raises within a callback."""
    done = yield
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, REPEAT_S)
    return done


@pytest.hookimpl(tryfirst=True)  # before pytest itself looks at `-m`
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` and `.ci/run` stay short: sweeps run in `make nightly`."""
    for item in items:
        if NIGHTLY not in os.environ and item.get_closest_marker("sweep"):
            item.add_marker(pytest.mark.skip(reason=f"a sweep: make nightly has it, or {NIGHTLY}=1"))


def pytest_configure() -> None:
    """Collecting the tests imports every library there is: as a node does, without searching that for garbage."""
    defer_gc()


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Directories that tests make are recorded beside them, and not in the home of who runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze_gc()
