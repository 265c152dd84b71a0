"""Rules about the course of a training: whether it gets anywhere, moves too far, uses what it draws; its time.

Invariant: what is found here is seen of some cause; where that is a setting, `far_settings` names it.
"""

import math
from dataclasses import replace
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.optimizer_rules import leaps, losses
from swarm.causes.snapshot import FEW_STEPS, RECENT_STEPS, Snapshot, mean, middle
from swarm.events import NodeStarted, PolicyEvaluated, StepMade

MANY_STEPS: Final = 50  # fewer need not have taught anything yet
SOME_STEPS: Final = 15  # from which on a slope can be told from chance
MANY_USES: Final = 4
SMALL_NATS: Final = 0.006  # of a step
MOST: Final = 0.5
AGAIN: Final = 0.3  # of all steps
LEAST_EVALUATED_S: Final = 10.0  # of a run that has just begun the first evaluation is most
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
        fix=f"look at answers with their rewards: swarm samples {snapshot.directory}. Are right answers the right "
        "ones, and does the reward know them? Hard tasks need an easier beginning, or many more steps",
        gravity=Gravity.NOTE,
        certainty=Certainty.LIKELY,
    )


def no_progress(snapshot: Snapshot) -> Diagnosed | None:
    """Rewards do not rise beyond chance: a symptom, since the first steps of an honest training look the same."""
    rewards = snapshot.course("reward_mean")
    if len(rewards) < SOME_STEPS or mean(rewards[-SOME_STEPS // 2 :]) > 0.9:
        return None
    rise = _slope_sigmas(rewards)
    if rise > 1.0:
        return None
    return Diagnosed(
        name="no_progress",
        claim=f"in {len(rewards)} steps the reward does not rise beyond chance: {mean(rewards[:5]):.2f} at first, "
        f"{mean(rewards[-5:]):.2f} now",
        evidence=(f"slope of learn/reward_mean over all steps: {rise:.1f} sigma (step in events.jsonl)",),
        gravity=Gravity.NOTE,
    )


def steps_are_small(snapshot: Snapshot) -> Diagnosed | None:
    """Steps move the policy less than usual, and rewards do not rise: a symptom, as both may be meant for a while."""
    aged = [step for step in snapshot.made if step.diagnostics.get("age_mean_steps", 0.0) >= 1]
    moved = snapshot.course("log_ratio_std", aged)
    found = no_progress(snapshot)
    if found is None or len(moved) < SOME_STEPS / 3 or middle(moved) > SMALL_NATS:
        return None
    return replace(
        found,
        name="steps_are_small",
        claim=f"steps move log-probs by {middle(moved):.2g} nats, where 0.01 to 0.06 is usual, and {found.claim}",
        evidence=("learn/log_ratio_std at age 1 and more (step in events.jsonl)", *found.evidence),
    )


def _slope_sigmas(values: list[float]) -> float:
    """By how many standard deviations the slope of a course is above 0."""
    center = (len(values) - 1) / 2
    places = [place - center for place in range(len(values))]
    spread, level = sum(place * place for place in places), mean(values)
    slope = sum(place * (value - level) for place, value in zip(places, values, strict=True)) / spread
    rest = sum((value - level - slope * place) ** 2 for place, value in zip(places, values, strict=True))
    noise = math.sqrt(rest / (len(values) - 2) / spread)
    return slope / max(noise, 1e-9)


def groups_learned_again(snapshot: Snapshot) -> Diagnosed | None:
    """Steps are made of groups that were learned from many times: a symptom, as some recipes want a few uses."""
    uses = [use.use for draw in snapshot.draws[-RECENT_STEPS:] for use in draw.groups]
    if len(snapshot.draws) < SOME_STEPS or middle(uses) < MANY_USES:
        return None
    return Diagnosed(
        name="groups_learned_again",
        claim=f"steps are made of groups that were learned from before: half of them {middle(uses):.0f} times or more",
        evidence=(f"use of draw over the newest {RECENT_STEPS} draws (events.jsonl)",),
        gravity=Gravity.NOTE,
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
    """A restart went back many steps, or several did."""
    lost = num_again = newest = num_made = 0
    for step in (event for event in snapshot.events if isinstance(event, StepMade)):
        lost, num_made = max(lost, newest - step.step), num_made + 1
        num_again += step.step <= newest and not step.was_skipped
        newest = max(newest, step.step)
    if lost < FEW_STEPS and num_again < max(FEW_STEPS, AGAIN * num_made):
        return None
    return Diagnosed(
        name="steps_made_again",
        claim=f"a restart went back {lost} steps, which were made again"
        if lost >= FEW_STEPS
        else f"restarts went back again and again: {num_again} of {num_made} steps were made again",
        evidence=("step of step (events.jsonl)",),
        fix="a checkpoint more often (learner.checkpoint_every, disk.checkpoint_bytes_per_s), and one at the end "
        "(disk.checkpoint_at_end)",
        gravity=Gravity.WASTES,
        follows_from=frozenset({"out_of_memory", "worker_dies", "no_permission", "restarts_often"}),
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


def _recent(snapshot: Snapshot, name: str) -> list[float]:
    return snapshot.course(name, snapshot.made[-RECENT_STEPS:])
