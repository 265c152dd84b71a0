"""Rules about optimizer steps: a wrong learning rate, steps that are skipped, what is stale, held-out success."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import variance
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.signal_rules import MANY_IN_VAIN, NO_SIGNAL, SOME_IN_VAIN
from swarm.causes.snapshot import RECENT_STEPS, Snapshot, mean, middle
from swarm.events import OthersSetAside, PolicyEvaluated, StepMade, events_of
from swarm.model.source import is_char_model

USUAL_RATE: Final = 1e-5  # all weights of a language model
USUAL_SMALL_RATE: Final = 1e-4  # adapters, and the tiny models
FAR: Final = 10.0  # times the usual rate
FEW_STEPS: Final = 20  # fewer say nothing of a course
STILL: Final = 1e-4  # standard deviation of the log-ratio over a step of age: less is rounding
FAST: Final = 0.3  # from which on one step is a leap; docs/metrics.md
FALL_SIGMAS: Final = 3.0
DECAY: Final = 1e-3  # of each weight at a step; usual is 1e-7 to 1e-6
STALE_SHARE: Final = 0.1  # of the groups of the own lineage that no draw took in time
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


def usual_rate(snapshot: Snapshot) -> float:
    """What such a model is mostly trained with."""
    config = snapshot.config
    is_small = config is None or config.model.lora_rank > 0 or is_char_model(config.model.source)
    return USUAL_SMALL_RATE if is_small else USUAL_RATE


def not_a_number(snapshot: Snapshot) -> Diagnosed | None:
    """Steps are skipped because loss or gradient is not finite."""
    recent = snapshot.steps[-RECENT_STEPS:]
    bad = [step for step in recent if step.was_skipped and not (math.isfinite(step.grad_norm) and _is_finite(step))]
    if not bad:
        return None
    is_stuck = len(bad) == len(recent) or all(step.was_skipped for step in recent[-3:])
    config = snapshot.config
    fix = "start again from an older checkpoint (delete the newest folder under checkpoints)"
    if config is not None:
        fix += f", with a lower rate: {snapshot.set_key('learner.learning_rate', config.learner.learning_rate / 10)}"
    return Diagnosed(
        name="not_a_number",
        claim=f"{len(bad)} of the newest {len(recent)} steps were skipped: loss or gradient was no finite number",
        evidence=(
            f"grad_norm is NaN or infinite, was_skipped (step in events.jsonl), the newest at step {bad[-1].step}",
        ),
        fix=fix,
        gravity=Gravity.STOPS if is_stuck else Gravity.WASTES,
        follows_from=frozenset({"learning_rate_too_high"}) if not is_stuck else frozenset(),
    )


def _is_finite(step: StepMade) -> bool:
    return math.isfinite(step.loss)


def learning_rate_too_high(snapshot: Snapshot) -> Diagnosed | None:
    """Each step moves the policy so far that what it knew is lost."""
    config = snapshot.config
    if config is None or not snapshot.made:
        return None
    rate, times = config.learner.learning_rate, config.learner.learning_rate / usual_rate(snapshot)
    harm, signs = _harms(snapshot), leaps(snapshot)
    is_far = times >= FAR
    is_wild = len(harm) >= 1 and len(signs) >= 2
    if times < 1 or not ((is_far and (harm or signs)) or (times >= 2 and is_wild)):
        return None
    return Diagnosed(
        name="learning_rate_too_high",
        key="learner.learning_rate",
        claim=f"the learning rate is too high: learner.learning_rate = {rate:g}, {times:,.0f} times what such a "
        f"model is "
        "mostly trained with",
        evidence=(*harm, *signs),
        fix="begin again from a checkpoint before the fall, or in a new directory; "
        + snapshot.set_key("learner.learning_rate", usual_rate(snapshot)),
        gravity=Gravity.STOPS if _has_lost_signal(snapshot) else Gravity.HARMS,
        certainty=Certainty.SURE if is_far and harm else Certainty.LIKELY,
    )


def _harms(snapshot: Snapshot) -> list[str]:
    """What became worse, or looks so where the rate is to blame."""
    found: list[str] = []
    if _has_lost_signal(snapshot):
        before = [put.reward_mean for put in snapshot.puts if put.at_s <= snapshot.made[0].at_s]
        had = f" (mean reward before the first step {mean(before):.3g})" if before else ""
        found.append(f"after step {snapshot.made[-1].step} no own group has differing rewards any more{had}")
    return found + losses(snapshot)


def losses(snapshot: Snapshot) -> list[str]:
    """What became worse, beyond chance."""
    found: list[str] = []
    rewards = snapshot.course("reward_mean")
    if len(rewards) >= FEW_STEPS:
        fifth = len(rewards) // 5
        parts = [rewards[start : start + fifth] for start in range(0, len(rewards) - fifth + 1, fifth)]
        best, now = max(parts, key=mean), rewards[-fifth:]
        noise = math.sqrt((variance(best) + variance(now)) / fifth)  # the best of several is partly luck, too
        if mean(now) < mean(best) / 2 and mean(best) - mean(now) > FALL_SIGMAS * noise:
            found.append(f"learn/reward_mean fell from {mean(best):.2f} to {mean(now):.2f} (step in events.jsonl)")
    found += [_fall_words(of, best) for of, best in _falls(snapshot)]
    num_bad = sum(step.was_skipped and not math.isfinite(step.grad_norm) for step in snapshot.steps[-RECENT_STEPS:])
    found += [f"{num_bad} steps were not finite"] if num_bad else []
    return found


def _has_lost_signal(snapshot: Snapshot) -> bool:
    """Own groups had signal until some step, and have none since."""
    return bool(snapshot.made) and snapshot.num_in_vain >= SOME_IN_VAIN and len(snapshot.made) < 10 * FEW_STEPS


def leaps(snapshot: Snapshot) -> list[str]:
    """Signs that single steps move the policy far."""
    recent = snapshot.made[-2 * RECENT_STEPS :]
    found: list[str] = []
    guarded = [s for s in recent if s.diagnostics.get("guard_level", 0) >= 1 or _is_bounded(snapshot, s)]
    if len(recent) >= 5 and len(guarded) >= 0.3 * len(recent):
        found.append(
            f"the off-policy guard acted in {len(guarded)} of the newest {len(recent)} steps "
            f"(learn/guard_level, "
            "learn/guard_max_age_steps)"
        )
    aged = [step for step in recent if step.diagnostics.get("age_mean_steps", 0.0) >= 1]
    moved = middle(snapshot.course("log_ratio_std", aged))
    if moved > FAST / 3:
        found.append(
            f"one to a few steps change log-probs by {moved:.2g} nats (median learn/log_ratio_std at "
            f"age 1 and "
            "more; 0.01 to 0.06 is usual)"
        )
    norms = snapshot.course("grad_norm")
    if len(norms) >= FEW_STEPS and middle(norms[-10:]) > 10 * max(middle(norms[:10]), 1e-9):
        found.append(f"learn/grad_norm rose from {middle(norms[:10]):.2g} to {middle(norms[-10:]):.2g}")
    entropies = snapshot.course("entropy_nats")
    if len(entropies) >= FEW_STEPS and middle(entropies[-5:]) < 0.05 * middle(entropies[:5]):
        found.append(f"learn/entropy_nats fell from {middle(entropies[:5]):.2g} to {middle(entropies[-5:]):.2g}")
    return found


def _is_bounded(snapshot: Snapshot, step: StepMade) -> bool:
    """The guard allows less age than the configuration."""
    allowed = step.diagnostics.get("guard_max_age_steps")
    return snapshot.config is not None and allowed is not None and allowed < snapshot.config.replay.max_age_steps


def _moved(snapshot: Snapshot) -> float | None:
    """Nats by which a step or a few change log-probs; None where it was not measured."""
    aged = [step for step in snapshot.made[-10 * RECENT_STEPS :] if step.diagnostics.get("age_mean_steps", 0.0) >= 1]
    moved = snapshot.course("log_ratio_std", aged)
    return middle(moved) if len(moved) >= 5 else None


def _stillness(snapshot: Snapshot) -> list[str]:
    """Signs that steps are made and the policy stays as it is; empty where it moves, or nothing can be said."""
    made = snapshot.made
    if len(made) < FEW_STEPS:
        return []
    found: list[str] = []
    same = sum(a.digest == b.digest for a, b in pairwise(made))
    if same > len(made) / 2:
        found.append(f"{same} of {len(made) - 1} steps left every published weight as it was (digest in events.jsonl)")
    moved = _moved(snapshot)
    if moved is not None and moved < STILL:
        found.append(
            f"log-probs change by {moved:.1g} nats over a step (median learn/log_ratio_std at age 1 and more; "
            "0.01 to 0.06 is usual)"
        )
    return found


def _course_words(snapshot: Snapshot) -> str:
    rewards = snapshot.course("reward_mean")
    fifth = max(1, len(rewards) // 5)
    return f"learn/reward_mean {mean(rewards[:fifth]):.2f} at first, {mean(rewards[-fifth:]):.2f} now"


def learning_rate_too_low(snapshot: Snapshot) -> Diagnosed | None:
    """Steps are made, and the policy stays as it is, since the rate is far below the usual one."""
    config, made = snapshot.config, snapshot.made
    if config is None or len(made) < FEW_STEPS:
        return None
    rate, usual, still = config.learner.learning_rate, usual_rate(snapshot), _stillness(snapshot)
    is_unknown = _moved(snapshot) is None
    if rate * FAR > usual or not (still or (is_unknown and rate * FAR**2 <= usual)):
        return None
    return Diagnosed(
        name="learning_rate_too_low",
        key="learner.learning_rate",
        claim=f"the learning rate is too low: {len(made)} steps of {rate:g} changed next to nothing",
        evidence=(
            f"learner.learning_rate = {rate:g}; such a model is mostly trained with {usual:g}",
            *still,
            _course_words(snapshot),
        ),
        fix=snapshot.set_key("learner.learning_rate", usual),
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE if still else Certainty.LIKELY,
    )


def steps_change_nothing(snapshot: Snapshot) -> Diagnosed | None:
    """Steps are made, and the policy stays as it is, though the rate is a usual one."""
    config, still = snapshot.config, _stillness(snapshot)
    if config is None or not still:
        return None
    norm = middle(snapshot.course("grad_norm"))
    return Diagnosed(
        name="steps_change_nothing",
        claim=f"{len(snapshot.made)} steps changed next to nothing",
        evidence=(
            f"learner.learning_rate = {config.learner.learning_rate:g}; median learn/grad_norm {norm:.2g}",
            *still,
            _course_words(snapshot),
        ),
        fix="compare [learner] with the defaults (swarm check --print), the rate and the recipe's constants first",
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE,
        follows_from=frozenset({"learning_rate_too_low", "nothing_trained"}),
    )


def weights_decay(snapshot: Snapshot) -> Diagnosed | None:
    """Weight decay takes a visible part of every weight at each step."""
    if snapshot.config is None or not snapshot.made:
        return None
    learner = snapshot.config.learner
    taken = learner.learning_rate * learner.weight_decay
    if taken < DECAY:
        return None
    left = (1 - min(1.0, taken)) ** snapshot.made[-1].step
    return Diagnosed(
        name="weights_decay",
        key="learner.weight_decay",
        claim=f"weight decay takes {taken:.2g} of every weight at each step: the model forgets what it knew",
        evidence=(
            f"learner.weight_decay = {learner.weight_decay:g} times learner.learning_rate = {learner.learning_rate:g}",
            f"after {snapshot.made[-1].step} steps {left:.0%} of the weights that it began with would be left",
        ),
        fix="begin again in a new directory; " + snapshot.set_key("learner.weight_decay", 0.01),
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE if taken > 10 * DECAY else Certainty.LIKELY,
    )


# --- held-out success ---------------------------------------------------------------------------------


def _sigmas_below(now: PolicyEvaluated, best: PolicyEvaluated) -> float:
    """In standard deviations of the difference of two binomials."""
    total = now.num_problems + best.num_problems
    pooled = (now.accuracy * now.num_problems + best.accuracy * best.num_problems) / max(1, total)
    variance = pooled * (1 - pooled) * (1 / max(1, now.num_problems) + 1 / max(1, best.num_problems))
    return (best.accuracy - now.accuracy) / math.sqrt(variance) if variance > 0 else 0.0


def _falls(snapshot: Snapshot) -> list[tuple[list[PolicyEvaluated], PolicyEvaluated]]:
    """Held-out courses that are far below their best, and that best."""
    found: list[tuple[list[PolicyEvaluated], PolicyEvaluated]] = []
    for (_, split), course in snapshot.evaluations.items():
        of = list(course)
        best = max(of, key=lambda each: each.accuracy)
        if split == "held_out" and _sigmas_below(of[-1], best) >= FALL_SIGMAS:
            # The best of many is partly luck: one evaluation more, or one that fell by far, has to agree.
            before = of[-2] if len(of) > 2 and of[-2] is not best else of[-1]
            if _sigmas_below(before, best) >= FALL_SIGMAS - 1:
                found.append((of, best))
    return found


def _fall_words(of: Sequence[PolicyEvaluated], best: PolicyEvaluated) -> str:
    return (
        f"held-out success on {best.env} fell from {best.accuracy:.2f} at step {best.step} to "
        f"{of[-1].accuracy:.2f} at step "
        f"{of[-1].step} ({of[-1].num_problems} problems, {_sigmas_below(of[-1], best):.1f} sigma; evaluation in "
        "events.jsonl)"
    )


def overfits(snapshot: Snapshot) -> Diagnosed | None:
    """Held-out success falls while what is trained on is answered better and better."""
    rewards = [(step.step, step.diagnostics.get("reward_mean", math.nan)) for step in snapshot.made]
    for of, best in _falls(snapshot):
        then = mean([value for step, value in rewards if abs(step - best.step) <= FEW_STEPS and math.isfinite(value)])
        now = mean([value for _, value in rewards[-FEW_STEPS:] if math.isfinite(value)])
        if now < then + 0.05 and not (now >= 0.9 and now >= then - 0.02):
            continue
        return Diagnosed(
            name="overfits",
            claim=f"the model learns its training problems by heart: held-out success on {best.env} falls while "
            f"the reward "
            "in training rises",
            evidence=(
                _fall_words(of, best),
                f"learn/reward_mean {then:.2f} then, {now:.2f} now (step in events.jsonl)",
            ),
            fix="more problems, or fewer steps: learner.num_steps near "
            f"{best.step}, and evaluation.every_steps so that the best is seen; checkpoints kept: swarm export --step",
            gravity=Gravity.HARMS,
            certainty=Certainty.LIKELY,
            follows_from=frozenset({"learning_rate_too_high"}),
        )
    return None


def held_out_falls(snapshot: Snapshot) -> Diagnosed | None:
    """Held-out success is far below its best."""
    falls = _falls(snapshot)
    others = events_of(OthersSetAside, snapshot.events)
    if not falls and not (others and not others[-1].is_over):
        return None
    evidence = [_fall_words(of, best) for of, best in falls]
    if others and not others[-1].is_over:
        evidence.append(
            f"the learner sets groups of all other nodes aside since step {others[-1].step} (others_set_aside)"
        )
    used = snapshot.value("num_external_used", 0)
    blamed = " Groups of other nodes may be why: look at learn/source_*" if used else ""
    return Diagnosed(
        name="held_out_falls",
        claim="held-out success fell far below its best",
        evidence=tuple(evidence),
        fix=f"start again from an older checkpoint with half the learning rate.{blamed}",
        gravity=Gravity.HARMS,
        certainty=Certainty.SURE if falls else Certainty.LIKELY,
        follows_from=frozenset({"learning_rate_too_high", "weights_decay", "overfits", "not_a_number", "liar"}),
    )


# --- staleness and the guard ----------------------------------------------------------------------------


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
    if not by_clock + by_steps and any(_is_bounded(snapshot, step) for step in snapshot.steps[-RECENT_STEPS:]):
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


def stays_on_policy(snapshot: Snapshot) -> Diagnosed | None:
    """The guard froze the learner, or keeps it at its safe recipe."""
    recent = snapshot.steps[-RECENT_STEPS:]
    high = [step for step in recent if step.diagnostics.get("guard_level", 0) >= 2]
    if len(recent) < 3 or len(high) < len(recent) / 2:
        return None
    ess = middle([s.diagnostics["ess_share"] for s in recent if "ess_share" in s.diagnostics], 1.0)
    return Diagnosed(
        name="stays_on_policy",
        claim="data is so far off policy that the guard lets the learner use its safe recipe only, or nothing",
        evidence=(
            f"learn/guard_level is 2 or 3 in {len(high)} of the newest {len(recent)} steps; median "
            f"learn/ess_share "
            f"{ess:.2f}",
        ),
        fix=snapshot.set_key("replay.max_age_steps", 1)
        + "; if own groups are fresh, engine and learner differ: docs/engines.md tells how much they may",
        gravity=Gravity.HARMS,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"learning_rate_too_high", "stale"}),
    )


def all_set_aside(snapshot: Snapshot) -> Diagnosed | None:
    """The guard set every source of the newest draws aside."""
    figures = snapshot.value("guard", dict[str, float]())
    words = set_aside_words(figures)
    idle_s = snapshot.at_s - snapshot.value("last_step_at_s", snapshot.at_s)
    if not words or idle_s <= snapshot.max_idle_s:
        return None
    return Diagnosed(
        name="all_set_aside",
        claim=f"no step is made, since {words}",
        evidence=("guard (status.json)",),
        fix=snapshot.set_key("replay.max_age_steps", 1) + "; or sources nearer to this policy",
        gravity=Gravity.STOPS,
        follows_from=frozenset({"learning_rate_too_high", "stale"}),
    )


def set_aside_words(figures: dict[str, float]) -> str:
    """By which figures the guard set every source aside, and what is used; "" where it did not."""
    if not figures:
        return ""
    measured = ", ".join(
        f"{words} {figures[name]:.3g}"
        for name, words in (("mismatch_kl_k3", "mismatch KL"), ("ess_share", "ESS share"))
        if name in figures
    )
    draws = f"{figures['guard_idle_draws']:.0f} in a row"
    note = f"all sources of the newest draws ({draws}) set aside: {measured or 'too far off policy'}"
    used = figures.get("guard_groups_spared")
    return f"{note}; {used:.0f} groups that deviate least are used, with capped ratios" if used else note


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
    """No step, or group, for longer than the limit; or many own groups in vain."""
    if snapshot.status is None or snapshot.is_finished:
        return None
    idle_s = snapshot.at_s - snapshot.value("last_step_at_s", snapshot.at_s)
    waiting = waiting_words(snapshot)
    if idle_s > snapshot.max_idle_s:
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
