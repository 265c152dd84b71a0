"""A published method as a choice of parts, with every constant addressable by name.

Invariant: a recipe's needs and the scope of its coefficients follow from its parts and are declared nowhere else.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast

from swarm.errors import ConfigError
from swarm.objectives.part import (
    AdvantagePart,
    AggregatePart,
    CorrectionPart,
    Memory,
    Part,
    Probe,
    PromptPart,
    RatioPart,
    Requirement,
    RewardPart,
    Scope,
    Scored,
    ShapePart,
    TermPart,
    WeightPart,
)
from swarm.types import Correction

_SCORED_SLOTS = ("shapers", "ratio", "weight", "corrections", "aggregate", "terms")
_STEP_SLOTS = ("rewards", "advantage")
_SLOTS = ("prompts", *_STEP_SLOTS, *_SCORED_SLOTS)

_DRAWN_KINDS = (RewardPart, AdvantagePart)  # computed once for each draw, before anything is scored


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A method: loss = aggregate(corrections * weight(ratio, shaped advantages)) + terms.

    Example: `swarm/objectives/methods/grpo.py` defines a recipe.
    """

    name: str
    title: str  # of the paper
    acronym: str = ""
    arxiv: str = ""  # id, or "" where there is none
    verification: Literal["code", "paper", "secondary", "ours"] = "ours"  # where the formula was read
    about: str = ""  # its mechanism, formula and what is ours; "": as in the docstring of its file
    advantage: AdvantagePart
    ratio: RatioPart
    weight: WeightPart
    aggregate: AggregatePart
    rewards: tuple[RewardPart, ...] = ()
    shapers: tuple[ShapePart, ...] = ()
    corrections: tuple[CorrectionPart, ...] = ()
    terms: tuple[TermPart, ...] = ()
    prompts: PromptPart | None = None  # what our own generator asks
    url: str = ""  # where there is no arXiv id

    def __post_init__(self) -> None:
        counts = Counter(type(part).__name__ for _, part in self.parts)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ConfigError(
                f"recipe {self.name} has two parts called {', '.join(twice)}: they would share address and memory; "
                "write one part that does both"
            )

    @property
    def parts(self) -> tuple[tuple[str, Part], ...]:
        """Every part with its address, such as ("weight", ...) or ("terms.kl", ...), in the order of use."""
        return tuple(self._addressed(_SLOTS))

    @property
    def scope(self) -> Scope:
        """Scope of a token's coefficient at given advantages: the widest scope of the parts after `advantage`."""
        return max((part.scope for _, part in self._addressed(_SCORED_SLOTS)), key=lambda scope: scope.reach)

    @property
    def needs(self) -> frozenset[Requirement]:
        """Requirements of all parts."""
        return frozenset[Requirement]().union(*(part.needs for _, part in self.parts))

    @property
    def probes(self) -> dict[str, Probe]:
        """Probes of all parts, by name."""
        return {name: probe for _, part in self.parts for name, probe in part.probes.items()}

    @property
    def needs_proximal_first(self) -> bool:
        """True if a reward or advantage part needs proximal log-probs, which are then scored first."""
        return any(Requirement.PROXIMAL_LOGPROBS in part.needs for _, part in self._addressed(_STEP_SLOTS))

    @property
    def constants(self) -> dict[str, Any]:
        """Address -> value of every constant, such as {"weight.low": 0.2}."""
        return {
            f"{address}.{field.name}": getattr(part, field.name)
            for address, part in self.parts
            for field in fields(cast(Any, part))
        }

    def accepts(self, correction: Correction) -> bool:
        """True if this recipe may learn from rollouts with this correction."""
        return correction is Correction.EXACT or Requirement.BEHAVIOR_LOGPROBS not in self.needs

    def with_params(self, overrides: Mapping[str, Any]) -> "Recipe":
        """The recipe with some constants replaced.

        Args:
            overrides: address -> value, flat ("weight.low") or nested ({"weight": {"low": 0.1}}).

        Raises:
            ConfigError: an address is unknown, a value has another type than the constant, or the part refuses a value.
        """
        known, recipe = self.constants, self
        for address, value in _flat(overrides):
            if address not in known:
                raise ConfigError(
                    f"learner.recipe_params.{address}: recipe {self.name} has no such constant; "
                    f"known: {', '.join(sorted(known)) or 'none'}"
                )
            recipe = recipe._with_constant(address, _checked(address, known[address], value))
        return recipe

    def initial_memory(self) -> dict[str, Memory]:
        """Returns the memory of the parts before the first step, by class name; empty memories are left out."""
        return {type(part).__name__: memory for part in self._learning if (memory := part.initial())}

    def observe(self, scored: Scored, of: Literal["step", "draw", "update"] = "step") -> dict[str, Memory]:
        """Returns the memory of the parts after a step, by class name; empty memories are left out.

        Args:
            scored: the step, or with several updates the draw or the slice of an update.
            of: parts that are asked: "draw" for those of rewards and advantages, "update" for all others, "step" for
                both. A step with several updates asks "draw" once and "update" after each update.
        """
        parts = [part for part in self._learning if of == "step" or (of == "draw") == isinstance(part, _DRAWN_KINDS)]
        seen = {type(part).__name__: part.observe(part.remembered(scored.batch), scored) for part in parts}
        return {name: memory for name, memory in seen.items() if memory}

    @property
    def _learning(self) -> Iterator[Part]:
        """Parts whose memory follows optimizer steps: all but `prompts`, whose memory belongs to the generator."""
        return (part for _, part in self.parts if not isinstance(part, PromptPart))

    def _addressed(self, slots: tuple[str, ...]) -> Iterator[tuple[str, Part]]:
        for slot in slots:
            chosen = getattr(self, slot)
            if isinstance(chosen, tuple):
                for part in cast("tuple[Part, ...]", chosen):
                    yield f"{slot}.{part_name(part)}", part
            elif chosen is not None:
                yield slot, cast(Part, chosen)

    def _with_constant(self, address: str, value: Any) -> "Recipe":
        place, _, name = address.rpartition(".")
        slot, _, _ = place.partition(".")

        def changed(part: Part, at: str) -> Part:
            return replace(cast(Any, part), **{name: value}) if at == place else part

        chosen = getattr(self, slot)
        if isinstance(chosen, tuple):
            parts = cast("tuple[Part, ...]", chosen)
            return replace(self, **{slot: tuple(changed(part, f"{slot}.{part_name(part)}") for part in parts)})
        return replace(self, **{slot: changed(chosen, slot)})


def part_name(part: Part) -> str:
    """Returns the class name of a part in snake case, such as "truncated_ratio" for a `TruncatedRatio`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(part).__name__).lower()


def _flat(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in overrides.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _checked(address: str, default: Any, value: Any) -> Any:
    """Returns `value`, an int as a float if `default` is one. Raises ConfigError if the types still differ."""
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(default):
        raise ConfigError(f"learner.recipe_params.{address}: expected {type(default).__name__}, got {value!r}")
    return value
