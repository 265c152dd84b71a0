"""Sampling: a response in progress, and its next token from logits (greedy, temperature, top-k, top-p).

Invariant: a row's choice depends on its own logits and its own random number, on nothing else in the batch.

Shape letters: R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from swarm.interfaces import Observation
from swarm.types import FinishReason, Sampling, VersionSpan


@dataclass(slots=True)
class Row:
    """One response in progress: actions of the model, and the observations between them."""

    prompt_ids: Sequence[int]  # not empty
    sampling: Sampling  # temperature 0: the likeliest token each time
    prompt: int = 0  # equal for rows of one prompt, which is then computed once
    index: int = 0  # unique among the rows that are decoded together
    seed: int = 0  # of its random numbers
    num_top: int = 0  # number of the likeliest tokens that are recorded at each place
    end_ids: frozenset[int] = frozenset()  # tokens that end an action, besides the model's end tokens
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])  # NaN for observations
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    turns: list[int] = field(default_factory=list[int])  # first token of each action
    action_ends: list[int] = field(default_factory=list[int])  # one past the last token of each finished action
    conversations: list[int] = field(default_factory=lambda: [0])  # of each action, the next one included
    finish: FinishReason = FinishReason.ABORTED  # of its newest action; ABORTED until that ended
    is_over: bool = False  # its episode has no further action
    top: list[list[tuple[int, float]]] = field(default_factory=list[list[tuple[int, float]]])  # with their log-probs
    random: np.random.Generator | None = None  # from its first token on

    @property
    def is_running(self) -> bool:
        """True until the newest action ends."""
        return self.finish is FinishReason.ABORTED

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """(First token, one past the last) of each action; an unfinished one reaches to the newest token."""
        return list(zip(self.turns, [*self.action_ends, len(self.tokens)], strict=False))

    def uniform(self) -> float:
        """Draws this row's next random number, in [0, 1), once per sampled token."""
        if self.random is None:
            self.random = np.random.default_rng(self.seed)
        return self.random.random()

    @property
    def conversation(self) -> int:
        """Conversation of the newest action or, after an observation, of the next action."""
        return self.conversations[-1]

    @property
    def context(self) -> list[int]:
        """All tokens so far of the row's current conversation, after the prompt if it is conversation 0."""
        if not any(self.conversations):
            return [*self.prompt_ids, *self.tokens]
        ids = [] if self.conversation else list(self.prompt_ids)
        starts = [*self.turns, len(self.tokens)]
        for turn, (start, end) in enumerate(self.bounds):
            if self.conversations[turn] == self.conversation:
                ids += self.tokens[start:end]
            if self.conversations[turn + 1 : turn + 2] == [self.conversation]:
                ids += self.tokens[end : starts[turn + 1]]
        return ids

    def take(self, observation: Observation) -> None:
        """Appends the tokens of an observation, with NaN as their log-probs."""
        self.tokens += observation.token_ids
        self.logprobs += [float("nan")] * len(observation.token_ids)
        self.conversations.append(observation.conversation)

    def give_back(self) -> None:
        """Removes the newest observation."""
        del self.tokens[self.action_ends[-1] :], self.logprobs[self.action_ends[-1] :], self.conversations[-1]

    def begin_action(self) -> None:
        """Makes the next token the first of an action."""
        self.turns.append(len(self.tokens))
        self.finish = FinishReason.ABORTED

    def end_action(self, finish: FinishReason) -> None:
        """Makes the newest token the last of its action."""
        self.finish = finish
        self.action_ends.append(len(self.tokens))


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the next token of each row by the row's sampling parameters.

    Samples by the inverse CDF, with one uniform number of the row for each token; at temperature 0 takes the likeliest.

    Args:
        logits: [R, V] as the model gave them.
        rows: [R]; a row with `num_top` also records that many of the likeliest tokens in `top`.

    Returns:
        Ids [R], and their log-probs [R] at the row's temperature before any truncation (at temperature 0: at 1).
    """
    kinds = list(dict.fromkeys(row.sampling for row in rows))
    if len(kinds) == 1:
        return _choose_alike(logits, rows, kinds[0])
    chosen = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(rows), device=logits.device)
    for kind in kinds:
        places = [place for place, row in enumerate(rows) if row.sampling == kind]
        index = torch.tensor(places, device=logits.device)
        chosen[index], logprobs[index] = _choose_alike(logits[index], [rows[place] for place in places], kind)
    return chosen, logprobs


def _choose_alike(logits: torch.Tensor, rows: Sequence[Row], sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    if any(row.num_top for row in rows):
        for row, own in zip(rows, logprobs, strict=True):
            values, ids = own.topk(min(row.num_top, own.numel()))
            row.top.append(list(zip(ids.tolist(), values.tolist(), strict=True)))
    if sampling.temperature == 0:
        chosen = logits.argmax(dim=-1)[:, None]
    else:
        cumulative = truncate(logprobs.exp(), sampling).double().cumsum(dim=-1)
        uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logits.device)
        # right=True: the first entry whose cumulative sum exceeds the wanted mass, never an entry of probability 0.
        wanted = uniforms[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, wanted, right=True).clamp(max=logits.shape[-1] - 1)
    return chosen[:, 0], logprobs.gather(-1, chosen)[:, 0]


def truncate(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[R, V] with the entries outside top-k and top-p set to 0 (not renormalised)."""
    if sampling.top_k > 0:
        least = probabilities.topk(min(sampling.top_k, probabilities.shape[-1]), dim=-1).values[:, -1:]
        probabilities = torch.where(probabilities >= least, probabilities, 0.0)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        total = ordered.sum(dim=-1, keepdim=True)
        is_outside = ordered.cumsum(dim=-1) - ordered >= sampling.top_p * total  # the most likely entry always stays
        is_outside[:, 0] = False
        probabilities = probabilities.masked_fill(torch.zeros_like(is_outside).scatter(-1, order, is_outside), 0.0)
    return probabilities
