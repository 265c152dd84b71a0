"""Parts of a recipe: small frozen functions with named constants, one base class for each kind.

Invariant: a part is a pure function of its arguments; its constants are its fields, and its memory between
steps is plain data in `Batch.memory`, so that checkpoint and draws reproduce a run.
Shape letters: N rollouts, L longest response in tokens.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import repeat
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch as Batch  # parts import it from here

Memory = Mapping[str, Any]
"""Plain JSON data."""


class Scope(StrEnum):
    """Tokens that a coefficient depends on; beyond a rollout the step is scored before its first backward."""

    TOKEN = "token"
    ROLLOUT = "rollout"
    GROUP = "group"
    STEP = "step"

    @property
    def reach(self) -> int:
        """Place in the order token < rollout < group < step."""
        return tuple(Scope).index(self)


class Requirement(StrEnum):
    """Input of a part besides text, tokens, rewards and groups; a run that cannot supply it is refused."""

    BEHAVIOR_LOGPROBS = "behavior_logprobs"  # of the generator, at its temperature: every rollout is EXACT
    PROXIMAL_LOGPROBS = "proximal_logprobs"  # of the policy at the start of the update
    REFERENCE_LOGPROBS = "reference_logprobs"  # of the frozen initial policy
    REFERENCE_REWARDS = "reference_rewards"  # of that policy's own responses to each prompt
    BASELINE_ROLLOUT = "baseline_rollout"  # one greedy response to each prompt
    ZERO_VARIANCE_GROUPS = "zero_variance_groups"  # groups whose rewards are all equal
    SEVERAL_UPDATES = "several_updates"  # a batch is used for more than one optimizer update
    TURN_UPDATES = "turn_updates"  # each turn of a draw has an optimizer update of its own, the last turn first
    TURNS = "turns"  # episodes of several turns
    TURN_REWARDS = "turn_rewards"  # a reward for each turn
    TURN_SIGNAL = "turn_signal"  # groups of equal outcomes too, where their turns' rewards differ
    STATE_KEYS = "state_keys"  # equal for equal states of an environment
    TOOL_CALLS = "tool_calls"  # turns that call a tool
    ANSWER_PROBS = "answer_probs"  # of the reference answer before each turn, under the policy
    FEEDBACK_SHIFTS = "feedback_shifts"  # of the next turn's log-probs by what the environment answered
    REPEATED_PROMPTS = "repeated_prompts"  # the same prompt comes back, so that its history means something
    PREVIOUS_DRAW = "previous_draw"  # the draw before comes once more, and is updated on first
    BUDGETS = "budgets"  # members of a group were asked to keep to different numbers of tokens
    REWARD_PARTS = "reward_parts"  # several named rewards for each rollout
    SEGMENT_LOGPROBS = "segment_logprobs"  # nodes of another tokenizer say what their tokens stand for
    VARIED_GROUPS = "varied_groups"  # groups of more or fewer rollouts than the group size
    PERTURBED_LOGPROBS = "perturbed_logprobs"  # of the policy that is optimised, with noise in its layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Gaussian noise on the input of every layer while the learner scores an update; nobody else sees it."""

    std: float  # of each layer's noise before the first update, in units of a hidden state
    rate: float  # learning rate of Adam on log(std)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A chunk of c trained tokens as the scoring pass sees it, for probes; nothing in it may be changed."""

    hidden: Tensor  # [c, H], last hidden states
    logits: Tensor  # [c, V], float32 at least, at temperature 1
    targets: Tensor  # int64 [c], the tokens
    temperature: Tensor  # [c], of their rollouts


Probe = Callable[[Prediction], Tensor]
"""One number [c] of each token that log-prob and entropy do not give; constant, computed without gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A batch together with what the policy being optimised makes of it.

    Gradient flows through `logprobs` and `entropy` only; a part that wants constants detaches.
    """

    batch: Batch
    logprobs: Tensor  # [N, L] nats, 0 off the mask
    entropy: Tensor  # [N, L] nats, 0 off the mask
    advantages: Tensor  # [N, L], constant, 0 off the mask
    log_ratio: Tensor  # [N, L], of the recipe's ratio, 0 off the mask; all 0 until it was formed
    probes: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # name -> [N, L], constant, 0 off the mask

    @property
    def mask(self) -> Tensor:
        """bool [N, L], trained tokens."""
        return self.batch.mask

    @property
    def behavior(self) -> Tensor:
        """Log-probs [N, L] of the generator, 0 off the mask."""
        return self.batch.behavior_logprobs.to(self.logprobs.dtype)

    @property
    def proximal(self) -> Tensor:
        """Log-probs [N, L] at the start of the update, constant: with one update a batch, the policy's own."""
        stored = self.batch.proximal_logprobs
        return self.logprobs.detach() if stored is None else stored.to(self.logprobs.dtype)

    @property
    def reference(self) -> Tensor:
        """Log-probs [N, L] of the frozen reference policy."""
        assert self.batch.reference_logprobs is not None, "the recipe does not declare reference_logprobs"
        return self.batch.reference_logprobs.to(self.logprobs.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """Result of a weight rule for every token."""

    losses: Tensor  # [N, L]
    bounded: Tensor  # bool [N, L], tokens whose gradient the rule removed or capped


def unbounded(losses: Tensor) -> TokenLosses:
    """Losses [N, L] of a weight rule that bounds no token."""
    return TokenLosses(losses=losses, bounded=torch.zeros_like(losses, dtype=torch.bool))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Bounds of a constant, as part of its type: `width: Annotated[float, Bound(above=0)] = 0.2`."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None
    off: float | None = None  # also legal

    def allows(self, value: float) -> bool:
        """True where a constant may have this value; NaN never."""
        return value == self.off or (
            value == value
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        limits = {"above": self.above, "at least": self.at_least, "below": self.below, "at most": self.at_most}
        text = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)
        return text if self.off is None else f"{text}, or {self.off:g} (off)"


Positive = Annotated[float, Bound(above=0)]
NotNegative = Annotated[float, Bound(at_least=0)]
Share = Annotated[float, Bound(at_least=0, at_most=1)]
PositiveShare = Annotated[float, Bound(above=0, at_most=1)]
Decay = Annotated[float, Bound(at_least=0, below=1)]
Count = Annotated[int, Bound(at_least=1)]


@functools.cache
def _hints(kind: type["Part"]) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fault(hint: Any, value: Any) -> str:
    """Objection of a constant's type to its value, elements and alternatives included; empty for none."""
    kind, of = get_origin(hint), get_args(hint)
    if kind is Literal and value not in of:
        among = " nor ".join(map(repr, of)) if len(of) == 2 else ", ".join(map(repr, of))
        return f"{value!r} is {'neither' if len(of) == 2 else 'none of'} {among}"
    if kind is Annotated:
        bounds = [bound for bound in of[1:] if isinstance(bound, Bound)]
        broken = [bound for bound in bounds if not (isinstance(value, int | float) and bound.allows(value))]
        return f"{value} must be {broken[0]}" if broken else ""
    if kind in (Union, UnionType):
        faults = [_fault(each, value) for each in of if (each is NoneType) is (value is None)]
        return faults[0] if faults and all(faults) else ""
    if kind is tuple:
        return next(filter(None, map(_fault, repeat(of[0]) if of[-1] is ... else of, value)), "")
    return ""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Part(ABC):
    """A frozen dataclass without saying so; its fields are the constants that `learner.recipe_params` may override.

    What one constant may be stands in its type (`Positive`, `Share`, a Literal, any `Bound`); `check` is for several.
    """

    equation: ClassVar[str]
    """One line of plain text, in these symbols: r ratio, A advantage, R reward, ..."""
    scope: ClassVar[Scope] = Scope.TOKEN
    always_needs: ClassVar[frozenset[Requirement]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__dataclass_fields__" not in vars(cls):  # a class with a decorator of its own is made a second time
            dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for each in fields(cast(Any, self)):
            fault = _fault(_hints(type(self))[each.name], getattr(self, each.name))
            if fault:
                raise ConfigError(f"{each.name}: {fault}")
        self.check()

    def check(self) -> None:  # noqa: B027  most parts have nothing to add
        """Raises ConfigError for constants that do not go together."""

    @property
    def needs(self) -> frozenset[Requirement]:
        """Requirements: `always_needs`, and more where the constants ask for more."""
        return self.always_needs

    @property
    def probes(self) -> Mapping[str, Probe]:
        """Probes that it reads from `Scored.probes`; one name means one function of all parts, constants included."""
        return {}

    def initial(self) -> Memory:
        """Memory before the first step."""
        return {}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        """Memory after a step, from the memory before it and the whole step."""
        return memory

    def remembered(self, batch: Batch) -> Memory:
        """Its own part of the batch's memory."""
        return batch.memory.get(type(self).__name__) or self.initial()


class RewardPart(Part):
    """Shapes rewards before advantages are computed."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Tensor:
        """New rewards [N] of the whole step."""


class AdvantagePart(Part):
    """Advantages from rewards and groups of the whole step."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Tensor:
        """[N] or [N, L]; NaN drops a rollout or token whose reward counts only in those of others."""


class ShapePart(Part):
    """Changes advantages by what the policy makes of the rollouts (entropy, confidence)."""

    @abstractmethod
    def __call__(self, scored: Scored) -> Tensor:
        """New advantages [N, L], constant."""


class RatioPart(Part):
    """The importance ratio."""

    @property
    def noise(self) -> Noise | None:
        """Noise under which the numerator is scored; a part that returns some needs `PERTURBED_LOGPROBS`."""
        return None

    @abstractmethod
    def __call__(self, scored: Scored) -> Tensor:
        """Log-ratio [N, L], 0 off the mask, bounded so that exp is finite."""


class WeightPart(Part):
    """Token losses from log-ratio and advantage: trust regions and detached weights."""

    @abstractmethod
    def __call__(self, scored: Scored) -> TokenLosses:
        """Losses and which tokens were bounded; what stands off the mask is ignored."""


class CorrectionPart(Part):
    """A constant factor on token losses, for what the ratio does not correct; 0 drops a token."""

    @abstractmethod
    def __call__(self, scored: Scored) -> Tensor:
        """[N, L], >= 0, without gradient."""


class AggregatePart(Part):
    """From token losses to one number that adds up over micro-batches."""

    @abstractmethod
    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        """Scalar; `losses` [N, L] are 0 off the mask, denominators are totals of the whole step."""


class TermPart(Part):
    """A summand of the loss with its own strength, such as a KL penalty."""

    @abstractmethod
    def __call__(self, scored: Scored) -> Tensor:
        """Scalar that adds up over micro-batches, its strength included."""


class PromptPart(Part):
    """Chooses which prompt is asked next and how often it is answered, by what our own groups were rewarded.

    A prompt is known by its key, such as "sums/17". Its memory is folded over our groups in the order of the
    questions, with `seen`; `observe` is not used.
    """

    def odds(self, memory: Memory, keys: Sequence[str]) -> list[float]:
        """Weight >= 0 of each candidate; where all are 0 any may be asked."""
        return [1.0] * len(keys)

    def counts(self, memory: Memory, keys: Sequence[str], group_size: int, largest: int) -> list[int]:
        """Number of first responses to each of these prompts: in [2, largest], with mean `group_size`."""
        return [group_size] * len(keys)

    def missing(self, rewards: Sequence[float], group_size: int, largest: int) -> int:
        """Number of further responses to a prompt after these, at most `largest` in all; 0: enough."""
        return 0

    def seen(self, memory: Memory, key: str, rewards: Sequence[float]) -> Memory:
        """Memory after a group with these rewards, in [0, 1]."""
        return memory


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [N, L] or [N, 1] on the mask: [N, L], 0 off it, whatever stands there."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [N, L] over `mask`, in at least float32; what is off the mask may be NaN."""
    kept = on_mask(values, mask)
    return kept.to(torch.promote_types(kept.dtype, torch.float32)).sum()
