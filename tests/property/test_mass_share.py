"""No group of another node moves a step by more than its share, and newcomers change no number of anybody else's.

A property is one test of all recipes; a failure names the recipe and the attack. The attacks put anything that
admission lets in into a source's groups: any log-probs, rewards, lengths and answers, likely or not under the policy.
"""

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.episode import TurnStatus
from swarm.objectives import coefficients as objective
from swarm.objectives.batch import Batch, MassClip, Masses
from swarm.objectives.coefficients import Coefficients, coefficients, with_advantages
from swarm.objectives.fallbacks import RecipeSet
from swarm.objectives.mass_clip import MASS_FACTOR, group_masses, reference_masses, rollout_masses
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import Scope
from swarm.objectives.recipe import Recipe
from swarm.testing.batches import toy_batch

SIZE, LENGTH, NOMINAL = 4, 8, 8
SOURCES = ("me", "me", "friend", "me", "stranger", "stranger")
"""Producers of the groups; `friend` is established, `stranger` is attacking, as a newcomer or established."""
OURS = tuple(source == "me" for source in SOURCES)
HOSTILE = tuple(source == "stranger" for source in SOURCES)
NUM_GROUPS = len(SOURCES)
DTYPE = torch.float64


@dataclass(frozen=True, kw_only=True)
class Step:
    """Groups of one draw, and what the policy makes of them."""

    batch: Batch
    logprobs: Tensor
    entropy: Tensor


def is_in(groups: tuple[bool, ...]) -> Tensor:
    """bool [N], rollouts of the chosen groups."""
    return torch.tensor(groups).repeat_interleave(SIZE)


@functools.cache
def honest(seed: int) -> Step:
    generator = torch.Generator().manual_seed(seed)
    count = NUM_GROUPS * SIZE

    def noise(size: float) -> Tensor:
        return size * torch.randn((count, LENGTH), generator=generator, dtype=DTYPE)

    mask = torch.arange(LENGTH)[None] < torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
    behavior = -2.5 * torch.rand((count, LENGTH), generator=generator, dtype=DTYPE) - 0.3
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=DTYPE).repeat(2)
    values = {"proximal_logprobs": behavior + noise(0.03), "reference_logprobs": behavior + noise(0.1)}
    batch = toy_batch(
        rewards,
        mask,
        groups=torch.arange(count) // SIZE,
        behavior_logprobs=torch.where(mask, behavior, 0.0),
        turn_ids=torch.arange(LENGTH).div(4, rounding_mode="floor").expand(count, LENGTH).contiguous(),
        age_steps=torch.ones(count, dtype=torch.int64),
        is_external=~is_in(OURS),
        max_new_tokens=torch.full((count,), LENGTH),
        is_truncated=mask[:, -1].clone(),
        texts=tuple(f"answer {number % 3}" for number in range(count)),
        sources=SOURCES,
        task_keys=tuple(f"sums/{group}" for group in range(NUM_GROUPS)),
        baseline_rewards=torch.full((NUM_GROUPS,), 0.25, dtype=DTYPE),
        reference_rewards=torch.full((count,), 0.25, dtype=DTYPE),
        budgets=torch.tensor([2, 4, 6, 8]).repeat(NUM_GROUPS),
        replayed=torch.arange(count) < SIZE,
        reward_parts={"correct": rewards, "format": 1 - 0.5 * rewards},
        **episodes(0),
        **{name: torch.where(mask, each, 0.0) for name, each in values.items()},
    )
    logprobs = torch.where(mask, (behavior + noise(0.25)).clamp(max=-1e-3), 0.0)
    entropy = torch.rand((count, LENGTH), generator=generator, dtype=DTYPE) + 0.2
    return Step(batch=batch, logprobs=logprobs, entropy=torch.where(mask, entropy, 0.0))


def episodes(seed: int, *, is_extreme: bool = False) -> dict[str, Any]:
    """Two turns, or one; rewards and states are of the replay, so that extremes are those of an environment."""
    dice = random.Random(seed)
    num_turns = [dice.choice((1, 2)) if is_extreme else 2 - (row % 5 == 0) for row in range(NUM_GROUPS * SIZE)]
    rewards = (-5.0, 0.0, 5.0) if is_extreme else (0.0, 0.25, 0.5)
    statuses = tuple(TurnStatus) if is_extreme else (TurnStatus.OK,) * 7 + tuple(TurnStatus)

    def each(*values: Any) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(dice.choice(values) for _ in range(count)) for count in num_turns)

    def table(*values: float) -> list[list[float]]:
        return [[*row, 0.0][:2] for row in each(*values)]

    return {
        "turn_rewards": torch.tensor(table(*rewards), dtype=DTYPE),
        "num_calls": torch.tensor(table(0, 1, 16 if is_extreme else 2), dtype=torch.int64),
        "num_turns": torch.tensor(num_turns),
        "state_keys": each("", "here", "there"),
        "turn_statuses": each(*statuses),
        "actions": each("go", "stay"),
    }


def attacked_turns(old: Batch, changed: dict[str, Any], bad: Tensor) -> dict[str, Any]:
    """The stranger's turns of `changed`, all others as they were."""

    def chosen(name: str) -> Any:
        before, after = getattr(old, name), changed[name]
        if isinstance(before, Tensor):
            return torch.where(bad if before.dim() == 1 else bad[:, None], after, before)
        return tuple(new if is_bad else was for was, new, is_bad in zip(before, after, bad.tolist(), strict=True))

    return {name: chosen(name) for name in changed}


def attack(step: Step, seed: int) -> Step:
    """Another content of the stranger's groups: each quantity at extremes of what may be, the same or by token."""
    generator = torch.Generator().manual_seed(1000 + seed)
    bad = is_in(HOSTILE)
    count = int(bad.sum())

    def choice(*values: float) -> float:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    def tokens(*values: float) -> Tensor:
        if choice(0, 1):
            return torch.full((count, LENGTH), choice(*values), dtype=DTYPE)
        chosen = torch.randint(len(values), (count, LENGTH), generator=generator)
        return torch.tensor(values, dtype=DTYPE)[chosen]

    length = (
        torch.full((count, 1), LENGTH)
        if choice(0, 1)
        else torch.randint(1, LENGTH + 1, (count, 1), generator=generator)
    )
    old, mask = step.batch, step.batch.mask.clone()
    mask[bad] = torch.arange(LENGTH)[None] < length
    rewards = old.rewards.clone()
    num_right = int(choice(1, SIZE // 2, SIZE - 1))
    rewards[bad] = (torch.arange(count) % SIZE < num_right).to(DTYPE)

    def placed(values: Tensor | None, changed: Tensor) -> Tensor:
        assert values is not None
        whole = values.clone()
        whole[bad] = changed
        return torch.where(mask, whole, 0.0)

    policy = tokens(-1e-6, -0.5, -12.0, -40.0)
    claims = policy + tokens(-3.0, 0.0, 3.0) if choice(0, 1) else tokens(-1e-6, -2.0, -100.0)
    batch = replace(
        old,
        mask=mask,
        rewards=rewards,
        length=mask.sum(dim=1),
        step_tokens=int(mask.sum()),
        is_truncated=mask[:, -1].clone(),
        behavior_logprobs=placed(old.behavior_logprobs, claims.clamp(max=-1e-6)),
        proximal_logprobs=placed(old.proximal_logprobs, policy),
        reference_logprobs=placed(old.reference_logprobs, tokens(-1e-6, -2.0, -40.0)),
        reward_parts={"correct": rewards, "format": 1 - 0.5 * rewards},
        texts=tuple("same" if is_bad else text for text, is_bad in zip(old.texts, bad.tolist(), strict=True)),
        **attacked_turns(old, episodes(seed + 1, is_extreme=True), bad),
    )
    entropy = placed(step.entropy, tokens(0.0, 0.01, 4.0))
    return Step(batch=batch, logprobs=placed(step.logprobs, policy), entropy=entropy)


def as_newcomer(step: Step) -> Step:
    return replace(step, batch=replace(step.batch, is_newcomer=is_in(HOSTILE)))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of an update on a step."""

    by_logprob: Tensor  # [N, L]
    by_entropy: Tensor  # [N, L]
    memory: object

    def masses(self, step: Step) -> Tensor:
        """[M, 2]."""
        of = rollout_masses(self.by_logprob, self.by_entropy, step.logprobs, step.batch.mask)
        return group_masses(step.batch, of)


def update(recipe: Recipe, step: Step, clip: MassClip | None = None) -> Outcome:
    """As `PolicyLearner` makes it: by slices, with newcomers in slices of their own, each slice clipped."""
    logprob, entropy = torch.zeros_like(step.logprobs), torch.zeros_like(step.entropy)
    memory: dict[str, object] = {}
    for part in RecipeSet(main=recipe).slices(step.batch):
        ready = with_advantages(recipe, replace(part.batch, mass_clip=clip), "all")
        scores = step.logprobs[part.places], step.entropy[part.places]
        probes = dict.fromkeys(recipe.probes, torch.ones_like(scores[0]))
        found: Coefficients = coefficients(recipe, ready, *scores, probes)
        logprob[part.places] = found.logprobs
        if found.entropy is not None:
            entropy[part.places] = found.entropy
        if not part.is_newcomers and bool(objective.within_bounds(recipe, ready, scores[0]).mask.any()):
            memory |= recipe.observe(objective.scored(recipe, ready, *scores, probes))
    return Outcome(by_logprob=logprob, by_entropy=entropy, memory=memory)


def usual(recipe: Recipe, step: Step) -> MassClip:
    """The clip by the step's own groups, as an earlier step left it."""
    found = update(recipe, step)
    masses = rollout_masses(found.by_logprob, found.by_entropy, step.logprobs, step.batch.mask)
    reference = reference_masses([(step.batch, masses)])
    return MassClip(num_groups=NOMINAL, reference=reference or Masses(coefficients=1.0, pull=1.0))


SEEDS = range(6)
NAMES = list_recipes()


def cases(as_who: Callable[[Step], Step]) -> Iterator[tuple[Recipe, Step, list[Step]]]:
    step = as_who(honest(1))
    attacks = [as_who(attack(honest(1), seed)) for seed in SEEDS]
    for name in NAMES:
        yield load_recipe(name), step, attacks


def bounds_of(clip: MassClip, factor: float = MASS_FACTOR) -> Tensor:
    """[2], of both masses of a group."""
    assert clip.reference is not None
    return torch.tensor([clip.reference.coefficients, clip.reference.pull], dtype=DTYPE) * factor / NOMINAL


def within_share(recipe: Recipe, step: Step, clip: MassClip) -> bool:
    factor = MASS_FACTOR if step.batch.is_newcomer is None else 1.0
    found = update(recipe, step, clip).masses(step)[list(HOSTILE)]
    return bool(found.isfinite().all()) and bool((found <= bounds_of(clip, factor) * (1 + 1e-9)).all())


@pytest.mark.parametrize("as_who", [as_newcomer, lambda step: step], ids=["newcomer", "established"])
def test_whatever_a_source_sends_its_groups_weigh_no_more_than_their_share(as_who: Callable[[Step], Step]) -> None:
    for recipe, step, attacks in cases(as_who):
        clip = usual(recipe, step)
        for seed, hostile in enumerate(attacks):
            assert within_share(recipe, hostile, clip), f"{recipe.name}: attack {seed}"


def test_a_group_in_several_micro_batches_has_one_bound_and_what_is_within_it_keeps_its_bits() -> None:
    for recipe, step, attacks in cases(lambda step: step):
        if recipe.scope.reach > Scope.ROLLOUT.reach:
            continue
        clip = usual(recipe, step)
        for seed, hostile in enumerate([step, *attacks]):
            ready = with_advantages(recipe, replace(hostile.batch, mass_clip=clip), "all")
            probes = dict.fromkeys(recipe.probes, torch.ones_like(hostile.logprobs))
            whole = coefficients(recipe, ready, hostile.logprobs, hostile.entropy, probes)
            used = group_masses(ready, torch.zeros_like(whole.masses))
            for row in range(ready.num_rollouts):
                part = replace(ready.select([row]), mass_clip=replace(clip, used=used))
                some = {name: values[[row]] for name, values in probes.items()}
                found = coefficients(recipe, part, hostile.logprobs[[row]], hostile.entropy[[row]], some)
                if torch.equal(whole.kept, whole.masses):
                    assert torch.allclose(found.logprobs, whole.logprobs[[row]], rtol=1e-12, atol=0), recipe.name
                used = used + group_masses(part, found.kept)
            others = [not is_ours for is_ours in OURS]
            assert bool((used[others] <= bounds_of(clip) * (1 + 1e-9)).all()), f"{recipe.name}: attack {seed}"


def moved(recipe: Recipe, step: Step, hostile: Step) -> bool:
    """True where anything of the others depends on the stranger's groups."""
    good = ~is_in(HOSTILE)
    before, after = update(recipe, step), update(recipe, hostile)
    same = torch.allclose(before.by_logprob[good], after.by_logprob[good], rtol=1e-9, atol=1e-15)
    same &= torch.allclose(before.by_entropy[good], after.by_entropy[good], rtol=1e-9, atol=1e-15)
    return not (same and before.memory == after.memory)


def test_nothing_that_a_newcomer_sends_changes_a_coefficient_of_others_or_what_a_recipe_remembers() -> None:
    for recipe, step, attacks in cases(as_newcomer):
        for seed, hostile in enumerate(attacks):
            assert not moved(recipe, step, hostile), f"{recipe.name}: attack {seed}"


CHANGED_BY_ESTABLISHED = {
    "AccuracyKl": "the strength of its KL follows the mean accuracy of the step",
    "BalancedClip": "searches the bounds that balance the whole step",
    "BatchDeviation": "divides by the deviation over the step",
    "BetaNormalised": "fits its distribution to the rewards of the step",
    "BiasNormalisedClip": "divides by the size of what it removed in the step",
    "BundleRisk": "bundles and quantiles are of the step, and remembered",
    "CorrectLikelihood": "a mean over the right answers of the step",
    "CovarianceClip": "picks the tokens of highest covariance in the step",
    "CovariancePenalty": "picks the tokens of highest covariance in the step",
    "CrossBaseline": "its regression remembers the rollouts of the step",
    "EntropyBand": "remembers the entropy of the step",
    "EntropyClip": "a token's place is among the entropies of the step",
    "EntropyScaled": "scales by the entropy of the step",
    "ImprovementFeedback": "remembers the mean reward",
    "KeptTokenMean": "divides by the tokens that were kept",
    "LengthBalance": "remembers the lengths of the step",
    "OutlierFiltered": "drops the outliers of the step",
    "PerRewardScore": "standardises over the step",
    "PromptTracker": "standardises over the step",
    "PullingBand": "remembers the entropy of the step",
    "RatioVariance": "its price follows the variance of the ratios",
    "TemperedPull": "its temperature follows the step, and is remembered",
    "TurnOutcome": "divides by the deviation over the step",
    "WhitenedGroupCentred": "whitens over the tokens of the step",
    "WhitenedReturn": "whitens over the tokens of the step",
}
"""Part -> why an established node that turns can change the coefficients of others, or what the recipe remembers. Every
mean over the tokens of a step shrinks with long responses besides, at most by the longest over the mean length."""


def changed_but_for_dilution(recipe: Recipe, step: Step, hostile: Step) -> bool:
    """True where more of the others changed than the number of tokens by which everything is divided."""
    good = ~is_in(HOSTILE)
    before, after = update(recipe, step), update(recipe, hostile)
    scale = step.batch.step_tokens / hostile.batch.step_tokens

    def is_close(old: Tensor, new: Tensor) -> bool:
        return any(torch.allclose(new[good], old[good] * each, rtol=1e-6, atol=1e-12) for each in (1.0, scale))

    same = is_close(before.by_logprob, after.by_logprob) and is_close(before.by_entropy, after.by_entropy)
    return not same or before.memory != after.memory


def test_what_an_established_node_can_change_of_others_is_listed_and_nothing_is_listed_in_vain() -> None:
    parts = {
        recipe.name: {type(part).__name__ for _, part in recipe.parts} & CHANGED_BY_ESTABLISHED.keys()
        for recipe, step, attacks in cases(lambda step: step)
        if any(changed_but_for_dilution(recipe, step, hostile) for hostile in attacks)
    }
    assert [name for name, reasons in parts.items() if not reasons] == []
    assert set[str]().union(*parts.values()) == set(CHANGED_BY_ESTABLISHED)
