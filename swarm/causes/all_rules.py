"""Every rule, in one list, and a diagnosis: what the rules find in a snapshot, causes first.

Invariant: a finding that another one explains comes after it; notes come last, and no rule depends on another's order.
"""

from collections.abc import Callable, Sequence
from typing import Final

from swarm.causes import (
    error_rules,
    exchange_rules,
    following_rules,
    group_rules,
    learning_rules,
    running_rules,
    signal_rules,
    step_rules,
)
from swarm.causes.far_settings import far_settings
from swarm.causes.finding import Diagnosed, Suspect, by_cause, with_guilty
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
    running_rules.helpers_die,
    signal_rules.cannot_be_scored,
    signal_rules.cut_off,
    signal_rules.episodes_cut_off,
    signal_rules.equal_rewards,
    signal_rules.small_signal,
    group_rules.one_question,
    group_rules.reward_is_random,
    group_rules.rewards_hardly_differ,
    group_rules.one_answer,
    group_rules.environment_in_vain,
    group_rules.environment_not_asked,
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
    step_rules.gets_worse,
    step_rules.learns_nothing,
    step_rules.steps_move_far,
    step_rules.tokens_left_out,
    step_rules.nothing_trained,
    step_rules.steps_made_again,
    step_rules.evaluations_take_time,
    step_rules.step_needs_many,
    exchange_rules.clock_is_wrong,
    exchange_rules.quota_too_low,
    exchange_rules.settings_differ,
    exchange_rules.environments_differ,
    exchange_rules.tokens_differ,
    exchange_rules.liar,
    exchange_rules.forgers,
    exchange_rules.others_refused,
    exchange_rules.turns_others_away,
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
    following_rules.no_weights_yet,
    *STATUS_RULES,  # last: of equal weight, what a status tells is mostly the effect
)

# Seen at healthy nodes, too: said only with the setting that brings them about.
SYMPTOMS: Final[tuple[Rule, ...]] = (
    step_rules.waits_for_groups,
    step_rules.no_group_yet,
    step_rules.no_step_yet,
    step_rules.no_peer_yet,
)


def diagnose(snapshot: Snapshot, rules: Sequence[Rule] = RULES) -> list[Diagnosed]:
    """What is found, the likeliest cause first; settings that are far from the usual only with what they do."""
    found, seen = _apply(rules, snapshot), _apply(SYMPTOMS, snapshot)
    names = {each.name for each in seen}
    explained = with_guilty([*found, *seen], _suspects(snapshot))
    return by_cause(each for each in explained if each.name not in names or each.follows_from)


def _suspects(snapshot: Snapshot) -> list[Suspect]:
    return [*error_rules.suspects(snapshot), *group_rules.suspects(snapshot), *far_settings(snapshot)]


def status_findings(snapshot: Snapshot) -> list[Diagnosed]:
    """What a status alone tells, in the order of the rules."""
    rules = (*STATUS_RULES, exchange_rules.nobody_agrees)  # which sums up what a diagnosis tells one by one
    return _apply(rules, snapshot)


def _apply(rules: Sequence[Rule], snapshot: Snapshot) -> list[Diagnosed]:
    return [found for rule in _of(snapshot, rules) if (found := rule(snapshot)) is not None]


def _of(snapshot: Snapshot, rules: Sequence[Rule]) -> list[Rule]:
    """Those that say something: a paused node makes no steps and has no peers, and only its processes can be ill."""
    if not snapshot.runs or snapshot.paused_since_s is None:
        return [*rules]
    return [rule for rule in rules if rule.__module__ == running_rules.__name__]
