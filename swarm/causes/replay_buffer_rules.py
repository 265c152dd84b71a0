"""Rules about the replay buffer: groups that are too old before a step can take them, or find no room."""

from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.off_policy_rules import is_bounded
from swarm.causes.snapshot import RECENT_STEPS, Snapshot, middle

STALE_SHARE: Final = 0.1  # of the groups of the own lineage that no draw took in time


def stale(snapshot: Snapshot) -> Diagnosed | None:
    """Groups of the own lineage are too old when a draw could take them: by steps, or by the clock."""
    if (waiting := _too_slow_for_the_clock(snapshot)) is not None:
        return waiting
    draws, bounds = snapshot.draws[-2 * RECENT_STEPS :], snapshot.config and snapshot.config.replay
    since, never = snapshot.started_at_s or 0.0, (0, 0.0)
    too_old = [  # those that waited while the node did not run are no fault
        (digest, draw)
        for draw in draws
        for digest in draw.too_old
        if snapshot.oldest_step_of.get(digest, never)[1] >= since or draw.at_s < since
    ]
    used = sum(use.is_own_policy for draw in draws for use in draw.groups) + sum(d.num_zero_variance for d in draws)
    share = len(too_old) / max(1, len(too_old) + used)
    if bounds is None or len(too_old) < 8 or share < STALE_SHARE:
        return None
    known = [(snapshot.oldest_step_of[digest], draw) for digest, draw in too_old if digest in snapshot.oldest_step_of]
    by_clock = sum(draw.at_s - at_s > bounds.max_age_s for (_, at_s), draw in known)
    by_steps = sum(draw.draw_step - 1 - step > draw.max_age_steps for (step, _), draw in known)
    if not by_clock + by_steps and any(is_bounded(snapshot, step) for step in snapshot.steps[-RECENT_STEPS:]):
        return None  # too old for the guard alone: `stays_on_policy` says why
    evidence = [
        f"{len(too_old)} of {len(too_old) + used} own groups ({share:.0%}) of the newest {len(draws)} "
        f"draws were too "
        "old (too_old of draw in events.jsonl)"
    ]
    if by_clock > by_steps:
        waited = middle([draw.at_s - at_s for (_, at_s), draw in known])
        evidence.append(
            f"{by_clock} of {len(known)} waited longer than replay.max_age_s = {bounds.max_age_s:g} "
            f"s (median "
            f"{waited:.0f} s)"
        )
        claim = (
            "groups wait longer than replay.max_age_s before a step can use them: steps are slow, or too many are made"
        )
        fix = snapshot.set_key("replay.max_age_s", max(600.0, 3 * waited))
    else:
        ages = [draw.draw_step - 1 - step for (step, _), draw in known]
        evidence.append(
            f"{by_steps} of {len(known)} are more than max_age_steps = {bounds.max_age_steps} steps "
            f"old (median "
            f"{middle(ages):.0f})"
        )
        claim = "groups are more steps old than replay.max_age_steps when they could be used"
        fix = snapshot.set_key("replay.max_age_steps", max(2, 2 * bounds.max_age_steps))
        fix += "; or smaller batches ([generator] groups_per_batch), so that fewer wait"
    return Diagnosed(
        name="stale",
        claim=claim,
        evidence=tuple(evidence),
        fix=fix,
        gravity=Gravity.STOPS if not used else Gravity.HARMS if share > 0.3 else Gravity.WASTES,
        follows_from=frozenset({"learning_rate_too_high"}),
    )


def _too_slow_for_the_clock(snapshot: Snapshot) -> Diagnosed | None:
    """Groups with signal come so slowly that the first is too old when the last comes: no step is ever made."""
    config, (_, num_with_signal, _, _) = snapshot.config, snapshot.own
    since_s = snapshot.at_s - max(snapshot.value("last_step_at_s", 0.0), snapshot.started_at_s or 0.0)
    if config is None or since_s <= 0 or num_with_signal < max(8, 2 * config.replay.local_groups):
        return None
    needed, max_age_s = config.replay.local_groups, config.replay.max_age_s
    in_time = num_with_signal / since_s * max_age_s
    if snapshot.is_finished or in_time >= needed or since_s < 2 * max_age_s:
        return None
    enough_s = float(f"{3 * needed * since_s / num_with_signal:.2g}")
    return Diagnosed(
        name="stale",
        claim=f"a step needs {needed} own groups with differing rewards at a time, and they grow older than "
        f"replay.max_age_s = {max_age_s:g} s before so many are there",
        evidence=(
            f"{num_with_signal} such groups in {since_s:.0f} s without a step: {in_time:.2g} in {max_age_s:g} s "
            "(own_since_step in status.json)",
            f"replay_groups {snapshot.value('replay_groups', 0)} (status.json)",
        ),
        fix=snapshot.set_key("replay.max_age_s", max(600.0, enough_s)) + "; or fewer replay.local_groups",
        gravity=Gravity.STOPS,
    )


def buffer_too_small(snapshot: Snapshot) -> Diagnosed | None:
    """The replay buffer cannot hold the groups that one step needs."""
    if snapshot.config is None or snapshot.is_finished or not snapshot.is_trainer:
        return None
    if snapshot.steps and snapshot.steps[-1].was_skipped:
        return None  # the node counts own groups since a step that made a version
    replay, num_held = snapshot.config.replay, snapshot.value("replay_groups", 0)
    _, num_with_signal, _, _ = snapshot.own
    is_small = replay.max_groups < replay.local_groups
    if not is_small and (num_with_signal < max(8, 2 * replay.local_groups) or num_held >= replay.local_groups):
        return None
    if not is_small and _too_slow_for_the_clock(snapshot) is not None:
        return None
    key, value = ("max_groups", 4096) if is_small else ("max_bytes", 256 * 2**20)
    return Diagnosed(
        name="buffer_too_small",
        key=f"replay.{key}",
        claim=f"the replay buffer holds fewer groups than a step needs ({replay.local_groups}): replay.{key} is "
        f"too small",
        evidence=(
            f"replay.max_groups = {replay.max_groups}, replay.max_bytes = {replay.max_bytes} (node.toml); "
            f"replay_groups "
            f"{num_held} after {num_with_signal} own groups with signal (status.json)",
        ),
        fix=snapshot.set_key(f"replay.{key}", value),
        gravity=Gravity.STOPS,
        certainty=Certainty.SURE if is_small else Certainty.LIKELY,
    )
