"""A worker's activity as its agent hears of it: the learner's and the generator's, of which neither hides the other."""

from typing import Any, cast

import pytest
from waits import until

from swarm.activity import GENERATING, WAITING, WAITING_FOR_ROOM, Activity
from swarm.clock import ManualClock
from swarm.loops import report_activity
from swarm.loops.report_activity import reporting


class Agent:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.activities: list[str] = []

    async def report_activity(self, activity: Activity) -> None:
        self.activities.append(activity.what)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (["learning", GENERATING], GENERATING),
        (["learning", GENERATING, WAITING_FOR_ROOM], "learning"),
        ([GENERATING, f"{WAITING} groups"], GENERATING),
        ([WAITING_FOR_ROOM, f"{WAITING} groups"], f"{WAITING} groups"),
        (["starting the engine", GENERATING, WAITING_FOR_ROOM], WAITING_FOR_ROOM),
    ],
)
async def test_who_waits_does_not_hide_who_works(told: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_activity, "EVERY_S", 0.0)
    agent, clock = Agent(), ManualClock(start_s=0.0)
    async with reporting(cast("Any", agent), clock) as on_progress:
        for what in told:
            clock.advance(1.0)
            on_progress(what)
        await until(lambda: bool(agent.activities), "a report")
        assert agent.activities == [shown]
        clock.advance(1.0)
        on_progress("saving")
        await until(lambda: "saving" in agent.activities, "the next report")
        assert agent.activities == [shown, "saving"], "nothing advanced in between, and it was reported again"
