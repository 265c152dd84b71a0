"""Progress of a training in lines for people, and the end of one that has nothing to learn from.

Invariant: a run that cannot learn anything is recognised by its first groups, or those since a step: rewards differ in
none of them. A run with few useful groups is rarely mistaken for one.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from swarm.config import NodeConfig
from swarm.events import (
    Event,
    GroupPut,
    GroupsDrawn,
    GroupUnscored,
    PolicyEvaluated,
    StepMade,
    VersionPublished,
    WarmedUp,
)
from swarm.printable import as_argument
from swarm.telemetry.time_left import LONG_S, TimeLeft, duration_words
from swarm.telemetry.warning_log import NOTHING_TO_LEARN
from swarm.trained.learning_evidence import EvidenceTally, warm_up_words
from swarm.types import WarmUpReport

MANY_GROUPS: Final = 256  # without any difference in reward: where one in 14 has one, 64 have none in one of 100 runs
SOME_GROUPS: Final = 64  # the same once so much time has passed, or where none could be scored
PATIENCE_S: Final = 60.0
SAID_GROUPS: Final = 16  # from here on it is said
SAY_EVERY_S: Final = 5.0
OLD_S: Final = 2.0  # activities advance every second or so


@dataclass
class TrainingWatch:
    """The state of a training, updated with its events."""

    config: NodeConfig
    say: Callable[[str], None]
    is_patient: bool
    quiet_s: float = 8.0  # after which a line says what is done; a look every second comes on top
    step: int = 0
    is_hopeless: bool = False
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    learning: EvidenceTally = field(default_factory=EvidenceTally)
    num_groups: int = 0  # since the newest step, or the start
    num_unscored: int = 0  # of them
    best_reward: float = 0.0  # highest mean of a group, since the start
    least_reward: float = 1.0  # lowest mean of a group, since the newest step
    error: str = ""
    num_with_signal: Callable[[], int] = lambda: 0  # groups since the newest step that the learner can learn from

    def __post_init__(self) -> None:
        self._warm_up: WarmedUp | None = None
        self._is_signal_said = False
        self._said_s = time.monotonic()
        self._line_s = time.monotonic()
        self._time_left = TimeLeft(config=self.config)
        self._is_foretold = False
        self._doing, self._doing_s = "", time.monotonic()
        self._first_group_s = 0.0
        self._has_stepped = self._has_evaluated = False
        self._num_drawn = self._num_equal = 0  # own groups, since the last line
        self._rewards: list[float] = []
        self._tokens = 0

    def remember(self, events: Iterable[Event]) -> None:
        """Reads step and first evaluations from the events before this start."""
        for event in events:
            if isinstance(event, PolicyEvaluated):
                self.learning.add(event)
            elif isinstance(event, StepMade):
                self.step = max(self.step, event.step)
            elif isinstance(event, WarmedUp):
                self._warm_up = event

    def see(self, event: Event) -> None:
        """Updates the state with an event of the node; an event without a time gets the present time."""
        event = event if event.at_s else replace(event, at_s=time.time())
        self._time_left.see(event)
        self._foretell()
        match event:
            case GroupPut():
                self.num_groups += 1
                self.best_reward = max(self.best_reward, event.reward_mean)
                self.least_reward = min(self.least_reward, event.reward_mean)
                self._rewards.append(event.reward_mean)
                self._tokens += event.num_tokens
                self._look()
            case GroupUnscored():
                self.num_groups += 1
                self.num_unscored += 1
                self.error = event.error
                self._look()
            case GroupsDrawn():
                self._num_drawn += sum(use.is_own_policy for use in event.groups)
                self._num_equal += event.num_zero_variance
                self._say_signal()
            case WarmedUp():
                self._warm_up = event
                for line in warm_up_lines(event.report):
                    self._say(line)
            case StepMade():
                self.step = event.step
                self.num_groups, self.num_unscored, self.least_reward = 0, 0, 1.0
                self._has_stepped = True
                self._say_step(event)
            case VersionPublished():
                self.step = event.step  # the first one tells where a training goes on
            case PolicyEvaluated():
                self.learning.add(event)
                if event.split == "held_out":
                    self._has_evaluated = True
                    changes = {each.env: each for each in self.learning.evidence.changes}
                    before = changes.get(event.env)
                    since = f" (step {before.first_step}: {before.before:.2f})" if before and before.is_change else ""
                    right = f"{event.accuracy:.2f} of {event.num_problems} held-out problems right"
                    self._say(f"step {event.step:<5} {event.env}: {right}{since}")
            case _:
                pass

    def tick(self, doing: str) -> None:
        """Writes a line on the present activity if none came for `quiet_s`; to be called every second or so.

        It says for how long the activity has not changed, the groups that the next step has, and the expected times.
        """
        now_s = time.monotonic()
        if doing != self._doing:
            self._doing, self._doing_s = doing, now_s
        if now_s - self._line_s >= self.quiet_s:
            still_s = now_s - self._doing_s
            still = f" ({still_s:.0f} s)" if still_s >= OLD_S else ""
            self._say(f"step {self.step}  {doing}{still}{self._groups()}{self._left()}")

    def _groups(self) -> str:
        """The groups that the next step has and needs, and what a step takes; empty before the first group."""
        needed = self.config.replay.local_groups
        if not self.num_groups or not needed:
            return ""
        step_s = self._time_left.step_s
        takes = f", about {duration_words(step_s)} a step" if step_s is not None and not self._has_stepped else ""
        return f"; {min(self.num_with_signal(), needed)} of {needed} groups for step {self.step + 1}{takes}"

    def summary(self, was_stopped: bool) -> list[str]:
        """Lines on the last step, held-out success before and after, and commands to go on with."""
        stopped = [f"stopped at step {self.step}; the same command goes on from there"] if was_stopped else []
        if was_stopped and not self.step:
            return stopped  # no checkpoint yet: nothing to chat with
        where, evidence = as_argument(self.config.dir), self.learning.evidence
        if not was_stopped and not self._has_stepped and not self._has_evaluated:
            return [
                evidence.words,
                f"nothing to do: all {self.config.learner.num_steps} steps were made; --steps N makes more",
            ]
        why = [] if evidence.is_shown else [f"what to try, the likeliest first: swarm why {where}"]
        if self.is_learned_out:
            stopped = [f"nothing is left to learn: all answers of the newest {self.num_groups} groups are right"]
        return [
            *stopped,
            *evidence.lines,
            *([words] if self._warm_up and (words := warm_up_words([self._warm_up])) else []),
            *why,
            f"next: swarm chat {where} | swarm samples {where} | swarm eval {where} | swarm export {where} OUT",
        ]

    @property
    def is_learned_out(self) -> bool:
        """True if it ended because every answer since the newest step has the highest reward."""
        return self.is_hopeless and self._has_stepped and self.least_reward >= 1 and not self.num_unscored

    def explain(self) -> str:
        """Reason why nothing could be learned, with an example (blocking)."""
        from swarm.trained.samples import SampleReader

        if self.num_unscored == self.num_groups:
            return f"none of {self.num_groups} groups could be scored: {self.error}"
        reason = (
            f"{self.num_groups} groups of {self.config.generator.group_size} answers"
            f"{f' since step {self.step}' if self._has_stepped else ''}, and in none did rewards differ: "
            f"{NOTHING_TO_LEARN} (highest mean reward {self.best_reward:g})."
        )
        if self.num_unscored:
            reason += f" {self.num_unscored} could not be scored: {self.error}"
        shown: list[str] = []
        for group in SampleReader(self.config.dir, is_trusted=True).newest(1, "own"):
            sample = group.samples[0]
            cut = ", cut off" if sample.finish == "length" else ""
            shown += [f"{each.role}: {one_line(each.content)}" for each in group.messages]
            shown.append(f"answer (reward {sample.reward:g}{cut}): {' | '.join(map(one_line, sample.actions))}")
            shown.append(f"reference: {one_line(group.reference)}")
        example = "\n  ".join(["", *shown])
        if self._has_stepped:
            why = f"swarm why {as_argument(self.config.dir)} tells what that may be"
            return f"{reason} An example:{example}\n{why}; --patient goes on all the same."
        offer = f"; or {offer}" if (offer := self._offer()) else ""
        return (
            f"{reason} An example:{example}\nMake the reward graded, the task easier, or answers longer "
            f"(--max-new-tokens, now {self.config.generator.max_new_tokens}){offer}; --patient goes on all the "
            "same."
        )

    def _offer(self) -> str:
        """The warm-up as the next thing to try, where no answer earned anything and there was none."""
        if self.config.warm_up.answers or self.best_reward > 0:
            return ""
        again = f"swarm train {as_argument(self.config.dir)} --warm-up references (or FILE.jsonl)"
        return f"show the model right answers first: {again}"

    def _say_signal(self) -> None:
        """Writes, once, in how many of the first groups rewards differ."""
        if self._is_signal_said or self.step or not self.num_groups:
            return
        self._is_signal_said = True
        count = self.num_with_signal()
        what = "; the others teach nothing" if count else f". You may {offer}" if (offer := self._offer()) else ""
        self._say(f"step 0     rewards differ in {count or 'none'} of the first {self.num_groups} groups{what}")

    def _look(self) -> None:
        now_s = time.monotonic()
        self._first_group_s = self._first_group_s or now_s
        has_waited = now_s - self._first_group_s > PATIENCE_S
        if self.num_groups == SAID_GROUPS:
            self._say_signal()
        if self.num_with_signal() or self.is_hopeless:
            return
        if self.num_groups >= SAID_GROUPS:
            self._say_waiting(now_s)
        if self.is_patient:
            return
        few_do = (has_waited or self.num_unscored == self.num_groups) and not self._has_stepped
        if self.num_groups >= (SOME_GROUPS if few_do else MANY_GROUPS):
            self.is_hopeless = True
            self.ends.set()

    def _say_waiting(self, now_s: float) -> None:
        """Writes a line once a minute while there is nothing to learn from."""
        if now_s - self._said_s >= PATIENCE_S:
            self._said_s = now_s
            self._rewards, self._tokens = [], 0
            self._say(
                f"step {self.step}  waits: {self.num_groups} groups since then, in none did rewards differ, highest "
                f"mean reward {self.best_reward:.3g}; swarm why {as_argument(self.config.dir)} says what that may be"
            )

    def _say_step(self, event: StepMade) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_EVERY_S and event.step != self.config.learner.num_steps:
            return
        rewards, tokens, seconds = self._rewards, self._tokens, now_s - self._said_s
        drawn, equal = self._num_drawn, self._num_equal
        self._rewards, self._tokens, self._said_s, self._num_drawn, self._num_equal = [], 0, now_s, 0, 0
        total = self.config.learner.num_steps
        of = f"/{total}" if total else ""
        mean = f"reward {sum(rewards) / len(rewards):.3g}" if rewards else "reward -"
        differ = f", rewards differ in {drawn} of {drawn + equal} drawn" if equal else ""
        speed = f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
        self._say(f"step {event.step}{of}  {mean} of {len(rewards)} groups{differ}  {speed}{self._left()}")

    def _left(self) -> str:
        left_s = self._time_left.seconds(time.time())
        return "" if left_s is None else f"  about {duration_words(left_s)} left"

    def _say(self, line: str) -> None:
        self._line_s = time.monotonic()
        self.say(line)

    def _foretell(self) -> None:
        """Writes the expected duration, once, as soon as something was measured."""
        left_s = self._time_left.seconds(time.time())
        if not self._is_foretold and left_s is not None:
            self._is_foretold = True
            shorter = " (--steps N makes fewer)" if left_s > LONG_S else ""
            self._say(f"about {duration_words(left_s)} from here, by the speed so far{shorter}; Ctrl-C saves and stops")


def warm_up_lines(report: WarmUpReport) -> list[str]:
    """Lines on a warm-up that is over: signal and held-out success before it, and what it did."""
    of = f"of {report.num_groups} tried groups"
    if not report.num_steps:
        return [f"warm-up    not needed: rewards differ in {report.signal_before} {of}"]
    before = ", ".join(f"{env} {accuracy:.2f}" for env, accuracy in report.accuracy.items())
    return [
        f"warm-up    {report.num_steps} updates on {report.num_answers} right answers, loss {report.first_loss:.2f} -> "
        f"{report.last_loss:.2f}; rewards differ in {report.signal_after} {of}, before it in {report.signal_before}",
        f"           held out before it: {before}; changes below count from step 0, after it",
    ]


def one_line(text: str) -> str:
    """A text on one line: at most 200 printable characters, with "..." if it was cut."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= 200 else f"{flat[:197]}..."
