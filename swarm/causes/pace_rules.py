"""Rules about the pace of a node: what comes no more, measured by how often it came before; restarts.

Invariant: patience is a multiple of the longest time that the node itself took before, so that slow nodes get more.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.off_policy_rules import set_aside_words
from swarm.causes.running_rules import ENDINGS
from swarm.causes.signal_rules import NO_SIGNAL
from swarm.causes.snapshot import START_S, Snapshot, middle
from swarm.events import (
    Event,
    GroupPut,
    GroupUnscored,
    NodeRestored,
    NodeStarted,
    PolicyEvaluated,
    StepMade,
    VersionApplied,
    VersionPublished,
    events_of,
)

FEW: Final = 8  # times that something came; of fewer nothing is usual
TIMES: Final = 4.0  # the longest time before
LEAST_S: Final = 30.0
MANY_STARTS: Final = 4
NEWEST_STARTS: Final = 6
SHORT_S: Final = 180.0  # that a process lives between two starts
OF_HALTS: Final = NO_SIGNAL | {
    "all_set_aside",
    "buffer_too_small",
    "coordinator_refuses",
    "disk_full",
    "does_not_run",
    "equivocated",
    "hangs",
    "killer_group",
    "no_credit",
    "no_steps",
    "no_trainer",
    "nobody_follows",
    "not_a_number",
    "out_of_memory",
    "process_stopped",
    "records_broken",
    "stale",
    "status_unwritten",
    "step_needs_many",
    "trainer_away",
    "versions_refused",
    "worker_dies",
    "loops_fail",
}


def overdue(snapshot: Snapshot, kind: type[Event], *besides: type[Event]) -> tuple[float, float] | None:
    """Seconds since the newest event of a kind, and those usual between two; None where it is not overdue.

    Others are work, too, that tells how long something may take: patience is of the longest time between any of them.
    """
    since = snapshot.started_at_s or 0.0
    worked = [event for event in snapshot.events if isinstance(event, (kind, *besides)) and event.at_s >= since]
    gaps = _gaps([event for event in worked if isinstance(event, kind)])
    if len(gaps) < FEW:
        return None
    waited_s = snapshot.at_s - worked[-1].at_s
    return (waited_s, middle(gaps)) if waited_s > max(LEAST_S, TIMES * max(_gaps(worked))) else None


def _gaps(events: Sequence[Event]) -> list[float]:
    return [later.at_s - earlier.at_s for earlier, later in pairwise(events)]


def process_stopped(snapshot: Snapshot) -> Diagnosed | None:
    """A signal holds a process that the node started, while the node itself goes on."""
    pid = snapshot.value("pid", 0)
    if not snapshot.runs or not snapshot.stopped_pids:
        return None
    shown = ", ".join("the node itself" if each == pid else str(each) for each in snapshot.stopped_pids)
    return Diagnosed(
        name="process_stopped",
        claim=f"processes of the node are stopped (SIGSTOP, Ctrl-Z, a debugger): {shown}",
        evidence=(f"state of process {pid} and of those that it started",),
        fix=f"kill -CONT {' '.join(map(str, snapshot.stopped_pids))}",
        gravity=Gravity.STOPS,
    )


def halted(snapshot: Snapshot) -> Diagnosed | None:
    """A node that made steps, or groups, makes none any more."""
    if snapshot.is_finished or snapshot.only_relays or snapshot.value("is_loading", False):
        return None
    if snapshot.paused_since_s is not None:
        return None
    if (what := _halted(snapshot)) is None:
        return None
    name, waited_s, usual_s, others = what
    aside = set_aside_words(snapshot.value("guard", dict[str, float]()))
    known = aside or others
    return Diagnosed(
        name="halted",
        claim=f"the node makes no {name}s any more: none for {waited_s:.0f} s, where one took {usual_s:.2g} s before"
        + (f"; {known}" if known else ""),
        evidence=(f"at_s of {name} in events.jsonl, step {snapshot.value('step', 0)}",),
        fix="a process of it that a signal holds goes on with kill -CONT; what it logged last is in warnings.jsonl; "
        f"else stop it, then {snapshot.start}",
        gravity=Gravity.STOPS,
        certainty=Certainty.LIKELY,
        follows_from=OF_HALTS,
    )


def _halted(snapshot: Snapshot) -> tuple[str, float, float, str] | None:
    """What came no more, for how long, how long one took before, and what came meanwhile."""
    made = (GroupPut, GroupUnscored)
    if snapshot.is_trainer:
        # the first version is published before the first evaluation, and so says how long one takes
        found, name = overdue(snapshot, StepMade, PolicyEvaluated, VersionPublished), "step"
    else:
        found, name = overdue(snapshot, *made), "group"
    if found is None or snapshot.idle_s < LEAST_S:  # where events were lost the status has the newest
        return None
    waited_s, usual_s = found
    num_groups = sum(event.at_s > snapshot.at_s - waited_s for event in _of(snapshot, made))
    signal = ", none with differing rewards" if snapshot.num_in_vain else ""
    others = f"{num_groups} own groups came meanwhile{signal}" if name == "step" and num_groups else ""
    return name, waited_s, usual_s, others


def no_newer_version(snapshot: Snapshot) -> str:
    """For how long no newer version of the trainer came, in words; "" where none is overdue."""
    found = overdue(snapshot, VersionApplied)
    return (
        "" if found is None else f"no newer version for {found[0]:.0f} s, where one came every {found[1]:.2g} s before"
    )


def _of(snapshot: Snapshot, kinds: Sequence[type[Event]]) -> list[Event]:
    return [event for event in snapshot.events if isinstance(event, tuple(kinds))]


def restarts_often(snapshot: Snapshot) -> Diagnosed | None:
    """The node itself is started again and again, without steps in between or after minutes."""
    starts_at = [event.at_s for event in events_of(NodeStarted, snapshot.events)][-NEWEST_STARTS:]
    if len(starts_at) < MANY_STARTS or not events_of(NodeRestored, snapshot.events) or snapshot.is_finished:
        return None
    steps = [step for step in events_of(StepMade, snapshot.events) if step.at_s > starts_at[0]]
    lived_s = middle([later - earlier for earlier, later in pairwise(starts_at)])
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
