"""Rules about optimizer steps: too large, too small, too few, of groups that are too old, or of too few problems.

Invariant: time limits are multiples of the time that the node itself took before, so that slow nodes get more.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import variance
from typing import Final

from swarm.activity import WAITING, Activity
from swarm.diagnosis.answer_rules import one_answer
from swarm.diagnosis.record_rules import FEW_QUESTIONS
from swarm.diagnosis.signal_rules import MANY_IN_VAIN, SOME_IN_VAIN, equal_rewards, has_flat_reward
from swarm.diagnosis.snapshot import (
    FEW_GROUPS,
    FEW_STEPS,
    RECENT_STEPS,
    Diagnosed,
    Gravity,
    Snapshot,
    mean,
    middle,
    shortened,
)
from swarm.events import (
    Event,
    GroupPut,
    GroupUnscored,
    NodeStarted,
    OthersSetAside,
    PolicyEvaluated,
    StepMade,
    VersionPublished,
    events_of,
)
from swarm.telemetry.warning_log import SLOW_DTYPE
from swarm.trained.learning_evidence import Learned

FAR: Final = 10.0  # times the usual rate
FAST: Final = 0.1  # nats by which one step moves log-probs, from which on it is a leap; docs/metrics.md
STILL: Final = 1e-4  # the same, below which it is rounding
SMALL: Final = 0.006  # the same of small steps
DECAY: Final = 1e-3  # of each weight at a step; usual is 1e-7 to 1e-6
FALL_SIGMAS: Final = 3.0
FAR_UP: Final = 0.3  # of rewards in training
LEARNED: Final = 0.9
MANY_DRAWS: Final = 8  # set aside in a row
LONG_S: Final = 60.0  # without a step
LONG_STEP_S: Final = 600.0
PATIENCE_S: Final = 20.0
PATIENT: Final = 10.0  # times the bound on a time without a step, where the worker still advances
FEW_EVENTS: Final = 8  # of fewer no pace is known
TIMES: Final = 4.0  # the longest time before
LEAST_S: Final = 30.0
LEAST_EVALUATED_S: Final = 10.0  # of a run that has just begun the first evaluation is most


# --- the size of steps ------------------------------------------------------------------------------------


def not_a_number(snapshot: Snapshot) -> Diagnosed | None:
    """Finds steps that are skipped because loss or gradient is not finite."""
    recent = snapshot.steps[-RECENT_STEPS:]
    bad = [step for step in recent if step.was_skipped and not math.isfinite(step.grad_norm + step.loss)]
    if not bad:
        return None
    config = snapshot.config
    lower = "" if config is None else snapshot.set_key("learner.learning_rate", config.learner.learning_rate / 10)
    return Diagnosed(
        claim=f"{len(bad)} of the newest {len(recent)} steps were skipped: loss or gradient was no finite number",
        fix="start again from an older checkpoint (delete the newest folder under checkpoints)"
        + (f", with a lower rate: {lower}" if lower else ""),
        evidence=(f"grad_norm or loss is NaN or infinite, the newest at step {bad[-1].step} (step in events.jsonl)",),
        gravity=Gravity.STOPS if all(step.was_skipped for step in recent[-3:]) else Gravity.WASTES,
    )


def learning_rate_too_high(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a learning rate above the usual one, with signs of harm."""
    config = snapshot.config
    if config is None or not snapshot.made:
        return None
    rate, times = config.learner.learning_rate, config.learner.learning_rate / config.model.usual_rate
    is_lost = snapshot.num_in_vain >= SOME_IN_VAIN and len(snapshot.made) < 10 * FEW_STEPS
    lost = f"after step {snapshot.made[-1].step} no own group has differing rewards any more"
    harm, signs = [*([lost] if is_lost else []), *losses(snapshot)], leaps(snapshot)
    is_moved = signs and has_flat_reward(snapshot)  # far steps that teach do no harm
    if not ((times >= FAR and (harm or is_moved)) or (times >= 2 and harm and len(signs) >= 2)):
        return None
    return Diagnosed(
        claim=f"the learning rate is too high: learner.learning_rate = {rate:g}, {times:,.0f} times the usual rate of "
        "such a model",
        fix="begin again from a checkpoint before the fall, or in a new directory; "
        + snapshot.set_key("learner.learning_rate", config.model.usual_rate),
        evidence=(*harm, *signs),
        key="learner.learning_rate",
        gravity=Gravity.STOPS if is_lost else Gravity.HARMS,
    )


def losses(snapshot: Snapshot) -> list[str]:
    """Returns signs, in words, that the policy became worse beyond chance."""
    found: list[str] = []
    rewards = snapshot.course("reward_mean")
    if len(rewards) >= FEW_STEPS:
        fifth = len(rewards) // 5
        parts = [rewards[start : start + fifth] for start in range(0, len(rewards) - fifth + 1, fifth)]
        best, now = max(parts, key=mean), rewards[-fifth:]
        noise = math.sqrt((variance(best) + variance(now)) / fifth)  # the best of several is partly luck, too
        if mean(now) < mean(best) / 2 and mean(best) - mean(now) > FALL_SIGMAS * noise:
            found.append(f"learn/reward_mean fell from {mean(best):.2f} to {mean(now):.2f} (step in events.jsonl)")
    found += [_fall_words(course, best) for course, best in _falls(snapshot)]
    num_bad = sum(step.was_skipped and not math.isfinite(step.grad_norm) for step in snapshot.steps[-RECENT_STEPS:])
    return found + ([f"{num_bad} steps were not finite"] if num_bad else [])


def leaps(snapshot: Snapshot) -> list[str]:
    """Returns signs, in words, that single steps move the policy far."""
    recent, found = snapshot.made[-2 * RECENT_STEPS :], list[str]()
    guarded = [each for each in recent if each.diagnostics.get("guard_level", 0) >= 1 or _is_bounded(snapshot, each)]
    if len(recent) >= 5 and len(guarded) >= 0.3 * len(recent):
        found.append(f"the off-policy guard acted in {len(guarded)} of the newest {len(recent)} steps")
    moved = middle(_moves(snapshot, recent))
    if moved > FAST:
        found.append(f"a step changes log-probs by {moved:.2g} nats (learn/log_ratio_std; 0.01 to 0.06 is usual)")
    norms = snapshot.course("grad_norm")
    if len(norms) >= FEW_STEPS and middle(norms[-10:]) > 10 * max(middle(norms[:10]), 1e-9):
        found.append(f"learn/grad_norm rose from {middle(norms[:10]):.2g} to {middle(norms[-10:]):.2g}")
    entropies = snapshot.course("entropy_nats")
    if len(entropies) >= FEW_STEPS and middle(entropies[-5:]) < 0.05 * middle(entropies[:5]):
        found.append(f"learn/entropy_nats fell from {middle(entropies[:5]):.2g} to {middle(entropies[-5:]):.2g}")
    return found


def _is_bounded(snapshot: Snapshot, step: StepMade) -> bool:
    """True if the guard allowed less age at this step than the configuration, which a start before may have changed."""
    allowed = step.diagnostics.get("guard_max_age_steps")
    if snapshot.config is None or allowed is None or step.at_s < (snapshot.started_at_s or 0.0):
        return False
    return allowed < snapshot.config.replay.max_age_steps


def _moves(snapshot: Snapshot, steps: Sequence[StepMade]) -> list[float]:
    """Returns `log_ratio_std`, in nats, of the steps whose groups are at least one step old on average."""
    aged = [step for step in steps if step.diagnostics.get("age_mean_steps", 0.0) >= 1]
    return snapshot.course("log_ratio_std", aged)


def stillness(snapshot: Snapshot) -> list[str]:
    """Returns signs, in words, that steps do not change the policy; empty if they do, or too little is known."""
    made = snapshot.made
    if len(made) < FEW_STEPS:
        return []
    found: list[str] = []
    num_same = sum(one.digest == other.digest for one, other in pairwise(made))
    if num_same > len(made) / 2:
        found.append(f"{num_same} of {len(made) - 1} steps left every weight as it was (digest in events.jsonl)")
    moves = _moves(snapshot, made[-10 * RECENT_STEPS :])
    if len(moves) >= 5 and middle(moves) < STILL:
        found.append(f"a step changes log-probs by {middle(moves):.1g} nats (learn/log_ratio_std; 0.01 to 0.06 usual)")
    return found


def learning_rate_too_low(snapshot: Snapshot) -> Diagnosed | None:
    """Finds steps that do not change the policy because the learning rate is far below the usual one."""
    config, made = snapshot.config, snapshot.made
    if config is None or len(made) < FEW_STEPS:
        return None
    rate, usual, still = config.learner.learning_rate, config.model.usual_rate, stillness(snapshot)
    is_unknown = len(_moves(snapshot, made[-10 * RECENT_STEPS :])) < 5
    if rate * FAR > usual or not (still or (is_unknown and rate * FAR**2 <= usual)):
        return None
    return Diagnosed(
        claim=f"the learning rate is too low: {len(made)} steps of {rate:g} changed next to nothing",
        fix=snapshot.set_key("learner.learning_rate", usual),
        evidence=(f"learner.learning_rate = {rate:g}; {usual:g} is usual for such a model", *still),
        key="learner.learning_rate",
    )


def has_small_steps(snapshot: Snapshot) -> bool:
    """True if steps move the policy less than usual and rewards do not rise."""
    moves = _moves(snapshot, snapshot.made)
    return has_flat_reward(snapshot) and len(moves) >= 5 and middle(moves) <= SMALL


def steps_change_nothing(snapshot: Snapshot) -> Diagnosed | None:
    """Finds steps that do not change the policy although the learning rate is usual."""
    config, still = snapshot.config, stillness(snapshot)
    if config is None or not still:
        return None
    norm = middle(snapshot.course("grad_norm"))
    return Diagnosed(
        claim=f"{len(snapshot.made)} steps changed next to nothing",
        fix="compare [learner] with the defaults (swarm check --print), the rate and the recipe's constants first",
        evidence=(
            f"learner.learning_rate = {config.learner.learning_rate:g}; median learn/grad_norm {norm:.2g}",
            *still,
        ),
    )


def weights_decay(snapshot: Snapshot) -> Diagnosed | None:
    """Finds weight decay that takes a visible part of every weight at each step."""
    if snapshot.config is None or not snapshot.made:
        return None
    learner = snapshot.config.learner
    taken = learner.learning_rate * learner.weight_decay
    if taken < DECAY:
        return None
    left = (1 - min(1.0, taken)) ** snapshot.made[-1].step
    return Diagnosed(
        claim=f"weight decay takes {taken:.2g} of every weight at each step: the model forgets what it knew",
        fix="begin again in a new directory; " + snapshot.set_key("learner.weight_decay", 0.01),
        evidence=(
            f"learner.weight_decay = {learner.weight_decay:g} times learner.learning_rate = {learner.learning_rate:g}; "
            f"after {snapshot.made[-1].step} steps {left:.0%} of the first weights would be left",
        ),
        key="learner.weight_decay",
    )


def gets_worse(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a policy that became worse."""
    found = losses(snapshot)
    if not found:
        return None
    return Diagnosed(
        claim="the model forgets what it could",
        fix="begin again from a checkpoint before the fall (swarm export --step), with half the learning rate"
        + _of_own_recipe(snapshot),
        evidence=tuple(found),
    )


def _of_own_recipe(snapshot: Snapshot) -> str:
    recipe = "" if snapshot.config is None else snapshot.config.learner.recipe
    return f"; first look for a wrong sign in your own recipe (learner.recipe = {recipe})" if ":" in recipe else ""


def own_recipe_harms(snapshot: Snapshot) -> Diagnosed | None:
    """Finds held-out success that got worse under a recipe of a file."""
    if not (own := _of_own_recipe(snapshot)) or snapshot.learning.verdict is not Learned.WORSE:
        return None
    return Diagnosed(
        claim="held-out success got worse under a recipe of your own",
        fix=f"begin again in a new directory{own}; the same task with --recipe grpo shows if the recipe is to blame",
        evidence=(f"{snapshot.learning.words} (evaluation in events.jsonl)",),
        key="learner.recipe",
    )


def tokens_left_out(snapshot: Snapshot) -> Diagnosed | None:
    """Finds steps in which recipe or guard clip or mask most tokens, or train none."""
    recent = snapshot.steps[-RECENT_STEPS:]
    num_empty = sum(not step.num_tokens or step.grad_norm < 1e-9 for step in recent)
    clipped, masked = (middle(snapshot.course(name, recent)) for name in ("clip_share", "masked_share"))
    if len(recent) >= RECENT_STEPS / 2 and num_empty >= len(recent) / 2:
        claim = f"{num_empty} of the newest {len(recent)} steps learned from no token"
        fix = "swarm status tells what the guard set aside; guard.enabled, replay.external and "
        fix += "replay.keep_zero_variance decide what a step may use"
    elif len(snapshot.made) >= FEW_STEPS and clipped + masked >= 0.5:
        claim = f"most tokens teach nothing: {clipped:.0%} are clipped, {masked:.0%} left out"
        fix = "constants of the recipe nearer to its own (learner.recipe_params), or fresher groups"
    else:
        return None
    return Diagnosed(claim=claim, fix=fix, evidence=("num_tokens, clip_share and masked_share of step (events.jsonl)",))


# --- held-out success -------------------------------------------------------------------------------------


def _sigmas_below(now: PolicyEvaluated, best: PolicyEvaluated) -> float:
    """Fall of the accuracy from `best` to `now`, in standard deviations of the difference of two binomials."""
    total = now.num_problems + best.num_problems
    pooled = (now.accuracy * now.num_problems + best.accuracy * best.num_problems) / max(1, total)
    spread = pooled * (1 - pooled) * (1 / max(1, now.num_problems) + 1 / max(1, best.num_problems))
    return (best.accuracy - now.accuracy) / math.sqrt(spread) if spread > 0 else 0.0


def _falls(snapshot: Snapshot) -> list[tuple[Sequence[PolicyEvaluated], PolicyEvaluated]]:
    """Returns (evaluations, best evaluation) of every held-out course that is now far below its best."""
    found: list[tuple[Sequence[PolicyEvaluated], PolicyEvaluated]] = []
    for (_, split), evaluations in snapshot.evaluations.items():
        course = list(evaluations)
        best = max(course, key=lambda each: each.accuracy)
        if split == "held_out" and _sigmas_below(course[-1], best) >= FALL_SIGMAS:
            # The best of many is partly luck: one evaluation more, or one that fell by far, has to agree.
            before = course[-2] if len(course) > 2 and course[-2] is not best else course[-1]
            if _sigmas_below(before, best) >= FALL_SIGMAS - 1:
                found.append((course, best))
    return found


def _fall_words(course: Sequence[PolicyEvaluated], best: PolicyEvaluated) -> str:
    return (
        f"held-out success on {best.env} fell from {best.accuracy:.2f} at step {best.step} to "
        f"{course[-1].accuracy:.2f} at step {course[-1].step} ({course[-1].num_problems} problems, "
        f"{_sigmas_below(course[-1], best):.1f} sigma; evaluation in events.jsonl)"
    )


def overfits(snapshot: Snapshot) -> Diagnosed | None:
    """Finds held-out success that falls while the reward in training rises."""
    rewards = [(step.step, step.diagnostics.get("reward_mean", math.nan)) for step in snapshot.made]
    for course, best in _falls(snapshot):
        then = mean([value for step, value in rewards if abs(step - best.step) <= FEW_STEPS and math.isfinite(value)])
        now = mean([value for _, value in rewards[-FEW_STEPS:] if math.isfinite(value)])
        if now >= then + 0.05 or (now >= LEARNED and now >= then - 0.02):
            return Diagnosed(
                claim=f"the model learns its training problems by heart: held-out success on {best.env} falls while "
                "the reward in training rises",
                fix=f"more problems, or fewer steps: learner.num_steps near {best.step}, and evaluation.every_steps so "
                "that the best is seen; checkpoints kept: swarm export --step",
                evidence=(_fall_words(course, best), f"learn/reward_mean {then:.2f} then, {now:.2f} now"),
            )
    return None


def held_out_falls(snapshot: Snapshot) -> Diagnosed | None:
    """Finds held-out success that is far below its best."""
    falls, others = _falls(snapshot), events_of(OthersSetAside, snapshot.events)
    is_set_aside = bool(others) and not others[-1].is_over
    if not falls and not is_set_aside:
        return None
    blamed = " Groups of other nodes may be why: look at learn/source_*"
    aside = (
        [f"groups of other nodes, the newest first, are set aside since step {others[-1].step}"] if is_set_aside else []
    )
    return Diagnosed(
        claim="held-out success fell far below its best",
        fix=f"start again from an older checkpoint with half the learning rate{_of_own_recipe(snapshot)}."
        + (blamed if snapshot.value("num_external_used", 0) else ""),
        evidence=(*(_fall_words(course, best) for course, best in falls), *aside),
    )


def _has_held_out_stayed(snapshot: Snapshot) -> bool:
    """True if rewards in training rise far while held-out success stays."""
    rewards = snapshot.course("reward_mean")
    courses = [course for (_, split), course in snapshot.evaluations.items() if split == "held_out" and len(course) > 1]
    fifth = len(rewards) // 5
    if len(rewards) < FEW_STEPS or not courses or mean(rewards[-fifth:]) < mean(rewards[:fifth]) + FAR_UP:
        return False
    return all(_sigmas_below(course[0], course[-1]) <= 1 and course[-1].accuracy <= LEARNED for course in courses)


def few_questions(snapshot: Snapshot) -> Diagnosed | None:
    """Finds training on the same few questions, which helps with no other questions."""
    groups = [each for each in snapshot.answers if each.texts]
    count = len({(each.env, each.prompt) for each in groups})
    if len(groups) < FEW_GROUPS or count > min(FEW_QUESTIONS, len(groups) * 2 / 3):
        return None
    equal = equal_rewards(snapshot)
    is_harm = bool(_falls(snapshot)) or _has_held_out_stayed(snapshot) or one_answer(snapshot) is not None
    is_harm = is_harm or (equal is not None and equal.name != "all_wrong")
    return Diagnosed(
        claim=f"the same few questions are asked again and again: the newest {len(groups)} groups are of {count}",
        fix="more problems: a larger data file without the same ones again, or a greater num_tasks under "
        "[[environments]]",
        key="environments.num_tasks",
        gravity=Gravity.HARMS if is_harm else Gravity.NOTE,
    )


# --- the replay buffer and the guard ----------------------------------------------------------------------


def stale(snapshot: Snapshot) -> Diagnosed | None:
    """Finds own groups that are too old, by steps or by the clock, when a draw could take them."""
    if (waiting := _too_slow_for_the_clock(snapshot)) is not None:
        return waiting
    draws, bounds = snapshot.draws[-2 * RECENT_STEPS :], snapshot.config and snapshot.config.replay
    since, stored = snapshot.started_at_s or 0.0, snapshot.oldest_step_of
    too_old = [  # those that waited while the node did not run are no fault
        (digest, draw)
        for draw in draws
        for digest in draw.too_old
        if stored.get(digest, (0, 0.0))[1] >= since or draw.at_s < since
    ]
    used = sum(use.is_own_policy for draw in draws for use in draw.groups) + sum(d.num_zero_variance for d in draws)
    share = len(too_old) / max(1, len(too_old) + used)
    if bounds is None or len(too_old) < 8 or share < 0.1:
        return None
    known = [(draw, *stored[digest]) for digest, draw in too_old if digest in stored]
    waited = [draw.at_s - at_s for draw, _, at_s in known]
    ages = [draw.draw_step - 1 - step for draw, step, _ in known]
    by_clock = sum(each > bounds.max_age_s for each in waited)
    by_steps = sum(age > draw.max_age_steps for age, (draw, _, _) in zip(ages, known, strict=True))
    if not by_clock + by_steps and any(_is_bounded(snapshot, step) for step in snapshot.steps[-RECENT_STEPS:]):
        return None  # too old for the guard alone: `all_set_aside` says why
    evidence = f"{len(too_old)} of {len(too_old) + used} own groups of the newest {len(draws)} draws (too_old of draw)"
    gravity = Gravity.STOPS if not used else Gravity.HARMS if share > 0.3 else Gravity.WASTES
    if by_clock > by_steps:
        return Diagnosed(
            claim="groups wait longer than replay.max_age_s before a step can use them: steps are slow, or too many "
            "are made",
            fix=snapshot.set_key("replay.max_age_s", max(600.0, 3 * middle(waited))),
            evidence=(f"{evidence}; they waited {middle(waited):.0f} s, and {bounds.max_age_s:g} s are allowed",),
            key="replay.max_age_s",
            gravity=gravity,
        )
    return Diagnosed(
        claim="groups are more steps old than replay.max_age_steps when they could be used",
        fix=snapshot.set_key("replay.max_age_steps", max(2, 2 * bounds.max_age_steps))
        + "; or smaller batches ([generator] groups_per_batch), so that fewer wait",
        evidence=(f"{evidence}; median age {middle(ages):.0f} steps, and {bounds.max_age_steps} are allowed",),
        key="replay.max_age_steps",
        gravity=gravity,
    )


def _too_slow_for_the_clock(snapshot: Snapshot) -> Diagnosed | None:
    """Finds groups with signal that come so slowly that the first one of a step is too old when the last one comes."""
    config, (_, num_with_signal, _, _), since_s = snapshot.config, snapshot.own, snapshot.idle_s
    if config is None or since_s <= 0 or num_with_signal < max(8, 2 * config.replay.local_groups):
        return None
    needed, max_age_s = config.replay.local_groups, config.replay.max_age_s
    in_time = num_with_signal / since_s * max_age_s
    if snapshot.is_finished or in_time >= needed or since_s < 2 * max_age_s:
        return None
    enough_s = float(f"{3 * needed * since_s / num_with_signal:.2g}")
    return Diagnosed(
        claim=f"a step needs {needed} own groups with differing rewards at a time, and they grow older than "
        f"replay.max_age_s = {max_age_s:g} s before so many are there",
        fix=snapshot.set_key("replay.max_age_s", max(600.0, enough_s)) + "; or fewer replay.local_groups",
        evidence=(f"{num_with_signal} such groups in {since_s:.0f} s without a step (own_since_step in status.json)",),
        key="replay.max_age_s",
    )


def buffer_too_small(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a replay buffer that cannot hold the groups of one step."""
    if snapshot.config is None or snapshot.is_finished or not snapshot.is_trainer:
        return None
    if snapshot.steps and (snapshot.steps[-1].was_skipped or _is_bounded(snapshot, snapshot.steps[-1])):
        return None  # the node counts own groups since a step that made a version, and the guard drops older ones
    replay, num_held, num_with_signal = snapshot.config.replay, snapshot.value("replay_groups", 0), snapshot.own[1]
    is_small = replay.max_groups < replay.local_groups
    if not is_small and (num_with_signal < max(8, 2 * replay.local_groups) or num_held >= replay.local_groups):
        return None
    if not is_small and _too_slow_for_the_clock(snapshot) is not None:
        return None
    key, value = ("max_groups", 4096) if is_small else ("max_bytes", 256 * 2**20)
    return Diagnosed(
        claim=f"the replay buffer holds fewer groups than a step needs ({replay.local_groups}): replay.{key} is too "
        "small",
        fix=snapshot.set_key(f"replay.{key}", value),
        evidence=(f"{num_held} are held after {num_with_signal} own groups with signal (status.json)",),
        key=f"replay.{key}",
    )


def all_set_aside(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a guard that set every source of the newest draws aside, or keeps the learner at its safe recipe."""
    figures = snapshot.guard
    words, recent = set_aside_words(figures), snapshot.steps[-RECENT_STEPS:]
    idle_s = snapshot.stepless_s
    is_long = idle_s > snapshot.max_idle_s or (idle_s > LONG_S and figures.get("guard_idle_draws", 0) >= MANY_DRAWS)
    num_high = sum(step.diagnostics.get("guard_level", 0) >= 2 for step in recent)
    if words and is_long:
        claim, gravity = f"no step is made, since {words}", Gravity.STOPS
    elif len(recent) >= 3 and num_high >= len(recent) / 2:
        claim = "data is so far off policy that the guard lets the learner use its safe recipe only"
        gravity = Gravity.HARMS
    else:
        return None
    return Diagnosed(
        claim=claim,
        fix=snapshot.set_key("replay.max_age_steps", 1)
        + "; if own groups are fresh, engine and learner differ: docs/engines.md tells how much they may",
        evidence=(f"guard (status.json); learn/guard_level is 2 or 3 in {num_high} of the newest {len(recent)} steps",),
        gravity=gravity,
    )


def set_aside_words(figures: dict[str, float]) -> str:
    """Describes, by its figures, a guard that set every source aside; "" without figures."""
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


# --- steps that do not come -------------------------------------------------------------------------------


def waiting_words(snapshot: Snapshot) -> str:
    """Describes the groups since the newest step, if none of them can be learned from; else ""."""
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
    """Finds a node without step, group or sign of work for longer than the limit, or with many groups of no signal."""
    if snapshot.status is None or snapshot.is_finished or snapshot.only_relays:
        return None
    idle_s = snapshot.stepless_s
    waiting = waiting_words(snapshot)
    if idle_s > snapshot.max_idle_s and not _is_at_work(snapshot, idle_s):
        product = "optimizer step" if snapshot.following is None else "group"
        known = "; ".join(filter(None, (set_aside_words(snapshot.guard), waiting)))
        claim = f"no {product} for {idle_s:.0f} s (limit {snapshot.max_idle_s:.0f} s), at step "
        claim += f"{snapshot.value('step', 0)}{f': {known}' if known else ''}"
    elif snapshot.num_in_vain >= MANY_IN_VAIN:
        claim = f"waits for {waiting}"
    else:
        return None
    return Diagnosed(
        claim=claim,
        fix="the node's log tells what it did last; swarm samples shows own groups, swarm doctor this machine",
    )


def _is_at_work(snapshot: Snapshot, idle_s: float) -> bool:
    """True if the worker of a slow machine is still at work on a step: it advanced recently and waits for nobody.

    Work does not count while the guard sets every source aside, nor after PATIENT times the limit without a step.
    """
    sign = Activity.read(snapshot.value("worker", None))
    if sign is None or sign.what.startswith(WAITING) or idle_s > PATIENT * snapshot.max_idle_s:
        return False
    is_of_late = 0.0 <= snapshot.at_s - sign.at_s <= snapshot.max_idle_s
    return is_of_late and not set_aside_words(snapshot.guard)


def overdue(snapshot: Snapshot, kind: type[Event], *besides: type[Event]) -> tuple[float, float] | None:
    """Returns (seconds since the newest event, usual seconds between two events of the kind); None if not overdue.

    Events of the kinds `besides` count as work too: the limit is a multiple of the longest time between any events.
    """
    since = snapshot.started_at_s or 0.0
    worked = [event for event in snapshot.events if isinstance(event, (kind, *besides)) and event.at_s >= since]
    times = [event.at_s for event in worked if isinstance(event, kind)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if len(gaps) < FEW_EVENTS:
        return None
    longest_s = max(later.at_s - earlier.at_s for earlier, later in pairwise(worked))
    waited_s = snapshot.at_s - worked[-1].at_s
    return (waited_s, middle(gaps)) if waited_s > max(LEAST_S, TIMES * longest_s) else None


def halted(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node that made steps or groups before and has stopped making them."""
    if snapshot.is_finished or snapshot.only_relays or snapshot.value("is_loading", False):
        return None
    if snapshot.paused_since_s is not None or snapshot.idle_s < LEAST_S:  # the status has events that were lost
        return None
    # the first version is published before the first evaluation, and so says how long one takes
    kinds = (StepMade, PolicyEvaluated, VersionPublished) if snapshot.is_trainer else (GroupPut, GroupUnscored)
    found, product = overdue(snapshot, *kinds), "step" if snapshot.is_trainer else "group"
    if found is None:
        return None
    waited_s, usual_s = found
    num_groups = sum(each.at_s > snapshot.at_s - waited_s for each in snapshot.attempts)
    signal = ", none with differing rewards" if snapshot.num_in_vain else ""
    known = set_aside_words(snapshot.guard)
    if not known and snapshot.is_trainer and num_groups:
        known = f"{num_groups} own groups came meanwhile{signal}"
    return Diagnosed(
        claim=f"the node makes no {product}s any more: none for {waited_s:.0f} s, where one took {usual_s:.2g} s before"
        + (f"; {known}" if known else ""),
        fix="a process of it that a signal holds goes on with kill -CONT; its newest warnings are in warnings.jsonl; "
        f"else stop it, then {snapshot.start}",
        evidence=(f"at_s of {product} in events.jsonl, step {snapshot.value('step', 0)}",),
    )


def barrier_waits(snapshot: Snapshot) -> Diagnosed | None:
    """Finds steps that wait for the slowest node at a barrier."""
    recent, span_s = snapshot.made[-RECENT_STEPS:], snapshot.recent_span_s
    waited_s = sum(step.seconds.get("draw_wait_s", step.seconds.get("draw_wait", 0.0)) for step in recent)
    if snapshot.config is None or not snapshot.config.replay.barrier or len(recent) < 5 or waited_s < 0.8 * span_s:
        return None
    return Diagnosed(
        claim="each step waits for the slowest node: replay.barrier is on",
        fix=snapshot.set_key("replay.barrier", False),
        evidence=(f"{waited_s:.0f} s of {span_s:.0f} s waiting for a draw (seconds of step in events.jsonl)",),
        key="replay.barrier",
    )


def step_needs_many(snapshot: Snapshot) -> Diagnosed | None:
    """Finds steps that take very long because own groups with signal come slowly."""
    config, num_with_signal, idle_s = snapshot.config, snapshot.own[1], snapshot.idle_s
    if config is None or snapshot.is_finished or idle_s < PATIENCE_S or not snapshot.attempts:
        return None
    needed = config.replay.local_groups
    expected_s = needed * idle_s / max(1, num_with_signal)
    if num_with_signal >= needed or expected_s < LONG_STEP_S:
        return None
    return Diagnosed(
        claim=f"a step needs {needed} own groups with differing rewards, and in {idle_s:.0f} s {num_with_signal} came: "
        f"one step in {expected_s / 60:.0f} minutes, or more",
        fix="tasks of which more answers are right, more tries (generator.group_size), or fewer replay.local_groups",
    )


def waits_for_groups(snapshot: Snapshot) -> bool:
    """True if steps wait for groups more than half of the time; healthy nodes may do so too."""
    waited_s = sum(step.seconds.get("draw_wait", 0.0) for step in snapshot.made[-RECENT_STEPS:][1:])
    return waited_s > 0.5 * snapshot.recent_span_s > 0


def has_no_product_yet(snapshot: Snapshot) -> bool:
    """True if no step (for a generator, no group) was made since the start; large models take minutes."""
    if snapshot.up_s < PATIENCE_S or snapshot.is_finished or snapshot.value("is_loading", False):
        return False
    if snapshot.is_trainer:
        return not any(step.at_s >= (snapshot.started_at_s or 0.0) for step in snapshot.steps)
    has_weights = snapshot.following is None or snapshot.following["served_step"] is not None
    return has_weights and not snapshot.only_relays and not snapshot.attempts and not snapshot.value("num_put", 0)


def evaluations_take_time(snapshot: Snapshot) -> Diagnosed | None:
    """Finds evaluations that take more time than steps."""
    took_s = whole_s = before_s = 0.0
    if snapshot.config is not None and not snapshot.environments:
        return None  # held-out runs of agents, which the node does not make
    for event in snapshot.events:
        if isinstance(event, NodeStarted):
            before_s = 0.0  # the time between two processes is no work of either
        if isinstance(event, StepMade | PolicyEvaluated):
            spent_s = event.at_s - before_s if before_s else 0.0
            whole_s += spent_s
            took_s += spent_s if isinstance(event, PolicyEvaluated) else 0.0
            before_s = event.at_s
    waiting_s = snapshot.at_s - before_s if before_s else 0.0
    if len(snapshot.made) < 3 or took_s <= max(LEAST_EVALUATED_S, 0.5 * whole_s, waiting_s):
        return None
    return Diagnosed(
        claim=f"evaluations take {took_s / whole_s:.0%} of the time",
        fix=snapshot.set_key("evaluation.every_steps", 50, why=" (or evaluation.num_problems less)"),
        evidence=(f"{took_s:.0f} s of {whole_s:.0f} s (at_s of evaluation and step in events.jsonl)",),
        key="evaluation.every_steps",
    )


def slow_compute_dtype(snapshot: Snapshot) -> Diagnosed | None:
    """Finds passes in bfloat16 on a machine that has no hardware for it."""
    since = snapshot.value("started_at_s", snapshot.now_s) - LONG_STEP_S / 2
    noted = [each for each in snapshot.warnings if each.message == SLOW_DTYPE and each.at_s >= since]
    if not noted:
        return None
    return Diagnosed(
        claim=f"passes are computed in a dtype that this machine has no hardware for: {shortened(noted[-1].fields)}",
        fix=f'set compute_dtype = "float32" in {snapshot.toml}; published versions stay the same',
        key="compute_dtype",
    )
