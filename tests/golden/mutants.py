"""A recipe with one thing wrong, of every kind of mistake that its golden test must notice.

A label names the change, such as "weight.low up", "ratio swapped" or
"detach gone from sapo_soft_gate.SoftGate.__call__".
"""

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from golden_runs import Step, ours
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.methods import load_recipe
from swarm.objectives.part import (
    AdvantagePart,
    AggregatePart,
    CorrectionPart,
    Part,
    RewardPart,
    Scored,
    ShapePart,
    TokenLosses,
    WeightPart,
)
from swarm.objectives.recipe import Recipe


@dataclass(frozen=True)
class Mutant:
    """A changed recipe, or the same one while the code of a part is changed."""

    label: str
    recipe: Recipe
    patched: Callable[[], AbstractContextManager[None]] = nullcontext


def mutants(recipe: Recipe) -> Iterator[Mutant]:
    """The recipe with one of its parts or constants changed."""
    yield Mutant("sign", replace(recipe, weight=_Negated(inner=recipe.weight)))
    yield Mutant("normaliser", replace(recipe, aggregate=_Scaled(inner=recipe.aggregate)))
    yield from _without_a_part(recipe)
    yield from _swapped(recipe)
    for address, part in recipe.parts:
        if address != "prompts":  # what is asked is no part of the loss: tests/unit/test_parts_prompts
            yield from _other_constants(recipe, address, part)


def _without_a_part(recipe: Recipe) -> Iterator[Mutant]:
    for slot in ("rewards", "shapers", "corrections", "terms"):
        chosen = getattr(recipe, slot)
        for index in range(len(chosen)):
            rest = chosen[:index] + chosen[index + 1 :]
            yield Mutant(f"without {slot}.{type(chosen[index]).__name__}", replace(recipe, **{slot: rest}))


def _swapped(recipe: Recipe) -> Iterator[Mutant]:
    """Another ratio and another advantage, as similar as possible."""
    token, sequence = (load_recipe(name).ratio for name in ("grpo", "gspo"))
    scored, centred = (load_recipe(name).advantage for name in ("grpo", "dr_grpo"))
    ratio = sequence if type(recipe.ratio) is type(token) else token
    advantage = centred if type(recipe.advantage) is type(scored) else scored
    yield Mutant("ratio swapped", replace(recipe, ratio=ratio))
    yield Mutant("advantage swapped", replace(recipe, advantage=advantage))


def _other_constants(recipe: Recipe, address: str, part: Part) -> Iterator[Mutant]:
    hints = get_type_hints(type(part))
    for name, value in recipe.constants.items():
        place, _, field = name.rpartition(".")
        if place != address:
            continue
        for way, other in _others(value, hints[field]):
            try:
                yield Mutant(f"{name} {way}", recipe.with_params({name: other}))
            except ConfigError:
                continue  # refused, so nobody can make this mistake


def _others(value: Any, hint: Any) -> Iterator[tuple[str, Any]]:
    """(how, another value) of a constant."""
    if isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, int):
        yield from (("up", value + 1), ("down", value - 1))
    elif isinstance(value, float):
        yield from (("up", value * 1.37 + 0.011), ("down", value * 0.71 if value else -0.011))
        if not value:
            yield "on", 1.5  # of a bound that is off at 0
    elif get_origin(hint) is Literal:
        yield from ((f"= {other}", other) for other in get_args(hint) if other != value)
    else:
        yield "= format=0.5", "format=0.5"  # weights of named rewards, the one free text


# --- mistakes in the code of a part --------------------------------------------------------------


NEEDLESS = {
    "minpro.FullPrefixRatio.__call__": "on_tokens detaches",
    "minpro.prefix_minimum": "on_tokens detaches",
    "segment_ratio.SegmentRatio._drift": "on_tokens detaches",
    "ratio.FullSequenceRatio.__call__": "on_tokens detaches",
    "gspo.SequenceTokenRatio.__call__": "on_tokens detaches",
    "ratio.TurnRatio.__call__": "on_tokens detaches",
    "dhpo._Branches.mixed": "on_tokens detaches",
    "ratio.NoRatio.__call__": "those who use it take the log-probs themselves",
    "magic.AdaptiveEntropy.__call__": "a float",
    "bapo.BalancedClip.bounds": "floats",
    "st_ppo.BiasNormalisedClip.__call__": "a float",
    "m2po.SecondMomentClip.bounds": "floats",
    "epo.EntropyBand.outside": "compared only",
    "rec.OneSidedGate.__call__": "compared only",
    "rec.RingGate.__call__": "compared only",
    "rec.TwoSidedGate.__call__": "compared only",
    "clip.covariances": "ranked only",
}
"""Functions whose `detach` states an intention but changes no gradient, with the reason."""

DETACHED_BY_ENGINE = (RewardPart, AdvantagePart, ShapePart, CorrectionPart)


def code_mutants(recipe: Recipe, step: Step) -> Iterator[Mutant]:
    """The recipe with one mistake in the code of its parts; `step` is run to see which code it uses.

    Without `detach` in one function, or with minimum and maximum swapped there. Rewards, advantages, shapers and
    corrections are left out for `detach`: the engine detaches what they return.
    """
    detaching, bounding = _callers(recipe, step)
    for place in sorted(detaching):
        yield Mutant(f"detach gone from {place}", recipe, lambda place=place: _no_detach(place))
    for place in sorted(bounding):
        yield Mutant(f"minimum and maximum swapped in {place}", recipe, lambda place=place: _swapped_bounds(place))


def _place(code: CodeType) -> str | None:
    """Such as "sapo_soft_gate.SoftGate.__call__", for functions of parts and methods."""
    path = Path(code.co_filename)
    is_ours = path.parent.name in ("parts", "methods") and path.parent.parent.name == "objectives"
    return f"{path.stem}.{code.co_qualname}" if is_ours else None


def _is_detached_anyway(frame: FrameType | None) -> bool:
    """True where this code runs inside a part whose value the engine detaches."""
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), DETACHED_BY_ENGINE):
            return True
        frame = frame.f_back
    return False


def _callers(recipe: Recipe, step: Step) -> tuple[set[str], set[str]]:
    """Functions of parts that call `detach`, and those that call `minimum` or `maximum`."""
    detaching, bounding = set[str](), set[str]()

    def noting(true: Callable[..., Tensor], found: set[str]) -> Callable[..., Tensor]:
        def call(*tensors: Tensor) -> Tensor:
            caller = sys._getframe(1)
            place = _place(caller.f_code)
            if place is not None and not (found is detaching and _is_detached_anyway(caller)):
                found.add(place)
            return true(*tensors)

        return call

    with (
        _replaced(Tensor, "detach", noting(Tensor.detach, detaching)),
        _replaced(torch, "minimum", noting(torch.minimum, bounding)),
        _replaced(torch, "maximum", noting(torch.maximum, bounding)),
    ):
        ours(recipe, *step)
    return detaching, bounding


@contextmanager
def _no_detach(place: str) -> Generator[None]:
    true = Tensor.detach

    def detach(tensor: Tensor) -> Tensor:
        return tensor if _place(sys._getframe(1).f_code) == place else true(tensor)

    with _replaced(Tensor, "detach", detach):
        yield


@contextmanager
def _swapped_bounds(place: str) -> Generator[None]:
    least, most = torch.minimum, torch.maximum

    def minimum(a: Tensor, b: Tensor) -> Tensor:
        return (most if _place(sys._getframe(1).f_code) == place else least)(a, b)

    def maximum(a: Tensor, b: Tensor) -> Tensor:
        return (least if _place(sys._getframe(1).f_code) == place else most)(a, b)

    with _replaced(torch, "minimum", minimum), _replaced(torch, "maximum", maximum):
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    true = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, true)


class _Negated(WeightPart):
    equation = "-L"
    inner: WeightPart

    def __call__(self, scored: Scored) -> TokenLosses:
        found = self.inner(scored)
        return TokenLosses(losses=-found.losses, bounded=found.bounded)


class _Scaled(AggregatePart):
    equation = "1.01 L"
    inner: AggregatePart

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return 1.01 * self.inner(losses, scored)
