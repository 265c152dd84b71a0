"""Replay of episodes: recorded actions through an environment's own state machine.

Where an environment's `score` is used (`exchange` is not "replayable"), only the last action is judged.

Invariant: a replay of the same actions of the same task gives the same outcome on every node; a producer plays its
episodes with the same class, `ReplayedEpisode`, one action at a time.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from swarm.environments.environment import ANSWER_CPU_S
from swarm.environments.tool_calls import parse_action
from swarm.episode import OUTCOME, Actions, EpisodeOutcome, Transition, TurnStatus
from swarm.flow import BoundedTable
from swarm.interfaces import Environment, Episode

MAX_OBSERVATION_CHARS = 8_192  # of one message; every node cuts a longer one there
MAX_EPISODES = 1024  # unfinished episodes that a process keeps
MAX_REWARD = 1e6  # of a turn, and of each named reward; squares of more leave float32
_MAX_NAME_CHARS = 256  # of a state, and of a role
_MAX_SHOWN_CHARS = 80  # of a value in a message
_OUTCOME_ALONE = {OUTCOME: 1.0}


Score = Callable[[int, str], Mapping[str, float]]
"""(task id, last action) -> named rewards of an episode that ends with that action; raises LookupError."""


class ConfiguredEnvironment:
    """An `interfaces.Environment` with the settings that apply to every kind: reward weights and scoring.

    Args:
        inner: the environment as its class built it.
        verifier: name that also covers these settings, so that nodes with different settings have different names.
        reward_weights: name of each reward that counts -> its weight; empty or None: the outcome alone counts.
        score: judges the last action alone, in place of a replay; None: episodes are replayed.
    """

    def __init__(
        self,
        inner: Environment,
        verifier: str,
        reward_weights: Mapping[str, float] | None = None,
        score: Score | None = None,
    ) -> None:
        self.inner = inner
        self.verifier = verifier
        self.reward_weights = reward_weights or _OUTCOME_ALONE
        self.score = score
        self.name, self.num_tasks, self.max_turns = inner.name, inner.num_tasks, inner.max_turns
        self.task, self.episode, self.reference = inner.task, inner.episode, inner.reference
        # optional attributes of an environment
        self.answer_cpu_s: float = getattr(inner, "answer_cpu_s", ANSWER_CPU_S)
        self.program_cpu_s: float = getattr(inner, "program_cpu_s", 0.0)
        self.signals: Iterable[str] = getattr(inner, "signals", ())
        self.demonstration: Callable[[int], Actions] | None = getattr(inner, "demonstration", None)


Play = Callable[[Environment, int, Actions], EpisodeOutcome]


class ReplayedEpisode:
    """An episode in progress, with the bounds that hold for every environment."""

    def __init__(self, environment: Environment, task_id: int) -> None:
        """Begins an episode of the task. Raises LookupError if there is no such task."""
        self._episode: Episode = environment.episode(task_id)
        self._max_turns = environment.max_turns
        self._num_conversations = 1
        self._is_scored = score_of(environment) is not None  # then no other node learns where a conversation begins
        self._weights = weights_of(environment)
        self.transitions: list[Transition] = []

    @property
    def is_ended(self) -> bool:
        """True if the episode takes no further action."""
        return bool(self.transitions) and self.transitions[-1].is_end

    def step(self, text: str) -> Transition:
        """Takes one more action and returns the environment's answer; ends the episode after `max_turns` actions.

        Raises:
            ValueError: the environment returned no Transition, an unknown status, a reward that is no finite number,
                a conversation that it did not open, or a new conversation without a message.
        """
        assert not self.is_ended, "an episode takes no action after its end"
        transition = _bounded(_checked(self._episode.step(parse_action(text))))
        if not 0 <= transition.conversation <= (0 if self._is_scored else self._num_conversations):
            raise ValueError(f"conversation {transition.conversation} of {self._num_conversations} that began")
        if transition.conversation == self._num_conversations and not transition.messages and not transition.is_end:
            raise ValueError(f"conversation {transition.conversation} begins without a message")
        self._num_conversations = max(self._num_conversations, transition.conversation + 1)
        if not transition.is_end and len(self.transitions) + 1 >= self._max_turns:
            transition = replace(transition, messages=(), is_end=True, status=TurnStatus.LIMIT)
        self.transitions.append(transition)
        return transition

    def play(self, actions: Iterable[str]) -> None:
        """Takes actions until the episode ends, and ignores the remaining ones. Raises as `step`."""
        for text in actions:
            if self.is_ended:
                break
            self.step(text)

    def outcome(self) -> EpisodeOutcome:
        """Outcome so far; its reward is the weighted sum of the newest transition's `rewards`, clipped to [0, 1]."""
        rewards = self.transitions[-1].rewards if self.transitions else {}
        return EpisodeOutcome(reward=_worth(rewards, self._weights), transitions=tuple(self.transitions))


class LiveEpisodes:
    """Unfinished episodes, found by their actions so far, so that a new action costs one step instead of a replay.

    An episode that is no longer kept is replayed, so that no result depends on `max_episodes`.
    """

    def __init__(self, max_episodes: int = MAX_EPISODES) -> None:
        self._waiting = BoundedTable[tuple[str, int, Actions], ReplayedEpisode](max_episodes)

    def step(self, environment: Environment, task_id: int, actions: Actions) -> EpisodeOutcome:
        """Outcome so far of an episode, given all its actions, at least one, the newest last. Raises as `replay`."""
        *before, newest = actions
        key = (environment.name, task_id, tuple(before))
        episode = self._waiting.pop(key, None)
        if episode is None:
            episode = ReplayedEpisode(environment, task_id)
            episode.play(before)
        episode.play((newest,))
        if not episode.is_ended:
            self._waiting[environment.name, task_id, actions] = episode
        return episode.outcome()


def weights_of(environment: Environment) -> Mapping[str, float]:
    """Name of each reward that counts -> its weight."""
    return environment.reward_weights if isinstance(environment, ConfiguredEnvironment) else _OUTCOME_ALONE


def score_of(environment: Environment) -> Score | None:
    """Function that judges the last action alone; None if episodes are replayed."""
    return environment.score if isinstance(environment, ConfiguredEnvironment) else None


def _worth(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    value = sum([weight * rewards.get(name, 0.0) for name, weight in weights.items()])
    return min(max(value, 0.0), 1.0)


def replay(environment: Environment, task_id: int, actions: Actions) -> EpisodeOutcome:
    """Outcome of an episode with these actions, which may be hostile text; actions after its end are ignored.

    Raises LookupError if there is no such task, and as `ReplayedEpisode.step`.
    """
    if (score := score_of(environment)) is not None:
        return _scored(score, weights_of(environment), task_id, actions[: environment.max_turns])
    episode = ReplayedEpisode(environment, task_id)
    episode.play(actions)
    return episode.outcome()


def _scored(score: Score, weights: Mapping[str, float], task_id: int, actions: Actions) -> EpisodeOutcome:
    """Outcome by `score` alone: empty transitions, then the last transition with the named rewards."""
    if not actions:
        return EpisodeOutcome(reward=0.0, transitions=())
    end = _bounded(Transition(is_end=True, rewards=score(task_id, actions[-1])))
    before = (Transition(),) * (len(actions) - 1)
    return EpisodeOutcome(reward=_worth(end.rewards, weights), transitions=(*before, end))


def answer_reward(environment: Environment, task_id: int, answer: str) -> float:
    """Reward in [0, 1] of an episode with this one action. Raises as `replay`."""
    return replay(environment, task_id, (answer,)).reward


def _checked(answer: object) -> Transition:
    """The transition that `step` returned, its status as a TurnStatus. Raises ValueError for anything else."""
    if not isinstance(answer, Transition):
        raise ValueError(f"step returned {_shown(answer)}, which is no swarm.episode.Transition")
    if answer.status.__class__ is not TurnStatus:
        if answer.status not in tuple(TurnStatus):
            raise ValueError(f"a transition has the status {_shown(answer.status)}; known: {', '.join(TurnStatus)}")
        return replace(answer, status=TurnStatus(answer.status))
    return answer


def _shown(value: object) -> str:
    return repr(value)[:_MAX_SHOWN_CHARS]


def _bounded(transition: Transition) -> Transition:
    """The transition with texts cut and rewards clipped to their bounds; usually the same object, with nothing to cut.

    Raises:
        ValueError: a reward is no finite number.
    """
    texts = [message.content for message in transition.messages]
    is_short = not texts or max(map(len, texts)) <= MAX_OBSERVATION_CHARS
    numbers = (transition.reward, *transition.rewards.values())
    is_named = max(len(transition.state_key), len(transition.role)) <= _MAX_NAME_CHARS
    if is_short and is_named and all(abs(number) <= MAX_REWARD for number in numbers):
        return transition
    return replace(
        transition,
        messages=tuple(
            message
            if len(message.content) <= MAX_OBSERVATION_CHARS
            else replace(message, content=message.content[:MAX_OBSERVATION_CHARS])
            for message in transition.messages
        ),
        reward=_in_range("the reward of a turn", transition.reward),
        rewards={name: _in_range(f"the reward {name!r}", value) for name, value in transition.rewards.items()},
        state_key=transition.state_key[:_MAX_NAME_CHARS],
        role=transition.role[:_MAX_NAME_CHARS],
    )


def _in_range(name: str, reward: float) -> float:
    """The reward, clipped to [-MAX_REWARD, MAX_REWARD]. Raises ValueError if it is not finite."""
    if not math.isfinite(reward):
        raise ValueError(f"{name} is {reward}, which is no finite number")
    return min(MAX_REWARD, max(-MAX_REWARD, reward))
