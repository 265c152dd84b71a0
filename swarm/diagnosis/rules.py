"""The table of rules, ordered by hand: a cause stands before its effects, and the first match is the diagnosis.

Invariant: at most MOST_SHOWN findings are shown, and notes only if nothing is wrong. Every row names a section of
docs/why.md.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from swarm.diagnosis import answer_rules as answers
from swarm.diagnosis import evidence_rules as evidence
from swarm.diagnosis import learning_rules as learning
from swarm.diagnosis import network_rules as network
from swarm.diagnosis import process_rules as process
from swarm.diagnosis import record_rules as records
from swarm.diagnosis import reward_rules as rewards
from swarm.diagnosis import signal_rules as signal
from swarm.diagnosis.settings_rules import far_from_usual
from swarm.diagnosis.snapshot import Diagnosed, Find, Gravity, Snapshot
from swarm.trained.learning_evidence import Learned, LearningEvidence

MOST_SHOWN: Final = 3
DOCS: Final = "docs/why.md"
NOTE, WASTES, HARMS, STOPS = Gravity


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A row of the table."""

    name: str
    find: Find
    gravity: Gravity  # where the finding itself has none
    docs: str  # heading of docs/why.md
    is_effect: bool = False  # mostly follows from a cause above: left out where one of its weight was found
    while_paused: bool = False  # looks at process or disk, which matter at a paused node, too

    def __call__(self, snapshot: Snapshot) -> Diagnosed | None:
        """Applies the rule: the finding with name, gravity and page; None if the rule finds nothing."""
        found = self.find(snapshot)
        if found is None:
            return None
        gravity = self.gravity if found.gravity is None else found.gravity
        return replace(found, name=found.name or self.name, gravity=gravity, docs=f"{DOCS}#{self.docs}")


def _far(kind: str) -> Rule:
    return _effect("far_from_usual", partial(far_from_usual, kind=kind), HARMS, "settings")


def _rule(name: str, find: Find, gravity: Gravity, docs: str, *, while_paused: bool = False) -> Rule:
    return Rule(name=name, find=find, gravity=gravity, docs=docs, while_paused=while_paused)


def _effect(name: str, find: Find, gravity: Gravity, docs: str, *, while_paused: bool = False) -> Rule:
    return Rule(name=name, find=find, gravity=gravity, docs=docs, is_effect=True, while_paused=while_paused)


RULES: Final[tuple[Rule, ...]] = (
    # The process cannot work.
    _rule("broken_configuration", process.broken_configuration, STOPS, "the-process", while_paused=True),
    _rule("file_missing", process.file_missing, STOPS, "records", while_paused=True),
    _rule("process_stopped", process.process_stopped, STOPS, "the-process", while_paused=True),
    _rule("disk_full", process.disk_full, STOPS, "the-disk", while_paused=True),
    _rule("hangs", process.hangs, STOPS, "the-process", while_paused=True),
    _far("machine"),
    _rule("out_of_memory", process.out_of_memory, STOPS, "the-process", while_paused=True),
    _rule("known_error", process.known_error, STOPS, "errors", while_paused=True),
    _rule("ended_with_error", process.ended_with_error, STOPS, "the-process", while_paused=True),
    _effect("never_ran", process.never_ran, STOPS, "the-process", while_paused=True),
    _rule("status_unwritten", process.status_unwritten, HARMS, "the-process", while_paused=True),
    _rule("worker_dies", process.worker_dies, STOPS, "the-process", while_paused=True),
    _effect("restarts_often", process.restarts_often, STOPS, "the-process", while_paused=True),
    # Nothing can be learned from records, answers or rewards.
    _rule("cannot_be_scored", rewards.cannot_be_scored, STOPS, "scoring"),
    _rule("reward_is_upside_down", rewards.reward_is_upside_down, HARMS, "rewards"),
    _rule("records_contradict", records.records_contradict, HARMS, "records"),
    _rule("records_broken", records.records_broken, HARMS, "records"),
    _rule("answers_no_text", records.answers_no_text, HARMS, "records"),
    _rule("answers_are_shifted", answers.answers_are_shifted, HARMS, "records"),
    _rule("reward_is_random", rewards.reward_is_random, HARMS, "rewards"),
    _rule("reward_is_of_length", rewards.reward_is_of_length, HARMS, "rewards"),
    _rule("learning_rate_too_high", learning.learning_rate_too_high, HARMS, "steps"),
    _rule("weights_decay", learning.weights_decay, HARMS, "steps"),
    _rule("not_a_number", learning.not_a_number, STOPS, "steps"),
    _rule("right_but_for_the_form", answers.right_but_for_the_form, HARMS, "rewards"),
    _rule("own_recipe_harms", learning.own_recipe_harms, HARMS, "steps"),
    _far("signal"),
    _rule("cut_off", signal.cut_off, STOPS, "equal-rewards"),
    _rule("episodes_cut_off", signal.episodes_cut_off, STOPS, "equal-rewards"),
    _rule("reference_worth_nothing", rewards.reference_worth_nothing, HARMS, "rewards"),
    _rule("right_answers_hold_more", answers.right_answers_hold_more, HARMS, "records"),
    _rule("rewards_hardly_differ", rewards.rewards_hardly_differ, HARMS, "rewards"),
    _rule("right_answers_unpaid", answers.right_answers_unpaid, HARMS, "rewards"),
    _rule("one_question", records.one_question, HARMS, "records"),
    _rule("one_right_answer", records.one_right_answer, WASTES, "records"),
    _rule("reward_ignores_question", rewards.reward_ignores_question, HARMS, "rewards"),
    _rule("records_repeat", records.records_repeat, WASTES, "records"),
    _rule("few_questions", learning.few_questions, HARMS, "records"),
    _rule("malformed_actions", signal.malformed_actions, STOPS, "equal-rewards"),
    _rule("model_knows_nothing", signal.model_knows_nothing, STOPS, "equal-rewards"),
    _rule("rewards_add_up_to_nothing", rewards.rewards_add_up_to_nothing, STOPS, "rewards"),
    _rule("paid_though_wrong", answers.paid_though_wrong, NOTE, "rewards"),
    _rule("equal_rewards", signal.equal_rewards, STOPS, "equal-rewards"),
    _rule("one_answer", answers.one_answer, HARMS, "rewards"),
    # Steps are made, and teach nothing or too little.
    _rule("learning_rate_too_low", learning.learning_rate_too_low, HARMS, "steps"),
    _far("steps"),
    _rule("steps_change_nothing", learning.steps_change_nothing, HARMS, "steps"),
    _rule("overfits", learning.overfits, HARMS, "held-out-success"),
    _effect("held_out_falls", learning.held_out_falls, HARMS, "held-out-success"),
    _rule("buffer_too_small", learning.buffer_too_small, STOPS, "groups-that-wait"),
    _rule("stale", learning.stale, STOPS, "groups-that-wait"),
    _rule("all_set_aside", learning.all_set_aside, STOPS, "groups-that-wait"),
    _effect("tokens_left_out", learning.tokens_left_out, HARMS, "steps"),
    _effect("gets_worse", learning.gets_worse, HARMS, "steps"),
    # Other nodes: first what is wrong with this one, then what they do.
    _rule("clock_is_wrong", network.clock_is_wrong, HARMS, "the-coordinator"),
    _rule("coordinator_refuses", network.coordinator_refuses, HARMS, "the-coordinator"),
    _rule("differs_from_run", network.differs_from_run, HARMS, "the-coordinator"),
    _rule("equivocated", network.equivocated, STOPS, "weights-between-nodes"),
    _rule("not_published", network.not_published, HARMS, "weights-between-nodes"),
    _rule("versions_refused", network.versions_refused, STOPS, "weights-between-nodes"),
    _rule("no_trainer", network.no_trainer, STOPS, "weights-between-nodes"),
    _rule("directory_is_off", network.directory_is_off, WASTES, "connections"),
    _rule("no_credit", network.no_credit, STOPS, "weights-between-nodes"),
    _rule("settings_differ", network.settings_differ, HARMS, "refused-groups"),
    _rule("environments_differ", network.environments_differ, HARMS, "refused-groups"),
    _rule("tokens_differ", network.tokens_differ, HARMS, "refused-groups"),
    _rule("liar", network.liar, WASTES, "refused-groups"),
    _far("peers"),
    _far("exchange"),
    _rule("trainer_away", network.trainer_away, STOPS, "weights-between-nodes"),
    _rule("nobody_can_dial", network.nobody_can_dial, HARMS, "connections"),
    _rule("no_relay", network.no_relay, HARMS, "connections"),
    _rule("turns_others_away", network.turns_others_away, HARMS, "connections"),
    _rule("cannot_dial", network.cannot_dial, HARMS, "connections"),
    _rule("nobody_follows", network.nobody_follows, STOPS, "weights-between-nodes"),
    _rule("come_too_late", network.come_too_late, HARMS, "refused-groups"),
    _rule("others_refused", network.others_refused, HARMS, "refused-groups"),
    _effect("no_weights_yet", network.no_weights_yet, HARMS, "weights-between-nodes"),
    _rule("coordinator_away", network.coordinator_away, WASTES, "the-coordinator"),
    # Steps do not come.
    _rule("barrier_waits", learning.barrier_waits, WASTES, "groups-that-wait"),
    _rule("evaluations_take_time", learning.evaluations_take_time, WASTES, "held-out-success"),
    _rule("scoring_is_slow", rewards.scoring_is_slow, WASTES, "scoring"),
    _effect("alone", network.alone, HARMS, "connections"),
    _far("pace"),
    _effect("step_needs_many", learning.step_needs_many, HARMS, "groups-that-wait"),
    _effect("gave_up_learning", process.gave_up_learning, STOPS, "equal-rewards", while_paused=True),
    _rule("does_not_run", process.does_not_run, WASTES, "the-process", while_paused=True),
    _effect("halted", learning.halted, STOPS, "groups-that-wait"),
    _effect("no_steps", learning.no_steps, STOPS, "groups-that-wait"),
    _rule("environment_not_asked", signal.environment_not_asked, WASTES, "equal-rewards"),
    _rule("environment_in_vain", signal.environment_in_vain, WASTES, "equal-rewards"),
    # Nobody knows why, and it did not learn.
    _effect("did_not_learn", evidence.did_not_learn, HARMS, "did-it-learn", while_paused=True),
    # The node learns, and something is lost.
    _effect("no_external", network.no_external, HARMS, "refused-groups"),
    _rule("newcomers", network.newcomers, WASTES, "refused-groups"),
    _rule("slow_compute_dtype", learning.slow_compute_dtype, WASTES, "steps"),
    _rule("change_waits", process.change_waits, WASTES, "the-process", while_paused=True),
    _rule("coordinator_alarm", network.coordinator_alarm, WASTES, "the-coordinator"),
    _effect("loops_fail", process.loops_fail, HARMS, "errors", while_paused=True),
    _effect("logged_errors", process.logged_errors, WASTES, "errors", while_paused=True),
    # Nothing is wrong: good to know.
    _rule("starts", process.starts, NOTE, "the-process", while_paused=True),
    _rule("paused", process.paused, NOTE, "the-process", while_paused=True),
    _rule("only_relays", process.only_relays, NOTE, "the-process", while_paused=True),
    _rule("finished", process.finished, NOTE, "the-process", while_paused=True),
    _rule("far_from_usual", far_from_usual, NOTE, "settings"),
)
# What a status alone tells, for `swarm status`.
_OF_STATUS: Final = (
    *("does_not_run", "hangs", "no_steps", "no_trainer", "trainer_away", "versions_refused", "loops_fail", "disk_full"),
    *("coordinator_alarm", "differs_from_run"),
)
STATUS_RULES: Final[tuple[Rule, ...]] = (
    *(rule for name in _OF_STATUS for rule in RULES if rule.name == name),
    _rule("nobody_agrees", network.nobody_agrees, HARMS, "refused-groups"),
)


def is_healthy(findings: Iterable[Diagnosed]) -> bool:
    """True if all findings are notes."""
    return all(each.weight is NOTE for each in findings)


def health_words(evidence: LearningEvidence) -> str:
    """Verdict on a node that trains and has no fault that is known: health is claimed by evidence of learning alone."""
    if evidence.verdict is Learned.BY_REWARD and evidence.whole is not None:
        reward = "no fault is known; the reward rose, and "
        if evidence.whole.after:
            return f"{reward}no more answers are fully right than before"
        return f"{reward}no held-out answer is fully right: does it pay for what you want?"
    if not evidence.is_shown:
        return "no fault is known, nor is it shown that it learns"
    lacking = [each.env for each in evidence.changes if each.is_change and each.verdict is not Learned.YES]
    if lacking:
        return f"no fault is known; not shown to learn: {', '.join(lacking[:MOST_SHOWN])}"
    return "nothing is wrong"


def _applied(rules: Iterable[Rule], snapshot: Snapshot) -> Iterator[tuple[Rule, Diagnosed]]:
    """Yields rules with their findings, in order; for a paused node, only of the rules with `while_paused`."""
    is_paused = snapshot.runs and snapshot.paused_since_s is not None
    for rule in rules:
        if (rule.while_paused or not is_paused) and (found := rule(snapshot)) is not None:
            yield rule, found


def diagnose(snapshot: Snapshot) -> list[Diagnosed]:
    """Returns up to three findings in the order of the table, causes before effects; notes only if nothing is wrong."""
    found, notes = list[Diagnosed](), list[Diagnosed]()
    for rule, each in _applied(RULES, snapshot):
        if rule.is_effect and any(known.weight >= each.weight for known in found):
            continue
        (found if each.weight > NOTE else notes).append(each)
        if len(found) == MOST_SHOWN:
            break
    return (found or notes)[:MOST_SHOWN]


def status_findings(snapshot: Snapshot) -> list[Diagnosed]:
    """Returns the findings of `STATUS_RULES`, for which a status is enough, in the order of `swarm status`."""
    return [found for _, found in _applied(STATUS_RULES, snapshot)]
