"""A row of a batch: one response in the making."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swarm.interfaces import Observation
from swarm.types import FinishReason, Sampling, VersionSpan


@dataclass(slots=True)
class Row:
    """One response in the making: actions of the model, and between them observations that it was given."""

    prompt_ids: Sequence[int]  # not empty
    sampling: Sampling  # temperature 0: the likeliest token each time
    prompt: int = 0  # equal for rows of one prompt, which is then computed once
    index: int = 0  # its own among the rows that are decoded together
    seed: int = 0  # of its random numbers
    num_top: int = 0  # how many of the likeliest tokens are kept, at each place
    end_ids: frozenset[int] = frozenset()  # tokens that end an action beside the model's own
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])  # NaN of observations
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    turns: list[int] = field(default_factory=list[int])  # first token of each action
    action_ends: list[int] = field(default_factory=list[int])  # one behind the last token of each finished action
    conversations: list[int] = field(default_factory=lambda: [0])  # of each action, the next one included
    finish: FinishReason = FinishReason.ABORTED  # of its newest action; ABORTED until that ended
    is_over: bool = False  # its episode takes no other action
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])  # with their log-probs
    random: np.random.Generator | None = None  # from its first token on

    @property
    def is_running(self) -> bool:
        """False once its newest action ended."""
        return self.finish is FinishReason.ABORTED

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First token of each action and the one behind its last."""
        return list(zip(self.turns, [*self.action_ends, len(self.tokens)], strict=False))

    def uniform(self) -> float:
        """The next of its random numbers in [0, 1): one for each token that it chooses."""
        if self.random is None:
            self.random = np.random.default_rng(self.seed)
        return self.random.random()

    @property
    def conversation(self) -> int:
        """That its newest action is in, or the next one where it waits for that."""
        return self.conversations[-1]

    @property
    def context(self) -> list[int]:
        """Every token of its conversation so far."""
        if not any(self.conversations):
            return [*self.prompt_ids, *self.tokens]
        ids = [] if self.conversation else list(self.prompt_ids)
        starts = [*self.turns, len(self.tokens)]
        for turn, (start, end) in enumerate(zip(self.turns, self.action_ends, strict=True)):
            if self.conversations[turn] == self.conversation:
                ids += self.tokens[start:end]
            if self.conversations[turn + 1] == self.conversation:
                ids += self.tokens[end : starts[turn + 1]]
        return ids

    def take(self, observation: Observation) -> None:
        """What the environment answered."""
        self.tokens += observation.token_ids
        self.logprobs += [float("nan")] * len(observation.token_ids)
        self.conversations.append(observation.conversation)

    def begin_action(self) -> None:
        """The next token is the first of an action."""
        self.turns.append(len(self.tokens))
        self.finish = FinishReason.ABORTED

    def end_action(self, finish: FinishReason) -> None:
        """The newest token was the last of an action."""
        self.finish = finish
        self.action_ends.append(len(self.tokens))
