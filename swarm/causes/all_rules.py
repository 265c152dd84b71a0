"""Every rule, in one list, and a diagnosis: what the rules find in a snapshot, causes first.

Invariant: a finding that another one explains comes after it; notes come last, and no rule depends on another's order.
"""

from collections.abc import Callable, Sequence
from typing import Final

from swarm.causes import (
    connection_rules,
    coordinator_rules,
    data_rules,
    dishonest_peer_rules,
    disk_rules,
    error_rules,
    external_group_rules,
    following_rules,
    group_rules,
    held_out_rules,
    logged_rules,
    off_policy_rules,
    optimizer_rules,
    pace_rules,
    refusal_rules,
    replay_buffer_rules,
    reward_rules,
    running_rules,
    signal_rules,
    step_rules,
    waiting_rules,
)
from swarm.causes.far_settings import far_settings, with_bearing
from swarm.causes.finding import Diagnosed, Suspect, by_cause, is_healthy, unusual, with_guilty
from swarm.causes.snapshot import Snapshot

Rule = Callable[[Snapshot], Diagnosed | None]

# Those that need status.json alone, and no patience: what `swarm status` says, too.
STATUS_RULES: Final[tuple[Rule, ...]] = (
    running_rules.does_not_run,
    running_rules.hangs,
    waiting_rules.no_steps,
    following_rules.no_trainer,
    following_rules.trainer_away,
    following_rules.versions_refused,
    running_rules.loops_fail,
    disk_rules.disk_full,
    coordinator_rules.coordinator_alarm,
    coordinator_rules.differs_from_run,
)
RULES: Final[tuple[Rule, ...]] = (
    running_rules.broken_configuration,
    running_rules.never_ran,
    running_rules.ended_with_error,
    running_rules.starts,
    running_rules.paused,
    running_rules.only_relays,
    running_rules.change_waits,
    running_rules.out_of_memory,
    running_rules.worker_dies,
    running_rules.killer_group,
    pace_rules.process_stopped,
    disk_rules.store_damaged,
    pace_rules.restarts_often,
    running_rules.helpers_die,
    signal_rules.cannot_be_scored,
    signal_rules.scoring_is_slow,
    signal_rules.cut_off,
    signal_rules.episodes_cut_off,
    signal_rules.equal_rewards,
    signal_rules.small_signal,
    data_rules.records_contradict,
    data_rules.records_broken,
    data_rules.answers_no_text,
    reward_rules.answers_are_shifted,
    data_rules.questions_tell_answers,
    data_rules.answers_have_no_room,
    data_rules.questions_too_long,
    reward_rules.right_answers_unpaid,
    data_rules.records_repeat,
    data_rules.one_right_answer,
    group_rules.one_question,
    reward_rules.reward_is_random,
    reward_rules.reward_is_of_length,
    reward_rules.reward_ignores_question,
    reward_rules.rewards_hardly_differ,
    group_rules.one_answer,
    group_rules.environment_in_vain,
    group_rules.environment_not_asked,
    optimizer_rules.learning_rate_too_high,
    optimizer_rules.not_a_number,
    optimizer_rules.learning_rate_too_low,
    optimizer_rules.steps_change_nothing,
    optimizer_rules.weights_decay,
    held_out_rules.overfits,
    held_out_rules.held_out_falls,
    replay_buffer_rules.stale,
    replay_buffer_rules.buffer_too_small,
    off_policy_rules.stays_on_policy,
    off_policy_rules.all_set_aside,
    waiting_rules.finished,
    step_rules.gets_worse,
    step_rules.learns_nothing,
    step_rules.steps_move_far,
    step_rules.tokens_left_out,
    step_rules.nothing_trained,
    step_rules.steps_made_again,
    step_rules.evaluations_take_time,
    waiting_rules.step_needs_many,
    coordinator_rules.clock_is_wrong,
    refusal_rules.quota_too_low,
    refusal_rules.settings_differ,
    refusal_rules.environments_differ,
    refusal_rules.tokens_differ,
    dishonest_peer_rules.liar,
    dishonest_peer_rules.forgers,
    refusal_rules.others_refused,
    connection_rules.turns_others_away,
    refusal_rules.come_too_late,
    coordinator_rules.coordinator_refuses,
    coordinator_rules.coordinator_away,
    refusal_rules.no_entry,
    connection_rules.cannot_dial,
    connection_rules.nobody_can_dial,
    connection_rules.no_relay,
    connection_rules.directory_is_off,
    connection_rules.upload_is_short,
    connection_rules.alone,
    external_group_rules.no_external,
    external_group_rules.newcomers,
    waiting_rules.barrier_waits,
    pace_rules.halted,
    following_rules.no_credit,
    following_rules.equivocated,
    following_rules.not_published,
    following_rules.nobody_follows,
    following_rules.far_behind,
    following_rules.no_weights_yet,
    logged_rules.reward_is_upside_down,
    logged_rules.slow_compute_dtype,
    logged_rules.logged_errors,
    *STATUS_RULES,  # last: of equal weight, what a status tells is mostly the effect
)

# Seen at healthy nodes, too: said only with the setting that brings them about.
SYMPTOMS: Final[tuple[Rule, ...]] = (
    held_out_rules.held_out_stays,
    step_rules.no_progress,
    step_rules.steps_are_small,
    step_rules.groups_learned_again,
    group_rules.answers_are_noise,
    waiting_rules.waits_for_groups,
    waiting_rules.no_group_yet,
    waiting_rules.no_step_yet,
    waiting_rules.no_peer_yet,
)


def diagnose(snapshot: Snapshot, rules: Sequence[Rule] = RULES) -> list[Diagnosed]:
    """What is found, the likeliest cause first; what is unusual only with what it does, or where nothing is wrong."""
    found, seen = _apply(rules, snapshot), _apply(SYMPTOMS, snapshot)
    names = {each.name for each in seen}
    suspects = _suspects(snapshot)
    explained = with_guilty([*found, *seen], suspects)
    found = [each for each in explained if each.name not in names or each.follows_from]
    return unusual(found, suspects) if is_healthy(found) else by_cause(with_bearing(found, snapshot))


def _suspects(snapshot: Snapshot) -> list[Suspect]:
    of = (
        error_rules.suspects,
        data_rules.suspects,
        reward_rules.suspects,
        group_rules.suspects,
        logged_rules.suspects,
        far_settings,
    )
    return [each for suspects in of for each in suspects(snapshot)]


def status_findings(snapshot: Snapshot) -> list[Diagnosed]:
    """What a status alone tells, in the order of the rules."""
    rules = (*STATUS_RULES, refusal_rules.nobody_agrees)  # which sums up what a diagnosis tells one by one
    return _apply(rules, snapshot)


def _apply(rules: Sequence[Rule], snapshot: Snapshot) -> list[Diagnosed]:
    return [found for rule in _of(snapshot, rules) if (found := rule(snapshot)) is not None]


def _of(snapshot: Snapshot, rules: Sequence[Rule]) -> list[Rule]:
    """Those that say something: of a paused node, which makes no steps and has no peers, processes and disk alone."""
    if not snapshot.runs or snapshot.paused_since_s is None:
        return [*rules]
    return [rule for rule in rules if rule.__module__ in (running_rules.__name__, disk_rules.__name__)]
