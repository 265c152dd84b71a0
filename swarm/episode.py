"""Values of an episode: the actions of a model, the transitions of its environment, and the outcome.

An answer to one question is an episode that ends after one action. Invariant: an episode is a pure function of
(configuration of its environment, task id, actions), so any node that has these three can rebuild the rest.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, cast

MAX_TURNS: Final = 64  # of an episode, whatever its environment
OUTCOME: Final = "outcome"  # the only named reward that counts unless a configuration weights others
TOOL_SYNTAX: Final = 2  # version of what `swarm.environments.tool_calls` reads; it enters the digest of a tokenizer
Actions = tuple[str, ...]  # text of each turn of an episode, without end tokens, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """A message of a chat. If the last message has the role `assistant`, generation continues that message."""

    role: str  # system, user, assistant or tool
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A tool call in an action, as parsed from the model's text."""

    name: str
    arguments: Mapping[str, Any]  # JSON values


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One turn of the model: its text, and the tool calls parsed from it (`swarm.environments.tool_calls`)."""

    text: str  # all of it, calls included
    calls: tuple[ToolCall, ...] = ()
    is_malformed: bool = False  # the text begins a call that cannot be parsed


class TurnStatus(StrEnum):
    """The environment's reaction to an action."""

    OK = "ok"
    TOOL_ERROR = "tool_error"  # a well-formed call that the tool refused
    MALFORMED = "malformed"  # a call that cannot be parsed, or no action although one is needed
    LIMIT = "limit"  # the last turn, and the environment had not ended


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """An environment's response to an action."""

    messages: tuple[Message, ...] = ()  # the observation; none at the end
    is_end: bool = False
    reward: float = 0.0  # of this turn
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])  # of the episode by name; at its end
    status: TurnStatus = TurnStatus.OK
    state_key: str = ""  # of the state afterwards; equal for equal states, empty if the environment names none
    conversation: int = 0  # of the messages and the next action; the next unused number opens a new conversation
    role: str = ""  # of the actor, if an episode has roles: the name of its reward
    num_calls: int = 0  # of tools, made in the environment's own syntax and not as tool calls


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeOutcome:
    """Outcome of an episode as replayed on this node.

    If there are fewer transitions than actions, the environment ended before the remaining actions.
    """

    reward: float  # of the episode, in [0, 1]
    transitions: tuple[Transition, ...]  # one for each action that was played

    @property
    def is_ended(self) -> bool:
        """True if the environment ended the episode; otherwise it waits for another action."""
        return bool(self.transitions) and self.transitions[-1].is_end

    @property
    def conversations(self) -> tuple[int, ...]:
        """Conversation of each action, and of the next action if the environment waits for one."""
        return 0, *(each.conversation for each in self.transitions if not each.is_end)

    @property
    def is_success(self) -> bool:
        """True if the named reward `outcome` (without it, the reward) is at least 1, whatever the reward weights."""
        return self.rewards.get(OUTCOME, self.reward) >= 1.0

    @property
    def rewards(self) -> Mapping[str, float]:
        """Named rewards of the episode, from its last transition; empty if there is none."""
        return self.transitions[-1].rewards if self.transitions else {}


def outcome_to_json(outcome: EpisodeOutcome) -> list[Any]:
    """Converts an outcome to nested lists of JSON values."""
    return [
        outcome.reward,
        [
            [
                [[message.role, message.content] for message in each.messages],
                each.is_end,
                each.reward,
                dict(each.rewards),
                each.status,
                each.state_key,
                each.conversation,
                each.role,
                each.num_calls,
            ]
            for each in outcome.transitions
        ],
    ]


def outcome_from_json(data: Any) -> EpisodeOutcome:
    """Inverse of `outcome_to_json`; `data` may be hostile. Raises ValueError if `data` is not an outcome."""
    try:
        reward, transitions = data
        return EpisodeOutcome(
            reward=_number(reward, 0.0, 1.0), transitions=tuple(_transition(each) for each in transitions)
        )
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no outcome of an episode: {type(error).__name__}") from None


def outcomes_to_json(outcomes: Sequence[EpisodeOutcome]) -> bytes:
    """Serialises the outcomes of a group as a JSON list."""
    return json.dumps([outcome_to_json(outcome) for outcome in outcomes], separators=(",", ":")).encode()


def outcomes_from_json(data: bytes) -> tuple[EpisodeOutcome, ...]:
    """Inverse of `outcomes_to_json`. Raises ValueError if `data` is no list of outcomes."""
    try:
        return tuple(outcome_from_json(each) for each in json.loads(data))
    except TypeError as error:
        raise ValueError(f"no list of outcomes: {error}") from None


def _transition(data: Any) -> Transition:
    """Reads a transition of any release: drops fields of newer ones, fills in fields that older ones lack."""
    messages, is_end, reward, rewards, status, state_key, *later = data
    conversation, role, num_calls = (*later[:3], *_LATER[len(later) :])
    named = cast("dict[Any, Any]", rewards).items()
    return Transition(
        messages=tuple(Message(role=str(role), content=str(content)) for role, content in messages),
        is_end=is_end is True,
        reward=_number(reward),
        rewards={str(name): _number(value) for name, value in named},
        status=TurnStatus(status),
        state_key=str(state_key),
        conversation=int(_number(conversation, 0, MAX_TURNS)),
        role=str(role),
        num_calls=int(_number(num_calls, 0, MAX_TURNS)),
    )


_LATER: Final = (0, "", 0)  # conversation, role and calls of a turn that does not have them


def _number(value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    if not isinstance(value, (int, float)) or not least <= value <= most or not abs(value) < math.inf:
        raise ValueError(f"no finite number in [{least}, {most}]")
    return float(value)


# An environment reads only these parts of a turn that has any.
_READ_PARTS: Final = (("<tool_call>", "</tool_call>"), ("```", "```"))


def free_text_share(actions: Actions, transitions: Sequence[Transition] = ()) -> float:
    """Share of an episode's characters that its environment does not read; takes time linear in the texts.

    The environment reads only the tool calls, or else fenced code, of a turn with any; of a malformed turn nothing; and
    of any other turn the whole text.

    Args:
        actions: texts of the turns.
        transitions: transitions of the first turns; a turn without one counts as well-formed.
    """
    statuses = [each.status for each in transitions] + [TurnStatus.OK] * len(actions)
    read = (
        0 if status is TurnStatus.MALFORMED else _num_read(text)
        for text, status in zip(actions, statuses, strict=False)
    )
    total = sum(map(len, actions))
    return 1 - sum(read) / total if total else 0.0


def _num_read(text: str) -> int:
    for opening, closing in _READ_PARTS:
        if opening in text:
            count = at = 0
            while (begin := text.find(opening, at)) >= 0 and (end := text.find(closing, begin + len(opening))) >= 0:
                at = end + len(closing)
                count += at - begin
            return count
    return len(text)
