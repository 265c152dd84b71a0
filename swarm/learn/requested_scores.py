"""Scores that recipes request before a step: under other policies, of right answers, and without observations.

Invariant: each score is computed only if a recipe needs it, without gradient, with the weights before the step.
A right answer comes from this node's own environment, never from the maker of the episode.
Shape letters: N rollouts, K most turns, L longest response in tokens.
"""

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, cast

import torch
from torch import Tensor, nn

from swarm.clock import Clock
from swarm.interfaces import AnswerOf, Tokenizer
from swarm.learn.gradient import Measured, score_batch
from swarm.learn.packing import PackedRows
from swarm.learn.ranks import Ranks
from swarm.learn.step_plan import updates_by_turn
from swarm.model.lora import LoraLinear, is_adapter_name
from swarm.model.published_dtype import published_dtype
from swarm.model.tokenizer import text_ids
from swarm.model.version_digest import weights_digest
from swarm.objectives.batch import Batch
from swarm.objectives.fallbacks import RecipeSet
from swarm.objectives.part import Requirement, Scope

NOTHING: Final = "No information found."
"""The text in place of an observation. Source: kfq20/InfoPO `intrinsic_reward.py`."""


class ReferencePolicy:
    """Reference policy: the frozen initial weights, for KL terms and reference ratios.

    A network with low-rank adapters is its own reference with the adapters off. Any other network is copied, which
    takes as much memory as the network itself.
    """

    def __init__(self, network: nn.Module, ranks: Ranks) -> None:
        """`network` has the initial weights; `Ranks.prepare` has not been called on it."""
        self._ranks = ranks
        self._digest = _digest(network)
        if any(isinstance(module, LoraLinear) for module in network.modules()):
            self._network = network
        else:
            self._network = copy.deepcopy(network).requires_grad_(False).eval()
            self._ranks.prepare(self._network)

    def logprobs(self, batch: Batch, plan: Sequence[PackedRows]) -> Tensor:
        """Log-probs [N, L] of every trained token, 0 off the mask, without gradient."""
        with _adapters_off(self._network):
            return score_batch(self._network, batch, plan, ranks=self._ranks).logprobs

    def digest(self) -> str:
        """SHA-256 (hex) of the initial weights without adapters."""
        return self._digest


def _digest(network: nn.Module) -> str:
    state = cast("dict[str, Tensor]", network.state_dict())
    base = {name: tensor for name, tensor in state.items() if not is_adapter_name(name)}
    return weights_digest(
        {name: tensor.to(published_dtype(network, name, tensor)) for name, tensor in base.items()}
    ).hex()


@contextmanager
def _adapters_off(network: nn.Module) -> Generator[None]:
    adapters = [module.lora_b for module in network.modules() if isinstance(module, LoraLinear)]
    learned = [factor.detach().clone() for factor in adapters]
    try:
        with torch.no_grad():
            for factor in adapters:
                factor.zero_()  # as in a fresh adapter: the layer equals the base layer
        yield
    finally:
        with torch.no_grad():
            for factor, values in zip(adapters, learned, strict=True):
                factor.copy_(values)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedScores:
    """Adds to a step's batch the scores that its recipes need in addition to the generator's log-probs.

    Example:
        batch = scores.add(recipes, batch, measured)
    """

    network: nn.Module  # the policy
    tokenizer: Tokenizer
    reference: ReferencePolicy | None  # where a recipe needs it
    answer_of: AnswerOf | None  # the right answer to a task
    pack: Callable[[Batch, Scope], list[PackedRows]]
    ranks: Ranks
    clock: Clock
    updates_per_step: int

    def add(self, recipes: RecipeSet, batch: Batch, measured: Measured) -> Batch:
        """The batch with the scores that the recipes need; adds the seconds of scoring to `measured`."""
        if Requirement.ANSWER_PROBS in recipes.needs:
            with self._timing("answers", measured):
                probs = answer_probs(batch, self.tokenizer, self._answers(batch), self._score)
                batch = replace(batch, answer_probs=probs)
        if Requirement.FEEDBACK_SHIFTS in recipes.needs:
            with self._timing("feedback", measured):
                batch = replace(batch, feedback_shifts=feedback_shifts(batch, self.tokenizer, self._score))
        needs_proximal = self._needs_proximal(recipes)
        if not (needs_proximal or self.reference):
            return batch
        plan = self.pack(batch, recipes.main.scope)
        if needs_proximal:
            with self._timing("proximal", measured):
                logprobs = score_batch(self.network, batch, plan, ranks=self.ranks).logprobs
                batch = replace(batch, proximal_logprobs=logprobs)
        if self.reference:
            with self._timing("reference", measured):
                batch = replace(batch, reference_logprobs=self.reference.logprobs(batch, plan))
        return batch

    def _score(self, batch: Batch) -> Tensor:
        return score_batch(self.network, batch, self.pack(batch, Scope.TOKEN), ranks=self.ranks).logprobs

    def _answers(self, batch: Batch) -> list[str]:
        """The right answer of each group."""
        assert self.answer_of is not None, "the learner has no source of right answers"
        names = [key.rpartition("/") for key in batch.task_keys]
        return [self.answer_of(env, int(number)) for env, _, number in names]

    def _needs_proximal(self, recipes: RecipeSet) -> bool:
        """True if proximal log-probs need a pass before the updates; a single update scores them anyway."""
        has_several_updates = self.updates_per_step > 1 or updates_by_turn(recipes)
        return any(
            Requirement.PROXIMAL_LOGPROBS in recipe.needs and (has_several_updates or recipe.needs_proximal_first)
            for recipe in recipes.used.values()
        )

    @contextmanager
    def _timing(self, phase: str, measured: Measured) -> Generator[None]:
        start = self.clock.monotonic_s()
        yield
        measured.add_seconds(phase, self.clock.monotonic_s() - start)


# --- right answers before each turn -----------------------------------------------------------


def answer_probs(
    batch: Batch, tokenizer: Tokenizer, answers: Sequence[str], score: Callable[[Batch], Tensor]
) -> Tensor:
    """exp of the mean log-prob of the right answer at the start of each turn: float32 [N, K], 0 after the last turn.

    Args:
        batch: the whole step.
        tokenizer: the policy's; an answer is encoded without the end token.
        answers: right answer of each group, written as an action.
        score: the policy's log-probs [rows, L] of the trained tokens of a batch.
    """
    num_turns = [1] * batch.num_rollouts if batch.num_turns is None else batch.num_turns.clamp(min=1).tolist()
    begins = [_begins(batch.turn_ids[row].tolist(), count) for row, count in enumerate(num_turns)]
    places = list(dict.fromkeys((row, start) for row, starts in enumerate(begins) for start in starts))
    asked = asked_batch(batch, places, [text_ids(tokenizer, answer) for answer in answers])
    means = score(asked).sum(dim=1) / asked.mask.sum(dim=1)
    probs = dict(zip(places, means.exp().tolist(), strict=True))
    found = torch.zeros((batch.num_rollouts, max(num_turns)), dtype=torch.float32, device=batch.mask.device)
    for row, starts in enumerate(begins):
        found[row, : len(starts)] = torch.tensor([probs[row, start] for start in starts], device=found.device)
    return found


def _begins(turn_ids: Sequence[int], num_turns: int) -> list[int]:
    """[K] index of the first token of each turn.

    A turn without tokens begins where the next turn with tokens does; if there is none, where the turn before it does.
    So no turn is credited with an answer that came after the turn.

    Args:
        turn_ids: [L] of a row, in order; 0 after the end of the row.
        num_turns: K, turns of the episode.
    """
    starts = [0]
    for turn in range(1, num_turns):
        starts.append(next((at for at, each in enumerate(turn_ids) if each >= turn), starts[-1]))
    return starts


def asked_batch(batch: Batch, places: Sequence[tuple[int, int]], answers: Sequence[Sequence[int]]) -> Batch:
    """A row for each (rollout, token): the tokens before that token, then the group's answer, which alone is scored."""
    device, groups = batch.mask.device, batch.group_index.tolist()
    shape = (len(places), max(start + len(answers[groups[row]]) for row, start in places))
    token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
    conversations = torch.zeros(shape, dtype=torch.int64, device=device)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    for place, (row, start) in enumerate(places):
        answer = torch.tensor(list(answers[groups[row]]), dtype=torch.int64, device=device)
        token_ids[place, :start] = batch.token_ids[row, :start]
        token_ids[place, start : start + len(answer)] = answer
        mask[place, start : start + len(answer)] = True
        if batch.conversation_ids is not None:
            conversations[place, :start] = batch.conversation_ids[row, :start]
            conversations[place, start:] = batch.conversation_ids[row, start]
    rollouts = [row for row, _ in places]
    return batch.with_tokens(rollouts, token_ids, mask, None if batch.conversation_ids is None else conversations)


# --- turns without the observation before them ------------------------------------------------


def feedback_shifts(batch: Batch, tokenizer: Tokenizer, score: Callable[[Batch], Tensor]) -> Tensor:
    """Mean log-prob of the next turn's tokens minus their mean without this turn's observation: float32 [N, K].

    "Without" means that `NOTHING` replaces the observation's tokens. The shift is 0 for a turn without an observation,
    and for one without a next turn that has trained tokens. Arguments as in `answer_probs`.
    """
    most = 1 if batch.turn_rewards is None else batch.turn_rewards.shape[1]
    found = torch.zeros((batch.num_rollouts, most), dtype=torch.float32, device=batch.mask.device)
    places = _answered(batch)
    if not places:
        return found

    def mean(nothing: Sequence[int] | None) -> Tensor:
        asked = masked_batch(batch, places, nothing)
        return score(asked).sum(dim=1) / asked.mask.sum(dim=1)

    shifts = mean(None) - mean(text_ids(tokenizer, NOTHING))
    rows, turns = torch.tensor(places, device=found.device).unbind(dim=1)
    found[rows, turns] = shifts.to(torch.float32)
    return found


def _observed(batch: Batch, row: int, turn: int) -> Tensor:
    """bool [L]: tokens of a turn after its last trained one."""
    own = batch.turn_ids[row] == turn
    trained = torch.nonzero(own & batch.mask[row])
    last = int(trained[-1]) if len(trained) else -1
    return own & (torch.arange(len(own), device=own.device) > last)


def _answered(batch: Batch) -> list[tuple[int, int]]:
    """(rollout, turn) pairs that have an observation and a next turn with trained tokens."""
    if batch.num_turns is None:
        return []
    return [
        (row, turn)
        for row, count in enumerate(batch.num_turns.tolist())
        for turn in range(count - 1)
        if bool(_observed(batch, row, turn).any()) and bool((batch.mask[row] & (batch.turn_ids[row] == turn + 1)).any())
    ]


def masked_batch(batch: Batch, places: Sequence[tuple[int, int]], nothing: Sequence[int] | None) -> Batch:
    """A row for each (rollout, turn) that scores only the next turn; `nothing`, if given, replaces the observation.

    `nothing` is cut off, or its last token repeated, to the observation's length, so that all else keeps its place.
    """
    rollouts = [row for row, _ in places]
    token_ids = batch.token_ids[rollouts]
    mask = torch.zeros_like(token_ids, dtype=torch.bool)
    for place, (row, turn) in enumerate(places):
        mask[place] = batch.mask[row] & (batch.turn_ids[row] == turn + 1)
        if nothing is not None:
            observed = _observed(batch, row, turn)
            ids = [nothing[min(index, len(nothing) - 1)] for index in range(int(observed.sum()))]
            token_ids[place, observed] = torch.tensor(ids, dtype=token_ids.dtype, device=token_ids.device)
    conversations = None if batch.conversation_ids is None else batch.conversation_ids[rollouts]
    return batch.with_tokens(rollouts, token_ids, mask, conversations)
