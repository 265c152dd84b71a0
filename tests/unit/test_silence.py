"""Silence of processes: bounded by their last sign of life, whoever only waits for another is not to blame."""

from dataclasses import dataclass, field
from typing import cast

import pytest

from swarm.clock import ManualClock
from swarm.simulate.local.processes import Process, SilenceWatch, SimulationFailed

BOUND_S = 60.0


@dataclass
class Swarm:
    """Processes whose signs of life a test sets."""

    clock: ManualClock = field(default_factory=lambda: ManualClock(start_s=0.0))

    def __post_init__(self) -> None:
        self.silence = SilenceWatch(self.clock.monotonic_s, BOUND_S)
        self._signs: dict[str, str] = {}

    def show(self, **words: str) -> None:
        self._signs.update(words)

    def wait(self, seconds: float) -> None:
        """Lets time pass, then looks at everyone and judges."""
        self.clock.advance(seconds)
        for name, words in self._signs.items():
            self.silence.look(cast("Process", _Shown(name, words)))
        self.silence.check(self._signs)


@dataclass
class _Shown:
    name: str
    words: str

    def sign_of_life(self) -> tuple[object, str]:
        return self.words, self.words


def test_work_that_goes_on_is_never_given_up_however_long_it_takes() -> None:
    swarm = Swarm()
    for done in range(100):
        swarm.show(ada=f"learning {done}/100")
        swarm.wait(BOUND_S - 1)


def test_the_silent_one_is_named_with_its_last_sign_of_life() -> None:
    swarm = Swarm()
    swarm.show(ada="learning 1/8", bell="evaluating 3/64")
    swarm.wait(1)
    swarm.show(ada="learning 2/8")
    swarm.wait(BOUND_S - 1)
    swarm.show(ada="learning 3/8")
    with pytest.raises(
        SimulationFailed, match=r"^bell showed no sign of life for 60 s; its last one: evaluating 3/64$"
    ):
        swarm.wait(1)


def test_who_waits_for_another_is_not_silent_while_that_one_works() -> None:
    swarm = Swarm()
    swarm.show(ada="waiting for groups")
    for done in range(10):
        swarm.show(bell=f"generating {done}/32")
        swarm.wait(BOUND_S - 1)
    with pytest.raises(SimulationFailed, match="bell showed no sign of life for 60 s; its last one: generating 9/32"):
        swarm.wait(BOUND_S)


def test_a_run_in_which_everyone_waits_is_over() -> None:
    swarm = Swarm()
    swarm.show(ada="waiting for groups", bell="waiting for room for groups")
    swarm.wait(0)
    with pytest.raises(SimulationFailed, match=r"ada showed .* waiting for groups\nbell showed .* waiting for room"):
        swarm.wait(BOUND_S)
