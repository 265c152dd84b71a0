"""Engine of a virtual node that plays episodes: scripted actions, real environments, virtual time.

Invariant: an episode follows from its task, the seed of its engine, its number and the versions that made its actions;
each episode waits for its own environment alone.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol, cast

import numpy as np

from swarm.episode import Actions, EpisodeOutcome
from swarm.errors import RolloutFailed, Unavailable
from swarm.generation.episode_player import EpisodePlayer
from swarm.interfaces import Environment, LocalExchange, Observe
from swarm.simulate.virtual.author import Author
from swarm.simulate.virtual.episode_plan import TOKEN_S, EpisodePlan
from swarm.types import (
    FinishReason,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Task,
    TokenTrace,
    VersionSpan,
)

LOGPROB: Final = -0.02  # of every action token; equal log-probs of two nodes are no sign of a copy here
MOST_RIGHT: Final = 0.6  # share of episodes without a mistake that a node reaches
MISTAKES: Final = ("", "#", "<tool_call>{", "nobody", "?zzz", "u", "l", "CALC(1 + 1)", "Answer: 0", "?" * 200)


class Demonstrated(Protocol):
    """An environment of several turns that can show a solution."""

    def demonstration(self, task_id: int) -> Actions:
        """Actions that earn every reward of a task. Raises LookupError for an unknown task."""
        ...


def demonstration(environment: Environment, task: Task) -> Actions:
    """Actions that solve a task: the reference answer, or the demonstration of a task of several turns."""
    if task.max_turns == 1:
        return (environment.reference(task.task_id),)
    return cast(Demonstrated, environment).demonstration(task.task_id)


@dataclass(kw_only=True)
class ScriptedActions:
    """The actions of one episode: a demonstration with random mistakes in between."""

    shown: Actions
    mistakes: float  # chance of one at each turn
    rng: random.Random
    _num_shown: int = 0

    def next(self) -> str:
        """The text of the next turn; after the demonstration its last action again."""
        if self.rng.random() < self.mistakes:
            return self.rng.choice(MISTAKES)
        self._num_shown += 1
        return self.shown[min(self._num_shown, len(self.shown)) - 1]


@dataclass(kw_only=True)
class _Row:
    """Actions and tokens of an episode in progress."""

    actions: list[str] = field(default_factory=list[str])
    ids: list[int] = field(default_factory=list[int])
    mask: list[bool] = field(default_factory=list[bool])
    turn_ids: list[int] = field(default_factory=list[int])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])

    def add(self, ids: Sequence[int], *, is_action: bool, turn: int) -> None:
        self.ids += ids
        self.mask += [is_action] * len(ids)
        self.turn_ids += [turn] * len(ids)

    def trace(self) -> TokenTrace:
        return TokenTrace(
            token_ids=np.array(self.ids, np.int32),
            action_mask=np.array(self.mask, np.bool_),
            logprobs=np.where(self.mask, np.float32(LOGPROB), np.float32(np.nan)),
            turn_ids=np.array(self.turn_ids, np.int16),
            spans=tuple(self.spans),
        )


@dataclass(kw_only=True)
class EpisodeEngine:
    """Plays the episodes of a batch concurrently; takes the place of `Worker.ask`.

    Args:
        version: returns the version of the weights; called before each action.
        tasks: returns tasks of the training sequence, by first number and count.
        seed: seed of all random numbers.
        pace: factor on every duration; 1 is middling.
    """

    exchange: LocalExchange
    author: Author
    plan: EpisodePlan
    tasks: Callable[[int, int], list[Task]]
    version: Callable[[], PolicyVersion]
    seed: str
    pace: float

    async def ask(self, first: int, count: int) -> list[RolloutGroup]:
        """One group of episodes for each of `count` tasks from number `first` on."""
        size = self.author.config.generator.group_size
        tasks = self.tasks(first, count)
        player = EpisodePlayer(
            self.author.tokenizer, self.author.config.generator.episode_limits, self._step, tasks, size
        )
        skill = min(MOST_RIGHT, 0.3 + 0.01 * self.version().step)
        rollouts: list[asyncio.Task[Rollout]] = []
        async with asyncio.TaskGroup() as playing:
            for place, task in enumerate(tasks):
                rng = random.Random(f"episodes {self.seed} {first + place}")
                num_right = int(size * skill + rng.random())  # stratified, so that most groups have signal
                for index in range(size):
                    actions = ScriptedActions(
                        shown=demonstration(self.author.environments[task.env], task),
                        mistakes=0.0 if index < num_right else rng.choice([0.3, 0.6, 1.0]),
                        rng=random.Random(rng.random()),
                    )
                    row = self._play(len(rollouts), actions, player.observe)
                    rollouts.append(playing.create_task(row))
        made = [task.result() for task in rollouts]
        return [self.author.group(task, made[place * size : (place + 1) * size]) for place, task in enumerate(tasks)]

    async def _play(self, number: int, actions: ScriptedActions, observe: Observe) -> Rollout:
        limits, row, has_end = self.author.config.generator.episode_limits, _Row(), False
        for turn in range(len(actions.shown) + 64):  # the environment ends it before
            ids = self.author.tokenizer.encode_response(actions.next())[: limits.max_new_tokens]
            version = self.version()
            if not row.spans or row.spans[-1].version != version:
                row.spans.append(VersionSpan(start=len(row.ids), version=version))
            await self._take(len(ids) * TOKEN_S)
            row.add(ids, is_action=True, turn=turn)
            row.actions.append(self.author.tokenizer.decode(ids))
            has_end = ids[-1] in self.author.tokenizer.eos_ids
            observed = observe(number, ids, has_end).result()
            await self._take(actions.rng.uniform(0.0, self.plan.step_s))
            if observed is None:
                break
            row.add(observed.token_ids, is_action=False, turn=turn)
        return Rollout(
            actions=tuple(row.actions),
            trace=row.trace(),
            sampling=self.author.sampling,
            finish=FinishReason.STOP if has_end else FinishReason.LENGTH,
            claimed_reward=float("nan"),
        )

    async def _take(self, seconds: float) -> None:
        if seconds:
            await asyncio.sleep(seconds * self.pace)

    def _step(self, env: str, task_id: int, actions: Actions) -> "Future[EpisodeOutcome]":
        """Takes one step through the agent's verifier, which must not suspend; an `episode_player.Step`."""
        answer: Future[EpisodeOutcome] = Future()
        stepping = self.exchange.step(env, task_id, actions)
        try:
            stepping.send(None)
        except StopIteration as done:
            answer.set_result(done.value)
        except (RolloutFailed, Unavailable, LookupError) as error:
            answer.set_exception(error)
        return answer
