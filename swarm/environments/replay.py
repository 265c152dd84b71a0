"""Replay of episodes: recorded actions through an environment's own state machine.

Where observations are believed (`exchange = "scored"`), only the last action is judged, and nothing is replayed.

Invariant: whoever replays the same actions of the same task gets the same outcome; a producer plays an episode with the
same function, one action at a time.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from swarm.environments.environment import ANSWER_CPU_S
from swarm.environments.tool_calls import parse_action
from swarm.episode import OUTCOME, Actions, EpisodeOutcome, Transition, TurnStatus
from swarm.flow import BoundedTable
from swarm.interfaces import Environment, Episode

MAX_OBSERVATION_CHARS = 8_192  # of one message; an environment that says more is cut there, on every node alike
MAX_EPISODES = 1024  # that a process keeps between two of their actions
MAX_REWARD = 1e6  # of a turn, and of each named reward; squares of more leave float32
_MAX_NAME_CHARS = 256  # of a state, and of a role
_MAX_SHOWN_CHARS = 80  # of a value in a message
_OUTCOME_ALONE = {OUTCOME: 1.0}


Score = Callable[[int, str], Mapping[str, float]]
"""(task id, last action) -> named rewards of an episode that ends with it; raises LookupError."""


class ConfiguredEnvironment:
    """An `interfaces.Environment` with what the configuration says of it beside its parameters.

    Args:
        inner: as its class built it.
        verifier: of inner, with what else makes two nodes' episodes differ.
        reward_weights: name of each reward that counts -> its weight; none: the outcome alone.
        score: judges the last action alone, where observations are believed or nobody repeats them.
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
        # what an environment need not have
        self.answer_cpu_s: float = getattr(inner, "answer_cpu_s", ANSWER_CPU_S)
        self.signals: Iterable[str] = getattr(inner, "signals", ())
        self.demonstration: Callable[[int], Actions] | None = getattr(inner, "demonstration", None)


Play = Callable[[Environment, int, Actions], EpisodeOutcome]


class ReplayedEpisode:
    """One episode in the making, with the bounds that hold for every environment."""

    def __init__(self, environment: Environment, task_id: int) -> None:
        """Raises LookupError: no such task."""
        self._episode: Episode = environment.episode(task_id)
        self._max_turns = environment.max_turns
        self._num_conversations = 1
        self._is_scored = score_of(environment) is not None  # nobody else would know where a conversation begins
        self._weights = weights_of(environment)
        self.transitions: list[Transition] = []

    @property
    def is_ended(self) -> bool:
        """True if it takes no other action."""
        return bool(self.transitions) and self.transitions[-1].is_end

    def step(self, text: str) -> Transition:
        """The environment's answer to one more action; it ends at the latest with action number `max_turns`.

        Raises:
            ValueError: the environment answers in a conversation that it did not open, with a status that does not
                exist, or with a reward that is no finite number.
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
        """Takes actions up to its end; those after it are left out."""
        for text in actions:
            if self.is_ended:
                break
            self.step(text)

    def outcome(self) -> EpisodeOutcome:
        """Outcome so far; the reward of an episode that did not end is 0."""
        rewards = self.transitions[-1].rewards if self.transitions else {}
        return EpisodeOutcome(reward=_worth(rewards, self._weights), transitions=tuple(self.transitions))


class LiveEpisodes:
    """Episodes that wait for their next action, found by the actions so far: a step costs one step, not a replay.

    Nothing depends on what is kept: an episode that was dropped is replayed.
    """

    def __init__(self, max_episodes: int = MAX_EPISODES) -> None:
        self._waiting = BoundedTable[tuple[str, int, Actions], ReplayedEpisode](max_episodes)

    def step(self, environment: Environment, task_id: int, actions: Actions) -> EpisodeOutcome:
        """The outcome of an episode after its newest action. Raises LookupError: no such task."""
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
    """Function that judges the last action alone; None where episodes are replayed."""
    return environment.score if isinstance(environment, ConfiguredEnvironment) else None


def _worth(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    value = sum([weight * rewards.get(name, 0.0) for name, weight in weights.items()])
    return min(max(value, 0.0), 1.0)


def replay(environment: Environment, task_id: int, actions: Actions) -> EpisodeOutcome:
    """The episode that these actions make; those after its end are left out. May run hostile text.

    Raises:
        LookupError: no such task.
    """
    if (score := score_of(environment)) is not None:
        return _scored(score, weights_of(environment), task_id, actions[: environment.max_turns])
    episode = ReplayedEpisode(environment, task_id)
    episode.play(actions)
    return episode.outcome()


def _scored(score: Score, weights: Mapping[str, float], task_id: int, actions: Actions) -> EpisodeOutcome:
    """An episode whose observations nobody here can rebuild: no turn has a reward, the last action has all of them."""
    if not actions:
        return EpisodeOutcome(reward=0.0, transitions=())
    end = _bounded(Transition(is_end=True, rewards=score(task_id, actions[-1])))
    before = (Transition(),) * (len(actions) - 1)
    return EpisodeOutcome(reward=_worth(end.rewards, weights), transitions=(*before, end))


def answer_reward(environment: Environment, task_id: int, answer: str) -> float:
    """Reward in [0, 1] of an episode with this one action. Raises LookupError."""
    return replay(environment, task_id, (answer,)).reward


def _checked(answer: object) -> Transition:
    """The transition that `step` returned. Raises ValueError, with the fix, for anything else."""
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
    """The transition with bounded texts and rewards; the same object where they are, as nearly always.

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
    """A number that float32 statistics of a group can hold. Raises ValueError for what is no number."""
    if not math.isfinite(reward):
        raise ValueError(f"{name} is {reward}, which is no finite number")
    return min(MAX_REWARD, max(-MAX_REWARD, reward))
