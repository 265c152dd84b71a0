"""A random optimizer step as plain Python, for formulas that are typed with loops; the same step as a Batch.

Notation: pi the policy being optimised, pi_old the one at the start of the update,
mu the generator, pi_ref the reference; R reward, A advantage, |o_i| trained tokens of response i.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from swarm.episode import TurnStatus
from swarm.objectives.batch import Batch
from swarm.testing.batches import toy_batch

KINDS = ("on_policy", "tight", "near", "broad", "far", "extreme", "binary", "signed", "one_update", "equal", "graded")
"""How far pi is from mu, what the rewards are, and whether pi_old is given or pi itself (one_update)."""
_SPREAD = {"on_policy": 0.0, "tight": 0.004, "broad": 0.7, "far": 2.0, "extreme": 15.0}
SIZES = (4, 3, 5, 1, 4)
LENGTH = 6
HIDDEN_SIZE, NUM_WORDS = 3, 5


@dataclass(slots=True)
class Token:
    """One trained token."""

    logp: Tensor  # log pi, a scalar that gradients are taken of
    entropy: Tensor  # of pi there, a scalar that gradients are taken of
    mu: float  # log-probs
    old: float
    ref: float
    turn: int
    hidden: list[float]  # last hidden state
    logits: list[float]  # over a vocabulary of NUM_WORDS; not those that logp came from
    target: int  # the token, a place in `logits`
    segment: int  # of text that two tokenizers cut out; -1: of none
    sent: float  # the generator's log-prob of the segment, at its first token; else 0
    id: int


@dataclass(slots=True)
class Response:
    """One member of a group; `tokens` holds the trained ones only, in order."""

    tokens: list[Token]
    reward: float
    reference_reward: float
    limit: int  # most new tokens
    truncated: bool
    age: int
    external: bool
    text: str
    parts: dict[str, float]  # named rewards
    budget: int  # tokens it was asked to keep to
    replayed: bool  # of the previous draw
    turn_rewards: list[float]  # one for each turn, as the next ones
    calls: list[int]
    states: list[str]  # after the turn
    statuses: list[str]
    actions: list[str]
    shifts: list[float]  # of the next turn by what the environment answered
    answers: list[float]  # probability of the right answer before each turn

    @property
    def num_turns(self) -> int:
        return len(self.turn_rewards)


@dataclass(slots=True)
class Group:
    """Responses to one prompt."""

    key: str
    baseline: float  # reward of a greedy response
    members: list[Response]

    @property
    def rewards(self) -> list[float]:
        return [member.reward for member in self.members]


@dataclass(slots=True)
class Case:
    """One optimizer step."""

    groups: list[Group]
    memory: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 0.0  # learning rate of the update

    def __iter__(self) -> Iterator[tuple[Group, int, Response]]:
        """(group, place in the group, response) of every response."""
        for group in self.groups:
            for place, member in enumerate(group.members):
                yield group, place, member

    @property
    def num_responses(self) -> int:
        return sum(len(group.members) for group in self.groups)

    @property
    def num_tokens(self) -> int:
        return sum(len(member.tokens) for _, _, member in self)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """Unbiased; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def centred(group: Group, place: int) -> float:
    """R - mean; 0 where all rewards are equal, which a rounded mean would miss."""
    is_flat = max(group.rewards) == min(group.rewards)
    return 0.0 if is_flat else group.rewards[place] - mean(group.rewards)


def z_score(group: Group, place: int, floor: float) -> float:
    """(R - mean) / (std + floor); 0 where all rewards are equal."""
    if max(group.rewards) == min(group.rewards):
        return 0.0
    return (group.rewards[place] - mean(group.rewards)) / (std(group.rewards) + floor)


def log_ratio(token: Token, denominator: float) -> Tensor:
    """log pi - denominator, held at +-20 (without gradient there)."""
    return clip(token.logp - denominator, -20.0, 20.0)


def clip(value: Tensor, low: float, high: float) -> Tensor:
    """The bound itself, without gradient, where `value` is outside."""
    return value if low <= value.item() <= high else zero() + min(max(value.item(), low), high)


def ppo_min(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """min(r A, clip(r, low, high) A)."""
    plain, clipped = ratio * advantage, clip(ratio, low, high) * advantage
    return plain if plain.item() <= clipped.item() else clipped


def zero() -> Tensor:
    """Start of a sum."""
    return torch.zeros((), dtype=torch.float64)


def random_batch(kind: str, seed: int, memory: Mapping[str, Any] | None = None) -> tuple[Batch, Tensor, Tensor]:
    """(batch, log pi [N, L], entropy [N, L]) in float64: ragged masks with holes, a group of one."""
    generator = torch.Generator().manual_seed(1000 * seed + KINDS.index(kind))

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    group_index = torch.repeat_interleave(torch.arange(len(SIZES)), torch.tensor(SIZES))
    count = len(group_index)
    mask = torch.arange(LENGTH)[None] < torch.randint(1, LENGTH + 1, (count, 1), generator=generator)
    mask &= uniform(count, LENGTH) > 0.15
    mask[:, 0] = True
    rewards = torch.randint(0, 4, (count,), generator=generator).double() / 3
    if kind == "binary":
        rewards = (uniform(count) > 0.5).double()
        rewards[group_index == 2] = 0.0
        rewards[group_index == 4] = 1.0
    elif kind == "signed":
        rewards = 2 * rewards - 1
    elif kind == "graded":
        rewards = uniform(count)
    rewards[group_index == 1] = 0.1
    if kind == "equal":
        rewards[:] = 0.4
    spread = _SPREAD.get(kind, 0.3)
    behavior = torch.where(mask, -3 * uniform(count, LENGTH) - 0.01, 0.0)
    logprobs = behavior + spread * normal(count, LENGTH)
    proximal = torch.where(mask, behavior + 0.5 * spread * normal(count, LENGTH), 0.0)
    length = mask.sum(dim=1)
    batch = toy_batch(
        rewards,
        mask,
        groups=group_index,
        behavior_logprobs=behavior,
        turn_ids=torch.arange(LENGTH).div(2, rounding_mode="floor").expand(count, LENGTH).contiguous(),
        age_steps=torch.tensor([0, 1, 64, 4])[torch.randint(0, 4, (count,), generator=generator)],
        is_external=group_index == 2,
        max_new_tokens=torch.full((count,), LENGTH),
        is_truncated=length >= LENGTH - 1,
        texts=tuple(f"answer {int(number)}" for number in torch.randint(0, 3, (count,), generator=generator)),
        prompts=(torch.ones(2, dtype=torch.int64),) * len(SIZES),
        sources=tuple("aabca"),
        task_keys=("sums/1", "sums/2", "sums/3", "products/1", "sums/1"),
        proximal_logprobs=None if kind == "one_update" else proximal,
        reference_logprobs=torch.where(mask, behavior + 0.4 * normal(count, LENGTH), 0.0),
        baseline_rewards=uniform(len(SIZES)),
        reference_rewards=uniform(count),
        budgets=torch.tensor([2, 4, 6])[torch.arange(count) % 3],
        replayed=(group_index == 0) | (group_index == 3),
        reward_parts={
            "correct": (uniform(count) > 0.5).double(),
            "format": uniform(count),
            "first_try": (torch.arange(count) * 3 % 7).double() / 7,
        },
        memory=dict(memory or {}),
        learning_rate=2e-3,
        ratio_ceiling=math.inf,  # no formula knows it: tests/property/test_ratio_ceiling
    )
    certainty = (0.1, 0.16, 0.24)[seed % 3] if kind == "tight" else 1.0  # entropies near the targets of controllers
    entropy = torch.where(mask, certainty * (0.05 + 2 * uniform(count, LENGTH)), 0.0)
    segments, sent = _segments(batch, uniform(count, LENGTH) > 0.5, spread * normal(count, LENGTH))
    batch = replace(batch, segment_ids=segments, segment_logprobs=sent, **_episodes(batch, kind, seed))
    return batch, logprobs, entropy


def _episodes(batch: Batch, kind: str, seed: int) -> dict[str, Any]:
    """Turns of two places each, up to the last trained one."""
    dice = random.Random(f"{kind} {seed}")
    places, most = torch.arange(LENGTH), LENGTH // 2
    num_turns = (torch.where(batch.mask, places, 0).max(dim=1).values // 2 + 1).tolist()
    rewards = torch.zeros((len(num_turns), most), dtype=torch.float64)
    calls = torch.zeros((len(num_turns), most), dtype=torch.int64)
    for row, count in enumerate(num_turns):
        for turn in range(count):
            rewards[row, turn] = 0.0 if kind in ("binary", "equal") else dice.choice((-0.5, 0.0, 0.0, 0.25, 1.0))
            calls[row, turn] = dice.choice((0, 1, 1, 2))

    place = torch.arange(len(num_turns) * most, dtype=torch.float64).reshape(len(num_turns), most)
    is_shifted = torch.arange(most)[None] < torch.tensor(num_turns)[:, None] - 1
    shifts = torch.where(is_shifted, torch.sin(1.7 * place), 0.0)

    def texts(*values: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(dice.choice(values) for _ in range(count)) for count in num_turns)

    return {
        "turn_rewards": rewards,
        "num_turns": torch.tensor(num_turns),
        "num_calls": calls,
        "state_keys": texts("", "lake", "hill", "hill"),
        "turn_statuses": texts(*[TurnStatus.OK] * 6, *TurnStatus),
        "actions": texts("go", "Go ", "stay"),
        "feedback_shifts": shifts,
        "answer_probs": torch.tensor([[dice.random() for _ in range(most)] for _ in num_turns], dtype=torch.float64),
    }


def _segments(batch: Batch, cuts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Runs of trained tokens of two groups, and what they were drawn with."""
    segments = torch.full(batch.mask.shape, -1)
    sent = torch.zeros_like(noise)
    for i in range(batch.num_rollouts):
        if int(batch.group_index[i]) not in (2, 4):
            continue
        number, first = -1, 0
        for t in range(LENGTH):
            if batch.mask[i, t]:
                if number < 0 or cuts[i, t]:
                    number, first = number + 1, t
                segments[i, t] = number
                sent[i, first] += batch.behavior_logprobs[i, t] + noise[i, t]
    return segments, sent


def predictions(batch: Batch) -> tuple[Tensor, Tensor]:
    """(hidden states [N, L, 3], logits [N, L, 5]) for what probes; the same for a step without some tokens."""
    assert batch.baseline_rewards is not None
    generator = torch.Generator().manual_seed(int(batch.length.sum()) + int(1e6 * batch.baseline_rewards.sum()))
    shape = batch.mask.shape
    hidden = torch.randn((*shape, HIDDEN_SIZE), generator=generator, dtype=torch.float64)
    return hidden, 2 * torch.randn((*shape, NUM_WORDS), generator=generator, dtype=torch.float64)


def case_of(batch: Batch, logprobs: Tensor, entropy: Tensor) -> Case:
    """The same step in plain Python; gradients of a formula flow into `logprobs` and `entropy`."""
    assert batch.turn_rewards is not None and batch.num_calls is not None and batch.state_keys is not None
    assert batch.turn_statuses is not None and batch.actions is not None and batch.answer_probs is not None
    assert batch.feedback_shifts is not None
    groups = [Group(key=key, baseline=math.nan, members=[]) for key in batch.task_keys]
    for index, group in enumerate(groups):
        if batch.baseline_rewards is not None:
            group.baseline = float(batch.baseline_rewards[index])

    def numbers(values: Tensor | None, otherwise: float) -> list[list[Any]]:
        return (torch.full(batch.mask.shape, otherwise) if values is None else values).tolist()

    mask, mu, ids = batch.mask.tolist(), batch.behavior_logprobs.tolist(), batch.token_ids.tolist()
    old = numbers(logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs, math.nan)
    ref, turns = numbers(batch.reference_logprobs, math.nan), batch.turn_ids.tolist()
    segments, sent = numbers(batch.segment_ids, -1), numbers(batch.segment_logprobs, 0.0)
    hidden, logits = (values.tolist() for values in predictions(batch))
    rows = [(row.unbind(), spread.unbind()) for row, spread in zip(logprobs.unbind(), entropy.unbind(), strict=True)]
    for i, (logps, entropies) in enumerate(rows):
        tokens = [
            Token(
                logp=logps[t],
                entropy=entropies[t],
                mu=mu[i][t],
                old=old[i][t],
                ref=ref[i][t],
                turn=turns[i][t],
                hidden=hidden[i][t],
                logits=logits[i][t],
                target=ids[i][t],
                segment=int(segments[i][t]),
                sent=sent[i][t],
                id=ids[i][t],
            )
            for t in range(len(mask[i]))
            if mask[i][t]
        ]
        response = Response(
            tokens=tokens,
            reward=float(batch.rewards[i]),
            reference_reward=math.nan if batch.reference_rewards is None else float(batch.reference_rewards[i]),
            limit=int(batch.max_new_tokens[i]),
            truncated=bool(batch.is_truncated[i]),
            age=int(batch.age_steps[i]),
            external=bool(batch.is_external[i]),
            text=batch.texts[i],
            budget=LENGTH if batch.budgets is None else int(batch.budgets[i]),
            replayed=batch.replayed is not None and bool(batch.replayed[i]),
            parts={name: float(values[i]) for name, values in batch.reward_parts.items()},
            turn_rewards=batch.turn_rewards[i, : len(batch.actions[i])].tolist(),
            calls=batch.num_calls[i, : len(batch.actions[i])].tolist(),
            states=list(batch.state_keys[i]),
            statuses=[str(status) for status in batch.turn_statuses[i]],
            actions=list(batch.actions[i]),
            shifts=batch.feedback_shifts[i, : len(batch.actions[i])].tolist(),
            answers=batch.answer_probs[i, : len(batch.actions[i])].tolist(),
        )
        groups[int(batch.group_index[i])].members.append(response)
    return Case(groups=groups, memory=batch.memory, rate=batch.learning_rate)


def shuffled(batch: Batch, order: list[int]) -> Batch:
    """The same rollouts in another order."""
    return replace(batch.select(order))
