"""The table of rules, ordered by hand: a cause stands before its effects, and the first match is the diagnosis.

Invariant: at most MOST_SHOWN findings are shown; notes only where nothing is wrong. Every row names a section of
docs/why.md.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from pydantic import BaseModel

from swarm.config import NodeConfig
from swarm.config.section import Usual
from swarm.diagnosis import learning_rules as learning
from swarm.diagnosis import network_rules as network
from swarm.diagnosis import process_rules as process
from swarm.diagnosis import reward_rules as reward
from swarm.diagnosis.snapshot import Diagnosed, Gravity, Snapshot, as_toml, shortened

MOST_SHOWN: Final = 3
MOST_KEYS: Final = 3  # far from usual that are listed
FAR_NUMBER: Final = 0.5  # factors of ten: the least where a healthy node may look the same
DOCS: Final = "docs/why.md"
NOTE, WASTES, HARMS, STOPS = Gravity
Find = Callable[[Snapshot], Diagnosed | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A row of the table: what it looks for, and what that does to the node."""

    name: str
    find: Find
    gravity: Gravity  # where the finding itself has none
    docs: str  # heading of docs/why.md
    is_effect: bool = False  # mostly follows from a cause above: not said where one of its weight was found

    def __call__(self, snapshot: Snapshot) -> Diagnosed | None:
        """The finding with name, gravity and page; None where there is none."""
        found = self.find(snapshot)
        if found is None:
            return None
        gravity = self.gravity if found.gravity is None else found.gravity
        return replace(found, name=found.name or self.name, gravity=gravity, docs=f"{DOCS}#{self.docs}")


# --- settings far from usual ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class FarValue:
    """A value of node.toml outside of its usual span."""

    key: str
    value: object
    default: object
    usual: Usual
    distance: float  # factors of ten

    @property
    def words(self) -> str:
        """Example: `generator.temperature = 5 (usual 0.5..1.4)`."""
        return f"{self.key} = {shortened(as_toml(self.value))[:60]} (usual {self.usual.span})"


def far_values(config: NodeConfig) -> list[FarValue]:
    """Values outside of the span that stands at their field, the farthest first; the default is always usual."""
    found = list(_far_values(config, ""))
    return sorted(found, key=lambda each: -each.distance)


def _far_values(section: BaseModel, prefix: str) -> Iterable[FarValue]:
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _far_values(value, f"{prefix}{name}.")
        default: Any = field.get_default(call_default_factory=True)
        for usual in (each for each in field.metadata if isinstance(each, Usual) and value != default):
            if distance := usual.distance(value):
                yield FarValue(key=prefix + name, value=value, default=default, usual=usual, distance=distance)


def _shortfall(snapshot: Snapshot, kind: str) -> tuple[str, bool]:
    """The failure that values bearing on `kind` may explain, in words, and whether a healthy node may look the same."""
    certain, unsure = SHORTFALLS[kind]
    for find in certain:
        if (found := find(snapshot)) is not None:
            return found.claim, False
    return next(((words, True) for words, is_seen in unsure if is_seen(snapshot)), ("", True))


def far_from_usual(snapshot: Snapshot, kind: str = "") -> Diagnosed | None:
    """Up to three values farthest from usual: a finding where the node fails at `kind`, a note without one."""
    config = snapshot.config
    far = [] if config is None else far_values(config)
    if kind and far:
        seen, is_unsure = _shortfall(snapshot, kind)
        least = FAR_NUMBER if is_unsure else 0.0
        far = [each for each in far if seen and kind in each.usual.bears_on.split() and each.distance > least]
        evidence = (f"seen of it: {seen}", *(each.words for each in far[:MOST_KEYS]))
    else:
        evidence = tuple(each.words for each in far[:MOST_KEYS])
    if not far:
        return None
    shown = "; ".join(each.words for each in far[:MOST_KEYS])
    first = far[0]
    return Diagnosed(
        claim=f"settings are far from usual: {shown}",
        fix=snapshot.set_key(first.key, first.default, why=f" (the default; {first.usual.span} is usual)"),
        evidence=(*evidence, "node.toml"),
        key=first.key,
        gravity=HARMS if kind else NOTE,
    )


# Words of `Usual.bears_on` -> rules that are certain, and signs that healthy nodes show, too.
SHORTFALLS: Final[dict[str, tuple[tuple[Find, ...], tuple[tuple[str, Callable[[Snapshot], bool]], ...]]]] = {
    "machine": ((process.out_of_memory, process.worker_dies), ()),
    "signal": ((reward.equal_rewards, reward.cut_off), (("answers are nearly random", reward.draws_noise),)),
    "steps": (
        (
            *(learning.steps_change_nothing, learning.gets_worse, learning.learns_nothing, learning.tokens_left_out),
            *(learning.overfits, learning.held_out_falls),
        ),
        (
            ("answers are nearly random", reward.draws_noise),
            ("steps are small, and the reward does not rise", learning.has_small_steps),
            ("the reward does not rise beyond chance", reward.has_flat_reward),
        ),
    ),
    "pace": (
        (*(learning.no_steps, learning.step_needs_many, learning.halted),),
        (
            ("steps wait for groups most of the time", learning.waits_for_groups),
            ("neither a step nor a group came since the start", learning.has_no_product_yet),
        ),
    ),
    "peers": (
        (network.cannot_dial, network.nobody_follows, network.trainer_away, network.alone),
        (("no other node is connected", network.is_lonely),),
    ),
    "exchange": ((network.come_too_late, network.no_external, network.others_refused, network.no_weights_yet), ()),
}


def _far(kind: str) -> Rule:
    return _effect("far_from_usual", partial(far_from_usual, kind=kind), HARMS, "settings")


def _rule(name: str, find: Find, gravity: Gravity, docs: str) -> Rule:
    return Rule(name=name, find=find, gravity=gravity, docs=docs)


def _effect(name: str, find: Find, gravity: Gravity, docs: str) -> Rule:
    return Rule(name=name, find=find, gravity=gravity, docs=docs, is_effect=True)


RULES: Final[tuple[Rule, ...]] = (
    # The process cannot work.
    _rule("broken_configuration", process.broken_configuration, STOPS, "the-process"),
    _rule("file_missing", process.file_missing, STOPS, "records"),
    _rule("process_stopped", process.process_stopped, STOPS, "the-process"),
    _rule("disk_full", process.disk_full, STOPS, "the-disk"),
    _rule("hangs", process.hangs, STOPS, "the-process"),
    _far("machine"),
    _rule("out_of_memory", process.out_of_memory, STOPS, "the-process"),
    _rule("known_error", process.known_error, STOPS, "errors"),
    _rule("ended_with_error", process.ended_with_error, STOPS, "the-process"),
    _effect("never_ran", process.never_ran, STOPS, "the-process"),
    _rule("status_unwritten", process.status_unwritten, HARMS, "the-process"),
    _rule("worker_dies", process.worker_dies, STOPS, "the-process"),
    _effect("restarts_often", process.restarts_often, STOPS, "the-process"),
    # Nothing can be learned from records, answers or rewards.
    _rule("cannot_be_scored", reward.cannot_be_scored, STOPS, "scoring"),
    _rule("reward_is_upside_down", reward.reward_is_upside_down, HARMS, "rewards"),
    _rule("records_contradict", reward.records_contradict, HARMS, "records"),
    _rule("records_broken", reward.records_broken, HARMS, "records"),
    _rule("answers_no_text", reward.answers_no_text, HARMS, "records"),
    _rule("answers_are_shifted", reward.answers_are_shifted, HARMS, "records"),
    _rule("reward_is_random", reward.reward_is_random, HARMS, "rewards"),
    _rule("reward_is_of_length", reward.reward_is_of_length, HARMS, "rewards"),
    _rule("learning_rate_too_high", learning.learning_rate_too_high, HARMS, "steps"),
    _rule("weights_decay", learning.weights_decay, HARMS, "steps"),
    _rule("not_a_number", learning.not_a_number, STOPS, "steps"),
    _rule("right_but_for_the_form", reward.right_but_for_the_form, HARMS, "rewards"),
    _far("signal"),
    _rule("cut_off", reward.cut_off, STOPS, "equal-rewards"),
    _rule("episodes_cut_off", reward.episodes_cut_off, STOPS, "equal-rewards"),
    _rule("reference_worth_nothing", reward.reference_worth_nothing, HARMS, "rewards"),
    _rule("right_answers_hold_more", reward.right_answers_hold_more, HARMS, "records"),
    _rule("rewards_hardly_differ", reward.rewards_hardly_differ, HARMS, "rewards"),
    _rule("right_answers_unpaid", reward.right_answers_unpaid, HARMS, "rewards"),
    _rule("one_question", reward.one_question, HARMS, "records"),
    _rule("one_right_answer", reward.one_right_answer, WASTES, "records"),
    _rule("reward_ignores_question", reward.reward_ignores_question, HARMS, "rewards"),
    _rule("records_repeat", reward.records_repeat, WASTES, "records"),
    _rule("few_questions", learning.few_questions, HARMS, "records"),
    _rule("model_knows_nothing", reward.model_knows_nothing, STOPS, "equal-rewards"),
    _rule("rewards_add_up_to_nothing", reward.rewards_add_up_to_nothing, STOPS, "rewards"),
    _rule("paid_though_wrong", reward.paid_though_wrong, NOTE, "rewards"),
    _rule("equal_rewards", reward.equal_rewards, STOPS, "equal-rewards"),
    _rule("one_answer", reward.one_answer, HARMS, "rewards"),
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
    _rule("scoring_is_slow", reward.scoring_is_slow, WASTES, "scoring"),
    _effect("alone", network.alone, HARMS, "connections"),
    _far("pace"),
    _effect("step_needs_many", learning.step_needs_many, HARMS, "groups-that-wait"),
    _effect("gave_up_learning", process.gave_up_learning, STOPS, "equal-rewards"),
    _rule("does_not_run", process.does_not_run, WASTES, "the-process"),
    _effect("halted", learning.halted, STOPS, "groups-that-wait"),
    _effect("no_steps", learning.no_steps, STOPS, "groups-that-wait"),
    # The node learns, and something is lost.
    _effect("no_external", network.no_external, HARMS, "refused-groups"),
    _rule("newcomers", network.newcomers, WASTES, "refused-groups"),
    _rule("environment_not_asked", reward.environment_not_asked, WASTES, "equal-rewards"),
    _rule("environment_in_vain", reward.environment_in_vain, WASTES, "equal-rewards"),
    _rule("slow_compute_dtype", learning.slow_compute_dtype, WASTES, "steps"),
    _rule("change_waits", process.change_waits, WASTES, "the-process"),
    _rule("coordinator_alarm", network.coordinator_alarm, WASTES, "the-coordinator"),
    _effect("loops_fail", process.loops_fail, HARMS, "errors"),
    _effect("logged_errors", process.logged_errors, WASTES, "errors"),
    # Nothing is wrong: good to know.
    _rule("starts", process.starts, NOTE, "the-process"),
    _rule("paused", process.paused, NOTE, "the-process"),
    _rule("only_relays", process.only_relays, NOTE, "the-process"),
    _rule("finished", process.finished, NOTE, "the-process"),
    _rule("learns_nothing", learning.learns_nothing, NOTE, "steps"),
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
    """True where notes are all that was found."""
    return all(each.gravity is NOTE for each in findings)


def _weighs(found: Diagnosed) -> Gravity:
    return NOTE if found.gravity is None else found.gravity


def diagnose(snapshot: Snapshot) -> list[Diagnosed]:
    """Up to three findings in the order of the table, the likeliest cause first; notes where nothing is wrong."""
    found, notes = list[Diagnosed](), list[Diagnosed]()
    for rule in RULES:
        each = rule(snapshot) if _applies(rule, snapshot) else None
        if each is None or (rule.is_effect and any(_weighs(known) >= _weighs(each) for known in found)):
            continue
        (notes if each.gravity is NOTE else found).append(each)
        if len(found) == MOST_SHOWN:
            break
    return (found or notes)[:MOST_SHOWN]


def status_findings(snapshot: Snapshot) -> list[Diagnosed]:
    """Findings that need a status alone, in the order of `swarm status`."""
    applied = (rule(snapshot) for rule in STATUS_RULES if _applies(rule, snapshot))
    return [each for each in applied if each is not None]


def _applies(rule: Rule, snapshot: Snapshot) -> bool:
    """False for most rules of a paused node, which makes no steps and has no peers: process and disk are left."""
    is_paused = snapshot.runs and snapshot.paused_since_s is not None
    return not is_paused or getattr(rule.find, "__module__", "") == process.__name__
