"""Rules about the off-policy guard: when it keeps the learner at its safe recipe, or sets every source aside."""

from typing import Final

from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.snapshot import RECENT_STEPS, Snapshot, middle
from swarm.events import StepMade

MANY_DRAWS: Final = 8  # set aside in a row
LONG_S: Final = 60.0  # without a step


def is_bounded(snapshot: Snapshot, step: StepMade) -> bool:
    """The guard allows less age than the configuration."""
    allowed = step.diagnostics.get("guard_max_age_steps")
    return snapshot.config is not None and allowed is not None and allowed < snapshot.config.replay.max_age_steps


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
    is_long = idle_s > snapshot.max_idle_s or (idle_s > LONG_S and figures.get("guard_idle_draws", 0) >= MANY_DRAWS)
    if not words or not is_long:
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
