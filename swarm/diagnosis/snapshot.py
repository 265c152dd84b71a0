"""A node's files as plain values, with the windows that rules look at, and the finding that a rule returns.

Invariant: every value comes from a file of the node; a missing file leaves its part empty, and no rule needs all parts.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Final, TypeVar, cast

from swarm.config import EnvironmentConfig, NodeConfig
from swarm.environments.record_facts import RecordFacts
from swarm.events import (
    ApplyFailed,
    Event,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupStored,
    GroupUnscored,
    LoopFailed,
    NodeStarted,
    PolicyEvaluated,
    StepMade,
    VersionUnpublished,
    events_of,
)
from swarm.printable import as_argument
from swarm.telemetry import LoggedWarning
from swarm.trained.learning_evidence import LearningEvidence, learning_evidence
from swarm.types import JsonDict, NodeId, RefusalReason, Role

MAX_TEXT: Final = 300  # characters of an error or name that is shown
RECENT_GROUPS: Final = 128  # own attempts that count as recent
RECENT_STEPS: Final = 20
FEW_STEPS: Final = 20  # fewer say nothing of a course
START_S: Final = 600.0  # a node comes up, or ends, within these
FEW_GROUPS: Final = 8  # fewer say nothing
COMPARED: Final = 16  # answers of each kind from which their rewards can be compared
VISIBLE: Final = 0.05  # of records, from which on a fault is more than a slip
MOST: Final = 0.9
EDGE: Final = 1e-6
Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=Event)


class Gravity(IntEnum):
    """Harm that a finding does to the node."""

    NOTE = 0  # none: good to know
    WASTES = 1  # the node learns, and something is lost
    HARMS = 2  # it learns badly, or less than it could
    STOPS = 3  # it learns nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """A finding: one thing that a rule saw in a snapshot, with the fix. The table of rules adds name, gravity and page.

    Example:
        Diagnosed(claim="the disk is full", fix="make room", evidence=("disk_full in events.jsonl",))
    """

    claim: str  # in plain words
    fix: str = ""
    evidence: tuple[str, ...] = ()  # figures, with their file in brackets
    key: str = ""  # of node.toml, where its value is the cause
    gravity: Gravity | None = None  # None: as the table says
    name: str = ""  # of the rule; "": as the table says
    docs: str = ""  # page and anchor

    @property
    def weight(self) -> Gravity:
        """Gravity of the finding; NOTE before the table of rules has set one."""
        return Gravity.NOTE if self.gravity is None else self.gravity


@dataclass(frozen=True, kw_only=True, slots=True)
class AnsweredGroup:
    """Answers to one question, from the group store."""

    env: str
    rewards: tuple[float, ...]
    is_cut: tuple[bool, ...]  # the answer ended at the longest length, not by itself
    num_tokens: tuple[int, ...]
    task_id: int = -1
    has_room: tuple[bool, ...] = ()  # another turn would have fitted; empty: single answers, or not known
    prompt: int = 0  # equal for equal prompts
    texts: tuple[int, ...] = ()  # equal for equal answers; empty: not known
    nats: float = math.nan  # mean of -log p over the tokens of its answers, as they were drawn
    # Compared with the right answers of a file; empty: not known.
    is_right: tuple[bool, ...] = ()  # equal up to white space
    is_nearly_right: tuple[bool, ...] = ()  # equal up to case and punctuation, or with words around it
    is_of_neighbour: tuple[bool, ...] = ()  # equal to the right answer of the record before or after
    is_end_of_right: tuple[bool, ...] = ()  # equal to the last word of a right answer of several words
    is_malformed: tuple[bool, ...] = ()  # by action of all episodes: the environment could not read it; empty: unknown


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A node at one moment.

    Example:
        snapshot = Snapshot(now_s=time.time(), status=read_status(directory))
        for finding in diagnose(snapshot): ...
    """

    now_s: float  # wall clock of whoever asks
    directory: Path = Path("swarm-node")
    status: JsonDict | None = None  # None: none is written
    events: tuple[Event, ...] = ()  # oldest first
    config: NodeConfig | None = None
    config_error: str = ""  # why there is no configuration
    runs: bool = True  # a process holds the directory
    max_idle_s: float = 300.0  # longest time without a step
    answers: tuple[AnsweredGroup, ...] = ()  # own groups, newest first
    changed_keys: tuple[str, ...] = ()  # of node.toml, since the start of the node that runs
    log: str = ""  # end of log.txt
    warnings: tuple[LoggedWarning, ...] = ()  # what the node logged, oldest first
    missing_files: tuple[str, ...] = ()  # of questions, that are not there any more
    records: Mapping[str, RecordFacts] = field(default_factory=dict[str, RecordFacts])  # by environment, of its file
    pid: int | None = None  # of the process that holds the directory; None: not proved to be that process
    stopped_pids: tuple[int, ...] = ()  # processes of the node that a signal holds

    # --- the moment -----------------------------------------------------------------------------------

    @cached_property
    def at_s(self) -> float:
        """Wall clock of the snapshot; for a node that does not run, of its last sign of life, if one is known."""
        newest = max((event.at_s for event in self.events[-64:]), default=0.0)
        known = max(self.value("at_s", 0.0), newest)
        return self.now_s if self.runs or not known else known

    @cached_property
    def started_at_s(self) -> float | None:
        """Wall clock at which the present or last process began to serve; None: unknown."""
        return next((event.at_s for event in reversed(self.events) if isinstance(event, NodeStarted)), None)

    @cached_property
    def up_s(self) -> float:
        """Seconds that the present or last process served; 0 if unknown."""
        return 0.0 if self.started_at_s is None else max(0.0, self.at_s - self.started_at_s)

    @property
    def is_finished(self) -> bool:
        """True if the node made all its steps."""
        return bool(self.value("is_finished", False))

    @property
    def paused_since_s(self) -> float | None:
        """Wall clock at which the owner paused the node; None if the node is not paused."""
        return self.value("paused_since_s", None)

    def value(self, key: str, default: Value) -> Value:
        """Returns a value of status.json; `default` if the value is missing or null."""
        found: Any = (self.status or {}).get(key)
        return default if found is None else found

    @property
    def is_trainer(self) -> bool:
        """True for a node that makes optimizer steps."""
        return self.following is None if self.config is None else Role.TRAINER in self.config.roles

    @property
    def guard(self) -> dict[str, float]:
        """Figures of the off-policy guard while the guard sets every source aside; else empty."""
        return self.value("guard", {})

    @property
    def following(self) -> JsonDict | None:
        """Status of a node that generates for a trainer, as status.json has it; None for others."""
        return self.value("following", None)

    @property
    def only_relays(self) -> bool:
        """True for a node that neither trains nor generates."""
        return self.config is not None and not {Role.TRAINER, Role.GENERATOR} & {*self.config.roles}

    @property
    def has_others(self) -> bool:
        """True for a node whose configuration lets it look for other nodes."""
        return self.config is not None and not self.config.is_alone

    @property
    def environments(self) -> tuple[EnvironmentConfig, ...]:
        """Environments of the configuration; empty without a configuration."""
        return () if self.config is None else self.config.environments

    # --- groups ---------------------------------------------------------------------------------------

    @cached_property
    def is_right(self) -> tuple[bool, ...]:
        """True for a right answer: one value for each answer to a question with a known right answer."""
        return tuple(flag for group in self.answers for flag in group.is_right)

    @property
    def num_right(self) -> int:
        """Number of answers that equal the right answer of the file."""
        return sum(self.is_right)

    @cached_property
    def attempts(self) -> tuple[GroupPut | GroupUnscored, ...]:
        """Newest own groups, scored or not, of the present process."""
        since = self.started_at_s or 0.0
        found = [event for event in self.events if isinstance(event, GroupPut | GroupUnscored) and event.at_s >= since]
        return tuple(found[-RECENT_GROUPS:])

    @cached_property
    def puts(self) -> tuple[GroupPut, ...]:
        """The scored groups among `attempts`."""
        return tuple(events_of(GroupPut, self.attempts))

    @cached_property
    def own(self) -> tuple[int, int, int, str]:
        """Own groups since the newest step: number put, number put with signal, number not scored, newest error."""
        own: JsonDict = self.value("own_since_step", {})
        counts = (own.get("num_put", 0), own.get("num_with_signal", 0), own.get("num_unscored", 0))
        return (*counts, str(own.get("error", "")))

    @cached_property
    def num_in_vain(self) -> int:
        """Number of own groups since the newest step, if none of them has a signal; else 0."""
        num_put, num_with_signal, num_unscored, _ = self.own
        return 0 if num_with_signal else num_put + num_unscored

    @cached_property
    def errors(self) -> tuple[str, ...]:
        """Errors of loops, scoring and weights since the present or last process began to serve, the newest last."""
        since = self.started_at_s or 0.0
        return tuple(
            event.error
            for event in self.events
            if isinstance(event, LoopFailed | GroupUnscored | ApplyFailed | VersionUnpublished) and event.at_s >= since
        )

    @cached_property
    def logged(self) -> tuple[LoggedWarning, ...]:
        """Warnings and errors that the current or latest process logged since its start; the newest of each message."""
        newest_at_s = self.warnings[-1].at_s if self.warnings else 0.0
        since = self.value("started_at_s", newest_at_s - START_S)  # of one that did not come up nothing else is known
        newest: dict[str, LoggedWarning] = {}
        for each in self.warnings:
            if each.at_s >= since:
                newest.pop(each.message, None)
                newest[each.message] = each
        return tuple(newest.values())

    # --- steps ----------------------------------------------------------------------------------------

    @cached_property
    def steps(self) -> tuple[StepMade, ...]:
        """The last step made from each draw, in order."""
        return tuple({step.draw_step: step for step in events_of(StepMade, self.events)}.values())

    @cached_property
    def made(self) -> tuple[StepMade, ...]:
        """Steps that made a version, that is, were not skipped."""
        return tuple(step for step in self.steps if not step.was_skipped)

    @cached_property
    def recent_span_s(self) -> float:
        """Seconds from the first to the last of the newest RECENT_STEPS steps; 0 for fewer than two."""
        recent = self.made[-RECENT_STEPS:]
        return recent[-1].at_s - recent[0].at_s if recent else 0.0

    @cached_property
    def idle_s(self) -> float:
        """Seconds since the newest step (for a generator, group) or since the start, whichever is later."""
        return self.at_s - max(self.value("last_step_at_s", 0.0), self.started_at_s or 0.0)

    @property
    def stepless_s(self) -> float:
        """Seconds since the newest step (for a generator, group) in status.json; 0 if there is none."""
        return self.at_s - self.value("last_step_at_s", self.at_s)

    def since_start(self, kind: type[Kind]) -> list[Kind]:
        """Returns the events of a kind since the present or last process began to serve."""
        return [event for event in events_of(kind, self.events) if event.at_s >= (self.started_at_s or 0.0)]

    @cached_property
    def draws(self) -> tuple[GroupsDrawn, ...]:
        """The last draw that was made under each number, in order."""
        return tuple({draw.draw_step: draw for draw in events_of(GroupsDrawn, self.events)}.values())

    @cached_property
    def oldest_step_of(self) -> dict[str, tuple[int, float]]:
        """Digest of a stored group -> (step of its oldest token, wall clock at which it was stored)."""
        return {
            event.digest: (event.oldest_step, event.at_s) for event in self.events if isinstance(event, GroupStored)
        }

    def course(self, name: str, steps: Sequence[StepMade] | None = None) -> list[float]:
        """Returns the finite values of a diagnostic over `steps`, in order; None: over all that made a version."""
        chosen = self.made if steps is None else steps
        found = [step.grad_norm if name == "grad_norm" else step.diagnostics.get(name, math.nan) for step in chosen]
        return [value for value in found if math.isfinite(value)]

    @cached_property
    def evaluations(self) -> dict[tuple[str, str], tuple[PolicyEvaluated, ...]]:
        """(environment, split) -> evaluations by step, oldest first; of each step the newest evaluation."""
        found: dict[tuple[str, str], dict[int, PolicyEvaluated]] = {}
        for event in events_of(PolicyEvaluated, self.events):
            found.setdefault((event.env, event.split), {})[event.step] = event
        return {key: tuple(of[step] for step in sorted(of)) for key, of in found.items()}

    @cached_property
    def learning(self) -> LearningEvidence:
        """Evidence of learning from all held-out evaluations."""
        return learning_evidence(events_of(PolicyEvaluated, self.events))

    # --- others ---------------------------------------------------------------------------------------

    @cached_property
    def refused(self) -> Counter[str]:
        """Refused groups of other nodes by reason: by status.json; without that file, by all events."""
        counted: dict[str, int] = self.value("refusals", {})
        if self.status is not None:
            return Counter(counted)
        counts: Counter[str] = Counter()
        for event in events_of(GroupRefused, self.events):
            counts[event.reason] += event.count
        return counts

    @cached_property
    def refused_by(self) -> dict[str, Counter[NodeId]]:
        """Reason -> number of refused groups by producer, since the start; events without a producer are left out."""
        found: dict[str, Counter[NodeId]] = {}
        for event in self.since_start(GroupRefused):
            if event.producer:
                found.setdefault(event.reason, Counter())[event.producer] += event.count
        return found

    @property
    def num_admitted(self) -> int:
        """Number of groups of other nodes that the present process admitted."""
        return self.value("num_admitted", 0)

    def refused_of(self, *reasons: RefusalReason) -> int:
        """Returns the number of groups refused for one of these reasons."""
        return sum(self.refused[str(reason)] for reason in reasons)

    # --- words ----------------------------------------------------------------------------------------

    @property
    def toml(self) -> Path:
        """Path of the node's own configuration."""
        return self.directory / "node.toml"

    @property
    def check(self) -> str:
        """Command that checks the configuration."""
        return f"swarm check {as_argument(self.directory)}"

    @property
    def look(self) -> str:
        """Command that shows answers."""
        return f"swarm samples {as_argument(self.directory)}"

    @property
    def warm_up(self) -> str:
        """Instruction to show the model right answers first; "" if that was done, or cannot be done here."""
        config = self.config
        if config is None or not self.is_trainer or config.warm_up.answers or config.learner.num_processes > 1:
            return ""
        if all(each.may_have_turns for each in self.environments):
            return ""
        options = "--warm-up references (or a FILE.jsonl of them)"
        if self.made:
            return f"right answers shown first: the same `swarm train` with another directory and {options}"
        if self.start.startswith("swarm train"):
            return f"right answers shown first: swarm train {self.directory} {options}"
        return f"right answers shown first: {self.set_key('warm_up.answers', 'references')}"

    def set_key(self, key: str, value: object, why: str = "") -> str:
        """Returns an instruction to change one key of the configuration: file, section, value and command."""
        section, _, name = key.rpartition(".")
        where = f"under [{section}] " if section else ""
        return f"in {self.toml} {where}set {name} = {as_toml(value)}{why}; then {self.start}"

    @property
    def start(self) -> str:
        """Command that starts this node."""
        if self.config is not None:
            is_training = self.config.run_id == "train" and self.config.directory.kind == "none"
        else:
            is_training = self.value("run_id", "") == "train" and not self.value("dht", [])
        if is_training:
            more = f" --steps {2 * self.value('step', 0)}" if self.is_finished else ""  # else nothing is to be done
            return f"swarm train {as_argument(self.directory)}{more}"
        return f"swarm-node start {as_argument(self.directory)}"


Find = Callable[[Snapshot], Diagnosed | None]


def as_toml(value: object) -> str:
    """Formats a plain value as in node.toml."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_toml, cast('tuple[object, ...]', value)))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def shortened(text: str) -> str:
    """Returns the text on one line, cut to MAX_TEXT characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else f"{line[: MAX_TEXT - 3]}..."


def middle(values: Sequence[float]) -> float:
    """Median of the values; 0 if there are none."""
    return median(values) if values else 0.0


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of the values; 0 if there are none."""
    return math.fsum(values) / len(values) if values else 0.0
