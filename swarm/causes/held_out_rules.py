"""Rules about held-out success: whether it falls, and whether the reward in training rises meanwhile."""

import math
from collections.abc import Sequence
from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.snapshot import FEW_STEPS, Snapshot, mean
from swarm.events import OthersSetAside, PolicyEvaluated, events_of

FALL_SIGMAS: Final = 3.0
FAR_UP: Final = 0.3  # of rewards in training
LEARNED: Final = 0.9


def _sigmas_below(now: PolicyEvaluated, best: PolicyEvaluated) -> float:
    """In standard deviations of the difference of two binomials."""
    total = now.num_problems + best.num_problems
    pooled = (now.accuracy * now.num_problems + best.accuracy * best.num_problems) / max(1, total)
    variance = pooled * (1 - pooled) * (1 / max(1, now.num_problems) + 1 / max(1, best.num_problems))
    return (best.accuracy - now.accuracy) / math.sqrt(variance) if variance > 0 else 0.0


def find_falls(snapshot: Snapshot) -> list[tuple[list[PolicyEvaluated], PolicyEvaluated]]:
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


def fall_words(of: Sequence[PolicyEvaluated], best: PolicyEvaluated) -> str:
    """How far held-out success fell since its best."""
    return (
        f"held-out success on {best.env} fell from {best.accuracy:.2f} at step {best.step} to "
        f"{of[-1].accuracy:.2f} at step "
        f"{of[-1].step} ({of[-1].num_problems} problems, {_sigmas_below(of[-1], best):.1f} sigma; evaluation in "
        "events.jsonl)"
    )


def overfits(snapshot: Snapshot) -> Diagnosed | None:
    """Held-out success falls while what is trained on is answered better and better."""
    rewards = [(step.step, step.diagnostics.get("reward_mean", math.nan)) for step in snapshot.made]
    for of, best in find_falls(snapshot):
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
                fall_words(of, best),
                f"learn/reward_mean {then:.2f} then, {now:.2f} now (step in events.jsonl)",
            ),
            fix="more problems, or fewer steps: learner.num_steps near "
            f"{best.step}, and evaluation.every_steps so that the best is seen; checkpoints kept: swarm export --step",
            gravity=Gravity.HARMS,
            certainty=Certainty.LIKELY,
            follows_from=frozenset({"learning_rate_too_high"}),
        )
    return None


def held_out_stays(snapshot: Snapshot) -> Diagnosed | None:
    """Rewards in training rise far, and held-out success stays: a note, as a reward that grades looks the same."""
    rewards = snapshot.course("reward_mean")
    courses = [course for (_, split), course in snapshot.evaluations.items() if split == "held_out" and len(course) > 1]
    fifth = len(rewards) // 5
    if len(rewards) < FEW_STEPS or not courses or mean(rewards[-fifth:]) < mean(rewards[:fifth]) + FAR_UP:
        return None
    if any(_sigmas_below(course[0], course[-1]) > 1 or course[-1].accuracy > LEARNED for course in courses):
        return None
    first, last = courses[0][0], courses[0][-1]
    return Diagnosed(
        name="held_out_stays",
        claim=f"held-out success on {first.env} stays ({first.accuracy:.2f}, now {last.accuracy:.2f}), while the "
        f"reward in training rose from {mean(rewards[:fifth]):.2f} to {mean(rewards[-fifth:]):.2f}",
        evidence=("evaluation and step in events.jsonl",),
        gravity=Gravity.NOTE,
    )


def held_out_falls(snapshot: Snapshot) -> Diagnosed | None:
    """Held-out success is far below its best."""
    falls = find_falls(snapshot)
    others = events_of(OthersSetAside, snapshot.events)
    if not falls and not (others and not others[-1].is_over):
        return None
    evidence = [fall_words(of, best) for of, best in falls]
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
