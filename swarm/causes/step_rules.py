"""Rules about the course of a training: whether it gets anywhere, moves too far, uses what it draws; its time.

Invariant: what is found here is seen of some cause; where that is a setting, `far_settings` names it.
"""

from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.learning_rules import FEW_STEPS, leaps, losses
from swarm.causes.snapshot import RECENT_STEPS, Snapshot, mean, middle
from swarm.events import NodeStarted, PolicyEvaluated, StepMade
from swarm.types import Role

MANY_STEPS: Final = 50  # fewer need not have taught anything yet
MOST: Final = 0.5
LEAST_EVALUATED_S: Final = 10.0  # of a run that has just begun the first evaluation is most
LONG_S: Final = 600.0  # for one step
PATIENCE_S: Final = 20.0
NO_MEASURE: Final = frozenset({"learning_rate_too_high", "weights_decay", "not_a_number"})  # that make policies wild


def gets_worse(snapshot: Snapshot) -> Diagnosed | None:
    """What the policy could it can no more."""
    found = losses(snapshot)
    if not found:
        return None
    return Diagnosed(
        name="gets_worse",
        claim="the model forgets what it could",
        evidence=tuple(found),
        fix="begin again from a checkpoint before the fall (swarm export --step), with half the learning rate",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=NO_MEASURE | {"overfits", "held_out_falls", "liar", "steps_move_far", "reward_is_random"},
    )


def steps_move_far(snapshot: Snapshot) -> Diagnosed | None:
    """Single steps move the policy so far that groups on their way are of another one."""
    found = leaps(snapshot)
    if len(found) < 2:
        return None
    return Diagnosed(
        name="steps_move_far",
        claim="single steps move the policy far",
        evidence=tuple(found),
        fix="half the learning rate, fewer learner.updates_per_step, or constants of the recipe nearer to its own",
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
        follows_from=NO_MEASURE,
    )


def learns_nothing(snapshot: Snapshot) -> Diagnosed | None:
    """Many steps, and rewards as they were: said as a note, since hard tasks look the same."""
    rewards = snapshot.course("reward_mean")
    if len(rewards) < MANY_STEPS:
        return None
    third = len(rewards) // 3
    before, now = mean(rewards[:third]), mean(rewards[-third:])
    if now > before + 0.02 or now > 0.9:
        return None
    return Diagnosed(
        name="learns_nothing",
        claim=f"after {len(rewards)} steps the reward is where it was: {before:.2f} at first, {now:.2f} now",
        evidence=("learn/reward_mean of the first and the last third of the steps (events.jsonl)",),
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
    )


def tokens_left_out(snapshot: Snapshot) -> Diagnosed | None:
    """The recipe or the guard clips or masks most of what a step learns from."""
    clipped, masked = middle(_recent(snapshot, "clip_share")), middle(_recent(snapshot, "masked_share"))
    if len(snapshot.made) < FEW_STEPS or clipped + masked < MOST:
        return None
    return Diagnosed(
        name="tokens_left_out",
        claim=f"most tokens teach nothing: {clipped:.0%} are clipped, {masked:.0%} left out",
        evidence=(f"medians of learn/clip_share and learn/masked_share over {RECENT_STEPS} steps (events.jsonl)",),
        fix="constants of the recipe nearer to its own (learner.recipe_params, guard.cap), or fresher groups",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=NO_MEASURE | {"steps_move_far"},
    )


def nothing_trained(snapshot: Snapshot) -> Diagnosed | None:
    """Most steps train no token, have no gradient, or are left out."""
    recent = snapshot.steps[-RECENT_STEPS:]
    empty = [step for step in recent if not step.num_tokens or step.grad_norm < 1e-9]
    if len(recent) < RECENT_STEPS / 2 or len(empty) < MOST * len(recent):
        return None
    return Diagnosed(
        name="nothing_trained",
        claim=f"{len(empty)} of the newest {len(recent)} steps learned from no token",
        evidence=("num_tokens or grad_norm of step is 0 (events.jsonl)",),
        fix="swarm status tells what the guard set aside; thresholds under [guard], replay.external and "
        "replay.keep_zero_variance decide what a step may use",
        gravity=Gravity.HARMS,
        follows_from=NO_MEASURE,
    )


def steps_made_again(snapshot: Snapshot) -> Diagnosed | None:
    """A restart went back many steps."""
    lost, newest = 0, 0
    for step in (event for event in snapshot.events if isinstance(event, StepMade)):
        lost = max(lost, newest - step.step)
        newest = max(newest, step.step)
    if lost < FEW_STEPS:
        return None
    return Diagnosed(
        name="steps_made_again",
        claim=f"a restart went back {lost} steps, which were made again",
        evidence=("step of step (events.jsonl)",),
        fix="a checkpoint more often (learner.checkpoint_every, disk.checkpoint_bytes_per_s), and one at the end "
        "(disk.checkpoint_at_end)",
        gravity=Gravity.WASTES,
        follows_from=frozenset({"out_of_memory", "worker_dies", "no_permission"}),
    )


def evaluations_take_time(snapshot: Snapshot) -> Diagnosed | None:
    """More time goes into evaluations than into steps."""
    took_s = whole_s = before_s = 0.0
    for event in snapshot.events:
        if isinstance(event, NodeStarted):
            before_s = 0.0  # what lies between two processes is no work of either
        if isinstance(event, StepMade | PolicyEvaluated):
            spent_s = event.at_s - before_s if before_s else 0.0
            whole_s += spent_s
            took_s += spent_s if isinstance(event, PolicyEvaluated) else 0.0
            before_s = event.at_s
    waiting_s = snapshot.at_s - before_s if before_s else 0.0
    if len(snapshot.made) < 3 or took_s <= max(LEAST_EVALUATED_S, MOST * whole_s, waiting_s):
        return None
    return Diagnosed(
        name="evaluations_take_time",
        claim=f"evaluations take {took_s / whole_s:.0%} of the time",
        evidence=(f"{took_s:.0f} s of {whole_s:.0f} s (at_s of evaluation and step in events.jsonl)",),
        fix=snapshot.set_key("evaluation.every_steps", 50, why=" (or evaluation.num_problems less)"),
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
        key="evaluation.every_steps",
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
            | {"worker_dies", "stale", "learning_rate_too_high", "weights_decay", "no_group_yet"}
        ),
    )


def waits_for_groups(snapshot: Snapshot) -> Diagnosed | None:
    """Steps wait for groups most of the time: a note, as generation is the larger part of much honest work."""
    recent = snapshot.made[-RECENT_STEPS:]
    waited_s = sum(step.seconds.get("draw_wait", 0.0) for step in recent)
    if len(recent) < 3 or waited_s <= MOST * snapshot.recent_span_s or not snapshot.recent_span_s:
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


def _recent(snapshot: Snapshot, name: str) -> list[float]:
    return snapshot.course(name, snapshot.made[-RECENT_STEPS:])
