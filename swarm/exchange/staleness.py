"""Staleness: age of a group's policy in optimizer steps, and bounds on it and on the group's age in seconds.

The guarantee is given at the draw: `ReplayBuffer` drops every group older than the bounds at that moment, so no step
ever learns from it. All other checks only save work: at admission, when a group is sent to a peer, and when a generator
decides whether a batch is worth finishing.
"""

import math
from typing import Final, Protocol

from swarm.clock import CLOCK_SKEW_S
from swarm.exchange.checks.admission_limits import AdmissionLimits, Finding
from swarm.types import PolicyVersion, RefusalReason, RolloutGroup

HEAD_SLACK_STEPS: Final = 1024  # most that a group may be ahead of the newest head known of another lineage


class HasSteps(Protocol):
    """Protocol of a group, or a record of one: steps of the policies that made its oldest and its newest token."""

    @property
    def oldest_step(self) -> int: ...
    @property
    def newest_step(self) -> int: ...


def age_steps(group: HasSteps, head: PolicyVersion | None) -> int:
    """Steps from a group's oldest token to the newest version known of its lineage (`head`, if any), >= 0.

    The newest token counts as well: its producer signed it, so the lineage has come at least so far.
    """
    newest_step = group.newest_step
    return (newest_step if head is None else max(newest_step, head.step)) - group.oldest_step


def is_hopeless(began: PolicyVersion, head: PolicyVersion, max_age_steps: int) -> bool:
    """True if a batch begun with the version `began` is of no use under the version `head`.

    Its oldest tokens are too old, or the trainer went back to an earlier version and abandoned the branch of the batch.
    """
    return began.policy_id == head.policy_id and not 0 <= head.step - began.step <= max_age_steps


def check_freshness(
    group: RolloutGroup,
    head: PolicyVersion | None,
    now_s: float,
    limits: AdmissionLimits,
    *,
    is_own_policy: bool = False,
) -> Finding:
    """Checks age in steps and seconds on arrival.

    Seconds count from the producer's `created_at_s`, so two clocks are compared and a skew is allowed; the buffer
    counts them from `first_seen_s` on our own clock and allows none. `head` is the newest version of our own lineage
    (`is_own_policy`), or the newest signed version known of another; None if none is known.
    """
    if head is None and group.policy_id != group.producer:
        return RefusalReason.UNKNOWN_HEAD, "a lineage that is neither the producer's own nor known here now"
    ahead = 0 if head is None or is_own_policy else group.newest_step - head.step
    if ahead > HEAD_SLACK_STEPS:  # its adverts may be missing for a while
        return RefusalReason.UNKNOWN_HEAD, f"{ahead} steps ahead of the signed head exceed {HEAD_SLACK_STEPS}"
    steps = age_steps(group, head)
    if steps > limits.max_age_steps:
        return RefusalReason.TOO_OLD, f"age {steps} steps exceeds {limits.max_age_steps}"
    age_s = now_s - group.created_at_s
    if not math.isfinite(age_s):
        return RefusalReason.MALFORMED, "created_at is not finite"
    if -age_s > CLOCK_SKEW_S:
        return RefusalReason.FROM_THE_FUTURE, f"created {-age_s:.0f} s ahead of now, at most {CLOCK_SKEW_S:.0f}"
    if age_s > limits.max_age_s + CLOCK_SKEW_S:
        return RefusalReason.TOO_OLD, f"age {age_s:.0f} s exceeds {limits.max_age_s:.0f}"
    return None
