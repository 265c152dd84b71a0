"""Rules about optimizer steps: a wrong learning rate, what is not finite, steps that change nothing, weight decay."""

import math
from itertools import pairwise
from statistics import variance
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.held_out_rules import FALL_SIGMAS, fall_words, find_falls
from swarm.causes.off_policy_rules import is_bounded
from swarm.causes.setting_effects import usual_rate
from swarm.causes.signal_rules import SOME_IN_VAIN
from swarm.causes.snapshot import FEW_STEPS, RECENT_STEPS, Snapshot, mean, middle
from swarm.events import StepMade

FAR: Final = 10.0  # times the usual rate
STILL: Final = 1e-4  # standard deviation of the log-ratio over a step of age: less is rounding
FAST: Final = 0.3  # from which on one step is a leap; docs/metrics.md
DECAY: Final = 1e-3  # of each weight at a step; usual is 1e-7 to 1e-6


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
    rate, times = config.learner.learning_rate, config.learner.learning_rate / usual_rate(config)
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
        + snapshot.set_key("learner.learning_rate", usual_rate(config)),
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
    found += [fall_words(of, best) for of, best in find_falls(snapshot)]
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
    guarded = [s for s in recent if s.diagnostics.get("guard_level", 0) >= 1 or is_bounded(snapshot, s)]
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
    rate, usual, still = config.learner.learning_rate, usual_rate(config), _stillness(snapshot)
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
