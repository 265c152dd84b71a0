"""When a local simulation ends: by the limit that was given, counted from the end of set-up, or by silence."""

import asyncio
from typing import Any, cast

import pytest

from swarm.events import Event, GroupPut, GroupUnscored, StepMade, WorkerDied
from swarm.simulate.local import run
from swarm.simulate.local.processes import Process, SilenceWatch, SimulationFailed
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

    def sign_of_life(self) -> tuple[object, str]:
        return 0, "learning 2/8"

    def log_tail(self) -> str:
        return "no module"

    name = "ada"


def watch(*events: Event, minutes: float | None = 0) -> None:
    coordinator, ada = (cast("Process", WatchedProcess(*of)) for of in ((), events))
    options = SimulationOptions(preset="echo-tiny", minutes=minutes)
    asyncio.run(
        run._watch(coordinator, {"ada": ada}, {"ada"}, options, lambda name, event: None, lambda activities: None)
    )  # pyright: ignore[reportPrivateUsage]


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


def test_a_silent_run_ends_with_who_was_silent_and_its_last_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SilenceWatch", lambda monotonic_s: SilenceWatch(monotonic_s, bound_s=0.0))
    with pytest.raises(SimulationFailed, match="ada showed no sign of life for 0 s; its last one: learning 2/8"):
        watch(minutes=None)


def test_a_worker_that_dies_again_and_again_ends_the_run() -> None:
    with pytest.raises(SimulationFailed, match=r"ada: its worker died 12 times without a step; .*\n.*no module"):
        watch(*[WorkerDied(exit_code=1)] * 12, minutes=None)
    watch(*[WorkerDied(exit_code=1)] * 11, GROUP, STEP)
