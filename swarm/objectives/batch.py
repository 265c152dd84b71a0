"""One optimizer step as tensors: the rollouts that objectives see.

Invariant: totals (`step_tokens`, `step_rollouts`, `step_groups`) are those of the whole optimizer step,
also in a part of it, so that summing over micro-batches gives the one big batch.
Shape letters: M groups, N rollouts, L longest response in tokens, P prompt tokens, K most turns of a rollout.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from swarm.episode import Actions, TurnStatus
from swarm.types import Correction

RATIO_CEILING = 20.0
"""Upper bound on ratios of other nodes' tokens, because a node may claim any log-prob; see `coefficients.scored`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Masses:
    """Sums of the sizes of a group's coefficients, times the number of groups of the update; see `mass_clip`."""

    coefficients: float  # sum |c_t|
    pull: float  # sum |c_t| (1 - pi_t): a token that the policy would not have drawn pulls the most


@dataclass(frozen=True, kw_only=True, slots=True)
class MassClip:
    """Bound on the masses of groups from other nodes."""

    num_groups: float  # I + J, of one update
    reference: Masses | None  # of a typical own group; None: computed from the batch, then a whole update
    used: Tensor | None = None  # float64 [M, 2], what micro-batches before this one took of each group's bound


_OPTIONAL_BY_TOKEN = ("proximal_logprobs", "reference_logprobs", "segment_ids", "segment_logprobs", "conversation_ids")
_PER_GROUP = ("baseline_rewards",)  # tensors [M]; every other one is [N], [N, L] or [N, K]
_TUPLES = ("corrections", "texts", "state_keys", "turn_statuses", "turn_roles", "actions")  # N values each, or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rollouts of an optimizer step (or of one micro-batch of it), rollout-major.

    Off the mask advantages and log-probs are 0. In the batch of a draw, `behavior_logprobs` on the mask is NaN
    exactly where the rollout's correction is not EXACT, so that an illegal importance ratio cannot go unnoticed.
    """

    token_ids: Tensor  # int64 [N, L], right-padded with 0
    mask: Tensor  # bool [N, L], True on trained tokens
    behavior_logprobs: Tensor  # float32 [N, L], nats, the generator's own at `temperature`
    rewards: Tensor  # float32 [N]
    advantages: Tensor  # float [N, L]; 0 until `coefficients.with_advantages` filled it
    turn_ids: Tensor  # int64 [N, L]
    group_index: Tensor  # int64 [N], into the M groups
    age_steps: Tensor  # int64 [N]
    is_external: Tensor  # bool [N], of another lineage than our own
    temperature: Tensor  # float32 [N], > 0
    length: Tensor  # int64 [N], trained tokens before any member was dropped
    max_new_tokens: Tensor  # int64 [N], token limit of the generator, summed over the turns
    is_truncated: Tensor  # bool [N], cut off by a token limit
    corrections: tuple[Correction, ...]  # N
    texts: tuple[str, ...]  # N responses
    prompts: tuple[Tensor, ...]  # M tensors int64 [P]
    sources: tuple[str, ...]  # M producers
    task_keys: tuple[str, ...]  # M names of the prompts, equal for equal tasks
    step_tokens: int  # trained tokens of the whole step, before any member was dropped
    step_rollouts: int
    step_groups: int
    is_from_peer: Tensor | None = None  # bool [N], made by another node: its log-probs are a claim; None: is_external
    is_newcomer: Tensor | None = None  # bool [N], by a node that is not established; None: no rollout
    proximal_logprobs: Tensor | None = None  # float32 [N, L], policy at the start of the update
    reference_logprobs: Tensor | None = None  # float32 [N, L], frozen reference policy
    baseline_rewards: Tensor | None = None  # float32 [M], of one greedy response to each prompt
    reference_rewards: Tensor | None = None  # float32 [N], of the reference policy's responses, one a rollout
    budgets: Tensor | None = None  # int64 [N], tokens that the prompt asked this response to keep to
    replayed: Tensor | None = None  # bool [N], of the previous draw and used before
    segment_ids: Tensor | None = None  # int64 [N, L], common segment of two tokenizers' texts; -1: none
    segment_logprobs: Tensor | None = None  # float32 [N, L], the generator's of a segment, at its first token; else 0
    conversation_ids: Tensor | None = None  # int64 [N, L], a token sees only its own; None: all are in the first
    turn_rewards: Tensor | None = None  # float32 [N, K], from our replay; None: single answers only
    num_turns: Tensor | None = None  # int64 [N]
    num_calls: Tensor | None = None  # int64 [N, K], well-formed tool calls of each turn
    answer_probs: Tensor | None = None  # float32 [N, K], `swarm.learn.requested_scores`; for recipes that ask
    feedback_shifts: Tensor | None = None  # float32 [N, K], as `answer_probs`
    state_keys: tuple[tuple[str, ...], ...] | None = None  # N of num_turns, of the state after each turn; "": none
    turn_statuses: tuple[tuple[TurnStatus, ...], ...] | None = None  # N of num_turns
    turn_roles: tuple[tuple[str, ...], ...] | None = None  # N of num_turns, who acted; "": no role. None: no roles
    actions: tuple[Actions, ...] | None = None  # N of num_turns, texts of the turns
    outcomes: Tensor | None = None  # float32 [N], rewards before reward parts changed them; None until then
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # name -> float32 [N]
    memory: Mapping[str, Any] = field(default_factory=dict[str, Any])  # memory of the recipe's parts, plain data
    ratio_ceiling: float = RATIO_CEILING  # of other nodes' tokens; infinite: none
    learning_rate: float = 0.0  # of the update that this batch is for, warm-up included; 0: none follows
    ratio_band: float = math.inf  # tokens whose known ratio is outside [1/band, band] are left out (the guard's cap)
    mass_clip: MassClip | None = None  # None: no group is clipped
    turns: tuple[int, int] | None = None  # first and last that the update learns from; later ones are scored; None: all

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        assert len(shape) == 2, shape
        assert self.mask.shape == shape and self.mask.dtype == torch.bool
        for name in ("behavior_logprobs", "advantages", "turn_ids"):
            assert getattr(self, name).shape == shape, name
        for name in _OPTIONAL_BY_TOKEN:
            assert getattr(self, name) is None or getattr(self, name).shape == shape, name
        for name in ("rewards", "group_index", "age_steps", "is_external", "temperature", "length", "max_new_tokens"):
            assert getattr(self, name).shape == shape[:1], name
        assert self.is_truncated.shape == shape[:1] and len(self.texts) == len(self.corrections) == shape[0]
        assert len(self.prompts) == len(self.sources) == len(self.task_keys)
        turns = [
            getattr(self, name)
            for name in ("turn_rewards", "num_calls", "answer_probs", "feedback_shifts")
            if getattr(self, name) is not None
        ]
        assert all(each.shape[:1] == shape[:1] and each.shape == turns[0].shape for each in turns)
        assert all(len(each) == shape[0] for name in _TUPLES if (each := getattr(self, name)) is not None)
        assert bool((self.temperature > 0).all()), "temperature must be positive"
        is_illegal = torch.isnan(self.behavior_logprobs) & (~self.mask | self.has_logprobs[:, None])
        assert not bool(is_illegal.any()), "NaN log-probs off the mask or on an EXACT rollout"

    @property
    def num_rollouts(self) -> int:
        """Number of rollouts in this batch, N."""
        return self.token_ids.shape[0]

    @property
    def from_peers(self) -> Tensor:
        """bool [N]: rollouts that another node made; the external ones if `is_from_peer` is None."""
        return self.is_external if self.is_from_peer is None else self.is_from_peer

    @property
    def newcomers(self) -> Tensor:
        """bool [N]: rollouts of nodes that are not established."""
        return torch.zeros_like(self.is_external) if self.is_newcomer is None else self.is_newcomer

    @property
    def num_tokens(self) -> int:
        """Number of trained tokens in this batch, dropped members excluded."""
        return int(self.mask.sum())

    @property
    def learned(self) -> Tensor:
        """bool [N, L]: trained tokens that the update learns from."""
        if self.turns is None:
            return self.mask
        first, last = self.turns
        return self.mask & (self.turn_ids >= first) & (self.turn_ids <= last)

    @property
    def step_share(self) -> float:
        """Tokens of this batch over those of the step, dropped members included; 1 for a whole step with one recipe."""
        return int(self.length.sum()) / max(1, self.step_tokens)

    @property
    def has_logprobs(self) -> Tensor:
        """bool [N]: True where behaviour log-probs exist."""
        return torch.tensor(
            [correction is Correction.EXACT for correction in self.corrections],
            dtype=torch.bool,
            device=self.mask.device,
        )

    @property
    def per_rollout(self) -> dict[str, Tensor]:
        """Fields that are tensors [N], [N, L] or [N, K], by name; fields that are None are left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _PER_GROUP}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def select(self, rollouts: Sequence[int]) -> "Batch":
        """Returns the batch of these rollouts, in this order; groups, L, K and the totals of the step are unchanged."""
        index = torch.tensor(list(rollouts), dtype=torch.int64, device=self.mask.device)
        per_rollout: dict[str, Any] = {name: value[index] for name, value in self.per_rollout.items()}
        return replace(
            self,
            reward_parts={name: values[index] for name, values in self.reward_parts.items()},
            **{name: tuple(values[i] for i in rollouts) for name, values in self._tuples.items()},
            **per_rollout,
        )

    def with_tokens(
        self, rollouts: Sequence[int], token_ids: Tensor, mask: Tensor, conversation_ids: Tensor | None = None
    ) -> "Batch":
        """Returns a batch to score at temperature 1: other tokens after the prompts of these rollouts.

        Args:
            rollouts: R indices, possibly repeated.
            token_ids: int64 [R, any].
            mask: bool, of the shape of `token_ids`; True on the tokens to score.
            conversation_ids: int64, of the shape of `token_ids`; None: all tokens are in the first conversation.
        """
        by_token = ("token_ids", "mask", "behavior_logprobs", "advantages", "turn_ids")
        # Without its tokens first: a copy of them for each place would be most of the memory.
        bare = replace(
            self, **dict.fromkeys(_OPTIONAL_BY_TOKEN), **{name: getattr(self, name)[:, :0] for name in by_token}
        ).select(rollouts)
        zeros = torch.zeros(token_ids.shape, device=token_ids.device)
        return replace(
            bare,
            token_ids=token_ids,
            mask=mask,
            behavior_logprobs=zeros,
            advantages=zeros,
            turn_ids=torch.zeros_like(token_ids),
            temperature=torch.ones(len(rollouts), device=token_ids.device),
            conversation_ids=conversation_ids,
        )

    @property
    def _tuples(self) -> dict[str, tuple[Any, ...]]:
        return {name: values for name in _TUPLES if (values := getattr(self, name)) is not None}

    def of_groups(self, groups: Sequence[int]) -> "tuple[Tensor, Batch]":
        """Returns the step that consists of these groups alone: renumbered in this order, with totals of these groups.

        Returns:
            (indices in this batch of the step's rollouts, int64; the step as a batch).
        """
        number = {group: index for index, group in enumerate(groups)}
        group_of: list[int] = self.group_index.tolist()
        rollouts = sorted((i for i, group in enumerate(group_of) if group in number), key=lambda i: number[group_of[i]])
        device = self.mask.device
        chosen = torch.tensor(list(groups), dtype=torch.int64, device=device)
        per_group = {name: values[chosen] for name in _PER_GROUP if (values := getattr(self, name)) is not None}
        part = self.select(rollouts)
        part = replace(
            part,
            group_index=torch.tensor([number[group_of[i]] for i in rollouts], dtype=torch.int64, device=device),
            prompts=tuple(self.prompts[group] for group in groups),
            sources=tuple(self.sources[group] for group in groups),
            task_keys=tuple(self.task_keys[group] for group in groups),
            step_tokens=int(part.length.sum()),
            step_rollouts=len(rollouts),
            step_groups=len(groups),
            **per_group,
        )
        return torch.tensor(rollouts, dtype=torch.int64, device=device), part


def weighted_rows(
    token_ids: Tensor,
    mask: Tensor,
    advantages: Tensor,
    prompts: Sequence[Sequence[int]],
    behavior_logprobs: Tensor | None = None,
) -> Batch:
    """Returns a batch of given rows without rewards, each a group of its own, at temperature 1.

    Args:
        token_ids: int64 [N, L], right-padded with 0.
        mask: bool [N, L], True on trained tokens.
        advantages: float32 [N, L], the weight of each token; 0 off the mask.
        prompts: N sequences of token ids, before each row.
        behavior_logprobs: float32 [N, L]; None: zeros, which no ratio may use.
    """
    count, size = mask.shape
    device, lengths = mask.device, mask.sum(dim=1)
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    return Batch(
        token_ids=token_ids,
        mask=mask,
        behavior_logprobs=torch.zeros_like(advantages) if behavior_logprobs is None else behavior_logprobs,
        rewards=torch.zeros(count, device=device),
        advantages=advantages,
        turn_ids=torch.zeros_like(token_ids),
        group_index=torch.arange(count, device=device),
        age_steps=zeros,
        is_external=zeros.bool(),
        temperature=torch.ones(count, device=device),
        length=lengths,
        max_new_tokens=torch.full((count,), size, device=device),
        is_truncated=zeros.bool(),
        corrections=(Correction.EXACT,) * count,
        texts=("",) * count,
        prompts=tuple(torch.tensor(list(prompt), dtype=torch.int64, device=device) for prompt in prompts),
        sources=("given",) * count,
        task_keys=tuple(map(str, range(count))),
        step_tokens=int(lengths.sum()),
        step_rollouts=count,
        step_groups=count,
    )
