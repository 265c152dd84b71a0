"""When a local simulation ends by its limit: counted from the end of set-up, and what it says without a step."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from swarm.events import Event, GroupPut, GroupUnscored, StepMade
from swarm.simulate.local import run
from swarm.simulate.local.processes import Process, SimulationFailed
from swarm.simulate.presets import SimulationOptions

STATUS = {"own_since_step": {"num_put": 648, "num_with_signal": 0, "num_unscored": 0, "error": ""}}
GROUP = GroupPut(
    at_s=1.0,
    digest="d",
    producer="a",
    policy_id="a",
    env="sums",
    oldest_step=0,
    size_bytes=1,
    reward_mean=0.0,
    num_tokens=1,
)
STEP = StepMade(at_s=2.0, step=1, draw_step=1, digest="d", loss=0.0, grad_norm=1.0, num_tokens=1)


class WatchedProcess:
    """A process that wrote some events and lives on."""

    def __init__(self, *events: Event) -> None:
        self._events = list(events)

    def read_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def check(self) -> None:
        """Alive."""

    def status(self) -> dict[str, Any]:
        return STATUS


def watch(*events: Event, tick: Callable[[], None] = lambda: None, minutes: float = 0) -> None:
    coordinator, ada = (cast("Process", WatchedProcess(*of)) for of in ((), events))
    options = SimulationOptions(preset="echo-tiny", minutes=minutes)
    asyncio.run(run._watch(coordinator, {"ada": ada}, {"ada"}, options, lambda name, event: None, tick))  # pyright: ignore[reportPrivateUsage]


def test_a_run_without_a_step_ends_at_its_limit_after_set_up_and_says_why() -> None:
    with pytest.raises(SimulationFailed, match=r"no step .* ada waits for own groups: 648 generated, 0 with differing"):
        watch(GROUP)


def test_a_run_none_of_whose_answers_can_be_scored_ends_at_once_and_says_why() -> None:
    failed = GroupUnscored(env="sums", error="the verifier raised KeyError: 'x' (my.py:3 in step)")
    with pytest.raises(SimulationFailed, match=r"ada: none of its first 32 groups could be scored: .*my\.py:3"):
        watch(*[failed] * 32, minutes=60)
    with pytest.raises(SimulationFailed, match="no step within 0 s after the first group"):
        watch(failed)  # set-up is over with it
    watch(GROUP, *[failed] * 40, STEP)


def test_a_run_with_a_step_ends_at_its_limit() -> None:
    watch(GROUP, STEP)


def test_set_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 3:
            monkeypatch.setattr(run, "FIRST_STEP_TIMEOUT_S", 0.0)

    with pytest.raises(SimulationFailed, match="no step within 0 s; ada waits"):
        watch(tick=tick)
    assert len(ticks) == 3, "the limit of 0 minutes had not begun"
