"""Estimate of the time that a node's run will still take, from the durations of its own steps and evaluations.

Invariant: there is no estimate before a step or an evaluation was measured, and only the newest ones count, since the
load of a machine changes.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from swarm.config import NodeConfig
from swarm.events import Event, GroupPut, PolicyEvaluated, StepMade, VersionPublished
from swarm.types import SPLITS

RECENT: Final = 8  # steps whose pace counts: one alone varies by a factor of 2
LONG_S: Final = 600.0  # a longer run gets advice on making it shorter
PARTS_S: Final = 2.0  # within which the events of an evaluation come; one without a scored answer never comes
LEARNED_ROW: Final = 1.1  # time of a response in a step by that of one in an evaluation: 1.0 SmolLM2, 1.3 tiny (AVX2)


@dataclass(kw_only=True)
class TimeLeft:
    """Estimator of the time left, updated with the node's events in order.

    Example:
        left = TimeLeft(config=config)
        left.see(event)
        left.seconds(time.time())
    """

    config: NodeConfig
    step: int = 0
    _mark_s: float | None = None  # wall clock: end of the newest step or evaluation, or begin of the first
    _first_group_s: float = 0.0  # wall clock: until then others may still start, and first calls take longer
    _evaluated_step: int = -1  # newest
    _evaluation_s: float = 0.0  # of the newest evaluation
    _num_answers: int = 0  # in it
    _num_parts: int = 0  # of its events, one for each environment and split, that came
    _steps_s: deque[float] = field(default_factory=lambda: deque[float](maxlen=RECENT))

    def see(self, event: Event) -> None:
        """Updates the estimate with one event of the node."""
        match event:
            case VersionPublished() if self._mark_s is None:  # the learner begins here, or goes on
                self.step, self._mark_s = event.step, event.at_s
            case PolicyEvaluated() if self._mark_s is not None:
                if event.step != self._evaluated_step:
                    self._evaluated_step, self._num_answers, self._num_parts = event.step, 0, 0
                    self._evaluation_s = event.at_s - self._mark_s
                    if self._first_group_s and event.step == 0:
                        self._evaluation_s = max(self._evaluation_s / 2, event.at_s - self._first_group_s)
                    self._mark_s = event.at_s
                self._num_answers += event.num_problems * max(1, self.config.evaluation.num_tries)
                self._num_parts += 1
            case GroupPut() if self._mark_s is not None and not self._first_group_s:
                self._first_group_s = event.at_s
            case StepMade() if event.step > self.step and self._mark_s is not None:
                self._steps_s.append(event.at_s - self._mark_s)
                self.step, self._mark_s = event.step, event.at_s
            case _:
                pass

    @property
    def step_s(self) -> float | None:
        """Mean seconds of the newest steps without evaluations; before any, estimated from an evaluation; else None."""
        if self._steps_s:
            return fmean(self._steps_s)
        if not self._num_answers:
            return None
        num_groups = self.config.replay.local_groups + self.config.replay.external_groups
        num_responses = num_groups * self.config.generator.group_size
        return LEARNED_ROW * num_responses * self._evaluation_s / self._num_answers

    def seconds(self, now_s: float) -> float | None:
        """Seconds until the last evaluation ends; None if too little is measured yet, or the run has no end.

        Args:
            now_s: wall clock, seconds since 1970.
        """
        num_steps, step_s = self.config.learner.num_steps, self.step_s
        if not num_steps or step_s is None or self._mark_s is None:
            return None
        num_parts = len(self.config.evaluation.environments or self.config.environments) * len(SPLITS)
        if not self._steps_s and self._num_parts < num_parts and now_s - self._mark_s < PARTS_S:
            return None
        every = self.config.evaluation.every_steps or num_steps
        num_evaluations = -(-num_steps // every) - self.step // every if self.step < num_steps else 0
        is_evaluating = self._is_evaluated(self.step) and self._evaluated_step != self.step
        ahead_s = self._evaluation_s if is_evaluating else step_s if self.step < num_steps else 0.0
        spent_s = min(max(0.0, now_s - self._mark_s), ahead_s)
        return (num_steps - self.step) * step_s + (num_evaluations + is_evaluating) * self._evaluation_s - spent_s

    def _is_evaluated(self, step: int) -> bool:
        every = self.config.evaluation.every_steps
        return step in (0, self.config.learner.num_steps) or bool(every and step % every == 0)


def duration_words(seconds: float) -> str:
    """A rounded duration as text for people, such as `4 min` or `2 h 10 min`."""
    if seconds < 90:
        return f"{max(10, round(seconds / 10) * 10)} s"
    if seconds > 7 * 86_400:
        return "a week or more"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
