"""Rules about steps that do not come: what the node waits for, and whether it is done."""

from typing import Final

from swarm.activity import WAITING, Activity
from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.off_policy_rules import set_aside_words
from swarm.causes.signal_rules import MANY_IN_VAIN, NO_SIGNAL
from swarm.causes.snapshot import RECENT_STEPS, Snapshot
from swarm.types import Role

MOST: Final = 0.5
LONG_S: Final = 600.0  # for one step
PATIENCE_S: Final = 20.0
PATIENT: Final = 10.0  # times the bound on a time without a step, where work goes on meanwhile
OF_WAITING: Final = NO_SIGNAL | {
    "buffer_too_small",
    "not_a_number",
    "out_of_memory",
    "worker_dies",
    "hangs",
    "does_not_run",
    "disk_full",
    "no_external",
    "no_trainer",
    "trainer_away",
    "versions_refused",
    "all_set_aside",
    "stale",
    "nobody_follows",
    "clock_is_wrong",
    "settings_differ",
    "no_credit",
    "learning_rate_too_high",
    "coordinator_refuses",
    "restarts_often",
    "environments_differ",
    "tokens_differ",
    "killer_group",
    "barrier_waits",
    "equivocated",
    "coordinator_alarm",
    "cannot_dial",
}


def waiting_words(snapshot: Snapshot) -> str:
    """Which groups the learner waits for, where none of those that came let it make a step; "" otherwise."""
    if snapshot.value("own_since_step", None) is not None:
        num_put, num_with_signal, num_unscored, error = snapshot.own
        if not num_put + num_unscored or num_with_signal:
            return ""
        unscored = f", {num_unscored} not scored ({error})" if num_unscored else ""
        return f"own groups: {num_put + num_unscored} generated, 0 with differing rewards{unscored}"
    if not snapshot.value("learns_from_others", False) or snapshot.num_admitted:
        return ""
    if not snapshot.refused:
        return "groups of others: none came"
    most = max(snapshot.refused, key=snapshot.refused.__getitem__)
    return f"groups of others: 0 admitted, {sum(snapshot.refused.values())} refused (mostly {most})"


def no_steps(snapshot: Snapshot) -> Diagnosed | None:
    """No step, or group, and no sign of work either, for longer than the limit; or many own groups in vain."""
    if snapshot.status is None or snapshot.is_finished or snapshot.only_relays:
        return None
    idle_s = snapshot.at_s - snapshot.value("last_step_at_s", snapshot.at_s)
    waiting = waiting_words(snapshot)
    if idle_s > snapshot.max_idle_s and not _is_at_work(snapshot, idle_s):
        what = "optimizer step" if snapshot.following is None else "group"
        known = "; ".join(filter(None, (set_aside_words(snapshot.value("guard", dict[str, float]())), waiting)))
        why = f": {known}" if known else ""
        step = snapshot.value("step", 0)
        claim = f"no {what} for {idle_s:.0f} s (limit {snapshot.max_idle_s:.0f} s), at step {step}{why}"
    elif snapshot.num_in_vain >= MANY_IN_VAIN:
        claim = f"waits for {waiting}"
    else:
        return None
    return Diagnosed(
        name="no_steps",
        claim=claim,
        evidence=("last_step_at_s, own_since_step (status.json)",),
        fix="the node's log tells what it did last; swarm samples shows own groups, swarm doctor this machine",
        gravity=Gravity.STOPS,
        certainty=Certainty.SURE,
        follows_from=OF_WAITING,
    )


def _is_at_work(snapshot: Snapshot, idle_s: float) -> bool:
    """True where a step of a slow machine takes its time: the worker advanced of late, and waits for nobody.

    Work for steps that the guard rejects does not count, nor does any that leads to no step for very long.
    """
    sign = Activity.read(snapshot.value("worker", None))
    if sign is None or sign.what.startswith(WAITING) or idle_s > PATIENT * snapshot.max_idle_s:
        return False
    is_of_late = 0.0 <= snapshot.at_s - sign.at_s <= snapshot.max_idle_s
    return is_of_late and not set_aside_words(snapshot.value("guard", dict[str, float]()))


def barrier_waits(snapshot: Snapshot) -> Diagnosed | None:
    """With a barrier every step waits for the slowest."""
    config = snapshot.config
    if config is None or not config.replay.barrier or not snapshot.made:
        return None
    recent = snapshot.made[-RECENT_STEPS:]
    waited = sum(step.seconds.get("draw_wait_s", step.seconds.get("draw_wait", 0.0)) for step in recent)
    span = recent[-1].at_s - recent[0].at_s
    if len(recent) < 5 or span <= 0 or waited / span < 0.8:
        return None
    return Diagnosed(
        name="barrier_waits",
        key="replay.barrier",
        claim="each step waits for the slowest node: replay.barrier is on",
        evidence=(f"{waited:.0f} s of {span:.0f} s waiting for a draw (seconds of step in events.jsonl)",),
        fix=snapshot.set_key("replay.barrier", False),
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
    )


def step_needs_many(snapshot: Snapshot) -> Diagnosed | None:
    """At the rate at which own groups with signal come, a step takes very long."""
    config, (_, num_with_signal, _, _) = snapshot.config, snapshot.own
    if config is None or snapshot.is_finished or snapshot.idle_s < PATIENCE_S or not snapshot.attempts:
        return None
    needed = config.replay.local_groups
    expected_s = needed * snapshot.idle_s / max(1, num_with_signal)
    if num_with_signal >= needed or expected_s < LONG_S:
        return None
    return Diagnosed(
        name="step_needs_many",
        claim=f"a step needs {needed} own groups with differing rewards, and in {snapshot.idle_s:.0f} s "
        f"{num_with_signal} came: one step in {expected_s / 60:.0f} minutes, or more",
        evidence=("own_since_step (status.json), replay.local_groups (node.toml)",),
        fix="tasks of which more answers are right, more tries (generator.group_size), or fewer replay.local_groups",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=frozenset(
            {"all_wrong", "all_right", "all_equal", "cut_off", "cannot_be_scored", "disk_full", "out_of_memory"}
            | {"worker_dies", "stale", "learning_rate_too_high", "weights_decay", "no_group_yet", "scoring_is_slow"}
        ),
    )


def waits_for_groups(snapshot: Snapshot) -> Diagnosed | None:
    """Steps wait for groups most of the time: a note, as generation is the larger part of much honest work."""
    recent = snapshot.made[-RECENT_STEPS:][1:]
    waited_s = sum(step.seconds.get("draw_wait", 0.0) for step in recent)  # since the first of them was made
    if not recent or waited_s <= MOST * snapshot.recent_span_s or not snapshot.recent_span_s:
        return None
    return Diagnosed(
        name="waits_for_groups",
        claim=f"steps wait for groups {waited_s / snapshot.recent_span_s:.0%} of the time: generation is slower",
        evidence=(f"draw_wait of the newest {len(recent)} steps (seconds of step in events.jsonl)",),
        gravity=Gravity.NOTE,
    )


def no_step_yet(snapshot: Snapshot) -> Diagnosed | None:
    """A trainer has made no step since its start: no fault by itself, as a large model takes minutes for its first."""
    if not snapshot.is_trainer or snapshot.is_finished or snapshot.value("is_loading", False):
        return None
    if snapshot.up_s < PATIENCE_S or any(step.at_s >= (snapshot.started_at_s or 0.0) for step in snapshot.steps):
        return None
    return Diagnosed(
        name="no_step_yet",
        claim=f"no step was made in {snapshot.up_s:.0f} s",
        evidence=("no step in events.jsonl since the start",),
        gravity=Gravity.NOTE,
    )


def no_peer_yet(snapshot: Snapshot) -> Diagnosed | None:
    """A node that looks for others has found none so far: no fault by itself, as the search takes a while."""
    if not snapshot.has_others or snapshot.is_finished or snapshot.up_s < PATIENCE_S:
        return None
    if snapshot.value("peers", list[str]()):
        return None
    return Diagnosed(
        name="no_peer_yet",
        claim=f"no other node was connected in {snapshot.up_s:.0f} s",
        evidence=("peers: none (status.json)",),
        gravity=Gravity.NOTE,
    )


def no_group_yet(snapshot: Snapshot) -> Diagnosed | None:
    """A generator has finished no group since its start: no fault by itself, as with `no_step_yet`."""
    config = snapshot.config
    if config is None or Role.GENERATOR not in config.roles or snapshot.attempts or snapshot.is_finished:
        return None
    if snapshot.following is not None and snapshot.following["served_step"] is None:
        return None
    if snapshot.up_s < PATIENCE_S or snapshot.value("is_loading", False) or snapshot.value("num_put", 0):
        return None
    return Diagnosed(
        name="no_group_yet",
        claim=f"no group of answers was finished in {snapshot.up_s:.0f} s",
        evidence=("no put and no unscored in events.jsonl since the start",),
        gravity=Gravity.NOTE,
    )


def finished(snapshot: Snapshot) -> Diagnosed | None:
    """Every step is made."""
    if not snapshot.is_finished:
        return None
    step = snapshot.value("step", 0)
    more = f"learner.num_steps = {step} or less was asked for"
    is_train = snapshot.start.startswith("swarm train")
    return Diagnosed(
        name="finished",
        claim=f"every step is made ({step}): the node ended as it should"
        if not snapshot.runs
        else f"every step is made ({step}): the node only serves others now",
        evidence=(f"is_finished (status.json); {more}",),
        fix=f"for more of them: {snapshot.start}"
        if is_train
        else f"for more of them: {snapshot.set_key('learner.num_steps', 2 * step)}",
        gravity=Gravity.NOTE,
    )
