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
"""Memory of a part between steps: plain JSON data."""


class Scope(StrEnum):
    """Tokens that a coefficient depends on; if these span several micro-batches, the whole step is scored first."""

    TOKEN = "token"
    ROLLOUT = "rollout"
    GROUP = "group"
    STEP = "step"

    @property
    def reach(self) -> int:
        """Index in the order token < rollout < group < step, from 0."""
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
    TURN_UPDATES = "turn_updates"  # an optimizer update for each turn (the deepest ones share one), the last turn first
    TURNS = "turns"  # episodes of several turns
    TURN_REWARDS = "turn_rewards"  # a reward for each turn
    TURN_SIGNAL = "turn_signal"  # groups of equal outcomes too, where their turns' rewards differ
    STATE_KEYS = "state_keys"  # equal for equal states of an environment
    TOOL_CALLS = "tool_calls"  # turns that call a tool
    ANSWER_PROBS = "answer_probs"  # of the reference answer before each turn, under the policy
    FEEDBACK_SHIFTS = "feedback_shifts"  # of the next turn's log-probs by the environment's answer
    REPEATED_PROMPTS = "repeated_prompts"  # the same prompt comes back, so that its history means something
    PREVIOUS_DRAW = "previous_draw"  # the previous draw is used once more, before the new one
    BUDGETS = "budgets"  # members of a group were asked to keep to different numbers of tokens
    REWARD_PARTS = "reward_parts"  # several named rewards for each rollout
    SEGMENT_LOGPROBS = "segment_logprobs"  # nodes of another tokenizer send the byte length of each token
    VARIED_GROUPS = "varied_groups"  # groups of more or fewer rollouts than the group size
    PERTURBED_LOGPROBS = "perturbed_logprobs"  # of the policy that is optimised, with noise in its layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Gaussian noise that the learner adds to the input of every layer while it scores an update."""

    std: float  # of each layer's noise before the first update, in units of a hidden state
    rate: float  # learning rate of Adam on log(std)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Values of the scoring pass for a chunk of c trained tokens; a probe must not modify them."""

    hidden: Tensor  # [c, H], last hidden states
    logits: Tensor  # [c, V], float32 at least, at temperature 1
    targets: Tensor  # int64 [c], the tokens
    temperature: Tensor  # [c], of their rollouts


Probe = Callable[[Prediction], Tensor]
"""Function that returns one number for each token, [c]; called without gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A batch scored under the policy being optimised.

    Gradient flows to `logprobs` and `entropy`, also through `log_ratio`; a part that needs constants detaches them.
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
        """Log-probs [N, L] at the start of the update, constant; the current ones if the batch has no others."""
        stored = self.batch.proximal_logprobs
        return self.logprobs.detach() if stored is None else stored.to(self.logprobs.dtype)

    @property
    def reference(self) -> Tensor:
        """Log-probs [N, L] of the frozen reference policy; the recipe must declare `reference_logprobs`."""
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
    off: float | None = None  # a legal value outside the bounds

    def allows(self, value: float) -> bool:
        """True if the value is `off` or within all bounds; False for NaN."""
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
    """Error text for a value that the bounds or literals in its type exclude; "" for a legal value."""
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
    """Base of all parts; its subclasses become frozen dataclasses, with constants as fields.

    `learner.recipe_params` may override the constants. The type of a field states the bounds of one constant
    (`Positive`, `Share`, a Literal, any `Bound`); `check` is for rules over several constants.
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
        """Raises ConfigError for a combination of constants that is not allowed."""

    @property
    def needs(self) -> frozenset[Requirement]:
        """Requirements of the part: `always_needs`, and in some subclasses others that depend on the constants."""
        return self.always_needs

    @property
    def probes(self) -> Mapping[str, Probe]:
        """Probes that the part reads from `Scored.probes`; in all parts, one name must mean one function."""
        return {}

    def initial(self) -> Memory:
        """Memory before the first step."""
        return {}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        """Returns the memory after a step, from the memory before the step and the scored step."""
        return memory

    def remembered(self, batch: Batch) -> Memory:
        """Returns the memory of this part in the batch; the initial memory if the batch has none."""
        return batch.memory.get(type(self).__name__) or self.initial()


class RewardPart(Part):
    """Shapes rewards before advantages are computed."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Tensor:
        """Returns the new rewards [N] of the whole step."""


class AdvantagePart(Part):
    """Computes advantages from the rewards and groups of the whole step."""

    @abstractmethod
    def __call__(self, batch: Batch) -> Tensor:
        """Returns advantages [N] or [N, L]; NaN drops a rollout or token, whose reward still counts in statistics."""


class ShapePart(Part):
    """Changes advantages with values of the scored policy, such as its entropy or confidence."""

    @abstractmethod
    def __call__(self, scored: Scored) -> Tensor:
        """Returns the new advantages [N, L], used as constants."""


class RatioPart(Part):
    """Computes the importance ratio."""

    @property
    def noise(self) -> Noise | None:
        """Noise under which the numerator is scored, or None; a part with noise must need `PERTURBED_LOGPROBS`."""
        return None

    @abstractmethod
    def __call__(self, scored: Scored) -> Tensor:
        """Returns the log-ratio [N, L], 0 off the mask, bounded so that exp is finite."""


class WeightPart(Part):
    """Computes token losses from log-ratio and advantage: trust regions and detached weights."""

    @abstractmethod
    def __call__(self, scored: Scored) -> TokenLosses:
        """Returns the losses and a mark of the bounded tokens; values off the mask are ignored."""


class CorrectionPart(Part):
    """Computes a constant factor on token losses, for an error that the ratio does not correct; 0 drops a token."""

    @abstractmethod
    def __call__(self, scored: Scored) -> Tensor:
        """Returns the factor [N, L], >= 0; its gradient is ignored."""


class AggregatePart(Part):
    """Reduces token losses to one number that adds up over micro-batches."""

    @abstractmethod
    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        """Returns a scalar; `losses` [N, L] are 0 off the mask, denominators must be totals of the whole step."""


class TermPart(Part):
    """A summand of the loss with its own strength, such as a KL penalty."""

    @abstractmethod
    def __call__(self, scored: Scored) -> Tensor:
        """Returns a scalar that adds up over micro-batches, its strength included."""


class PromptPart(Part):
    """Chooses the next prompt and the number of its responses, by the rewards of our own groups.

    The key of a prompt, such as "sums/17", identifies the prompt. `seen` updates the memory with each of our groups,
    in the order of the questions; `observe` is not used.
    """

    def odds(self, memory: Memory, keys: Sequence[str]) -> list[float]:
        """Returns the sampling weight >= 0 of each candidate prompt; if all are 0, any may be asked."""
        return [1.0] * len(keys)

    def counts(self, memory: Memory, keys: Sequence[str], group_size: int, largest: int) -> list[int]:
        """Returns the number of first responses to each of these prompts: in [2, largest], with mean `group_size`."""
        return [group_size] * len(keys)

    def missing(self, rewards: Sequence[float], group_size: int, largest: int) -> int:
        """Returns the number of further responses to a prompt after these `rewards`; at most `largest` in total."""
        return 0

    def seen(self, memory: Memory, key: str, rewards: Sequence[float]) -> Memory:
        """Returns the memory after a group of responses to a prompt, with rewards in [0, 1]."""
        return memory


def on_mask(values: Tensor, mask: Tensor) -> Tensor:
    """`values` ([N, L] or [N, 1]) on the mask, 0 off the mask even where `values` is NaN: [N, L]."""
    return torch.where(mask, values, torch.zeros_like(values))


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [N, L] over `mask`, in at least float32; values off the mask may be NaN."""
    kept = on_mask(values, mask)
    return kept.to(torch.promote_types(kept.dtype, torch.float32)).sum()
