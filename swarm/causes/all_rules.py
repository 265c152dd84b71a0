"""Every rule, in one list, and a diagnosis: what the rules find in a snapshot, causes first.

Invariant: a finding that another one explains comes after it; notes come last, and no rule depends on another's order.
"""

from collections.abc import Callable, Sequence
from typing import Final

from swarm.causes import exchange_rules, following_rules, learning_rules, running_rules, signal_rules
from swarm.causes.finding import Diagnosed, by_cause
from swarm.causes.snapshot import Snapshot

Rule = Callable[[Snapshot], Diagnosed | None]

# Those that need status.json alone, and no patience: what `swarm status` says, too.
STATUS_RULES: Final[tuple[Rule, ...]] = (
    running_rules.does_not_run,
    running_rules.hangs,
    learning_rules.no_steps,
    following_rules.no_trainer,
    following_rules.trainer_away,
    following_rules.versions_refused,
    running_rules.loops_fail,
    running_rules.disk_full,
    exchange_rules.coordinator_alarm,
    exchange_rules.differs_from_run,
)
RULES: Final[tuple[Rule, ...]] = (
    running_rules.broken_configuration,
    running_rules.never_ran,
    running_rules.ended_with_error,
    running_rules.starts,
    running_rules.paused,
    running_rules.out_of_memory,
    running_rules.worker_dies,
    running_rules.killer_group,
    running_rules.store_damaged,
    running_rules.restarts_often,
    signal_rules.cannot_be_scored,
    signal_rules.cut_off,
    signal_rules.equal_rewards,
    signal_rules.small_signal,
    learning_rules.learning_rate_too_high,
    learning_rules.not_a_number,
    learning_rules.learning_rate_too_low,
    learning_rules.steps_change_nothing,
    learning_rules.weights_decay,
    learning_rules.overfits,
    learning_rules.held_out_falls,
    learning_rules.stale,
    learning_rules.buffer_too_small,
    learning_rules.stays_on_policy,
    learning_rules.all_set_aside,
    learning_rules.finished,
    exchange_rules.clock_is_wrong,
    exchange_rules.quota_too_low,
    exchange_rules.settings_differ,
    exchange_rules.environments_differ,
    exchange_rules.tokens_differ,
    exchange_rules.liar,
    exchange_rules.forgers,
    exchange_rules.come_too_late,
    exchange_rules.coordinator_refuses,
    exchange_rules.coordinator_away,
    exchange_rules.no_entry,
    exchange_rules.cannot_dial,
    exchange_rules.nobody_can_dial,
    exchange_rules.no_relay,
    exchange_rules.alone,
    exchange_rules.no_external,
    exchange_rules.newcomers,
    exchange_rules.barrier_waits,
    following_rules.no_credit,
    following_rules.equivocated,
    following_rules.not_published,
    following_rules.nobody_follows,
    following_rules.far_behind,
    *STATUS_RULES,  # last: of equal weight, what a status tells is mostly the effect
)


def diagnose(snapshot: Snapshot, rules: Sequence[Rule] = RULES) -> list[Diagnosed]:
    """What is found, the likeliest cause first."""
    return by_cause(found for rule in _of(snapshot, rules) if (found := rule(snapshot)) is not None)


def status_findings(snapshot: Snapshot) -> list[Diagnosed]:
    """What a status alone tells, in the order of the rules."""
    rules = (*STATUS_RULES, exchange_rules.nobody_agrees)  # which sums up what a diagnosis tells one by one
    return [found for rule in _of(snapshot, rules) if (found := rule(snapshot)) is not None]


def _of(snapshot: Snapshot, rules: Sequence[Rule]) -> list[Rule]:
    """Those that say something: a paused node makes no steps and has no peers, and only its processes can be ill."""
    if not snapshot.runs or snapshot.paused_since_s is None:
        return [*rules]
    return [rule for rule in rules if rule.__module__ == running_rules.__name__]
