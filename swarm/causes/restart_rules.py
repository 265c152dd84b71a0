"""Rules about a node that is started again and again, with steps in between or without."""

from itertools import pairwise
from statistics import median
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.running_rules import ENDINGS
from swarm.causes.snapshot import START_S, Snapshot
from swarm.events import NodeRestored, NodeStarted, StepMade, events_of

MANY_STARTS: Final = 4
NEWEST: Final = 6
SHORT_S: Final = 180.0  # that a process lives between two starts


def restarts_often(snapshot: Snapshot) -> Diagnosed | None:
    """The node itself is started again and again, without steps in between or after minutes."""
    starts_at = [event.at_s for event in events_of(NodeStarted, snapshot.events)][-NEWEST:]
    if len(starts_at) < MANY_STARTS or not events_of(NodeRestored, snapshot.events) or snapshot.is_finished:
        return None
    steps = [step for step in events_of(StepMade, snapshot.events) if step.at_s > starts_at[0]]
    lived_s = median(later - earlier for earlier, later in pairwise(starts_at))
    if steps and (lived_s > SHORT_S or snapshot.at_s - starts_at[-1] > max(START_S, 3 * lived_s)):
        return None
    num_new = max((step.step for step in steps), default=0) - min((step.step for step in steps), default=0)
    between = f"made {num_new} new steps of {len(steps)}" if steps else "made no step in between"
    return Diagnosed(
        name="restarts_often",
        claim=f"the node was started {len(starts_at)} times and {between}: it lives {lived_s:.0f} s each time",
        evidence=(f"started in events.jsonl, within {starts_at[-1] - starts_at[0]:.0f} s",),
        fix="read the last lines of its log before each start; a service manager (systemd, a container, cron) that "
        "ends and starts it again hides them: journalctl -u tells who does",
        gravity=Gravity.WASTES if steps else Gravity.STOPS,
        certainty=Certainty.LIKELY,
        follows_from=ENDINGS | {"out_of_memory"},
    )
