"""Every recipe against its formula, typed a second time in `formulas/`, and against mutants of itself.

Derivation: each formula file quotes its formula and the paper. A formula imports nothing of the
package; gradients are compared in float64, with respect to every log-prob and every entropy.
"""

import ast
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

import pytest
import torch
from golden_case import KINDS, random_batch
from golden_runs import (
    FORMULAS,
    NUM_SEEDS,
    Compared,
    agree,
    formula,
    gradients,
    ours,
    shared_step,
    truth,
    with_proximal,
)
from mutants import NEEDLESS, Mutant, code_mutants, mutants

from swarm.objectives.coefficients import with_advantages
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import Scope

ALLOWED_IMPORTS = {
    "math",
    "cmath",
    "functools",
    "itertools",
    "collections",
    "collections.abc",
    "statistics",
    "torch",
    "golden_case",
}
NEVER_NEGATIVE = {"pass_at_k_grpo", "psr", "a_lol", "ipa"}
ACROSS_TURNS = {"seeupo"}  # a turn that is dropped does not weigh on those before it
NEEDLESS_LABELS = {f"detach gone from {place}" for place in NEEDLESS}


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_has_the_gradient_of_its_formula(name: str) -> None:
    largest = 0.0
    for compared in truth(name):
        for label, step, expected in compared.cases:
            found = ours(compared.recipe, *step)
            print(label)  # pytest shows the last one on failure
            torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-10, atol=1e-14)
            torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-10, atol=1e-14)
            assert found.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-12), label
            largest = max(largest, float(expected.logprobs.abs().max()))
    assert largest > 0, "nothing was compared"


@pytest.mark.parametrize("name", list_recipes())
def test_no_mutant_of_a_recipe_passes_for_it(name: str) -> None:
    """Every change must show, of the recipe or of a variant; INERT names what cannot, with the reason."""
    inert: Mapping[str, str] = getattr(formula(name), "INERT", {})
    unnoticed = {mutant.label for mutant in mutants(load_recipe(name))}
    for compared in truth(name):
        for mutant in mutants(compared.recipe):
            if mutant.label in unnoticed and is_noticed(mutant, compared):
                unnoticed.remove(mutant.label)
    undeclared = {label for label in unnoticed if label not in inert and label.rpartition(" ")[0] not in inert}
    idle = {each for each in inert if each not in unnoticed | {label.rpartition(" ")[0] for label in unnoticed}}
    assert not undeclared, f"{name}: changes that go unnoticed: {undeclared}"
    assert not idle, f"{name}: INERT, but noticed or no change: {idle}"


def test_no_mistake_in_the_code_of_a_part_goes_unnoticed() -> None:
    """A mistake that one recipe cannot show must show in another recipe with the same function."""
    unnoticed, noticed, needless = set[str](), set[str](), set[str]()
    for name in list_recipes():
        compared = truth(name)[0]
        for mutant in code_mutants(compared.recipe, compared.cases[0][1]):
            if mutant.label in NEEDLESS_LABELS:
                needless.add(mutant.label)
            elif mutant.label not in noticed:
                (noticed if is_noticed(mutant, compared) else unnoticed).add(mutant.label)
    assert not unnoticed - noticed
    assert needless == NEEDLESS_LABELS
    assert len(noticed) > 15


def is_noticed(mutant: Mutant, compared: Compared) -> bool:
    """True at the first step on which the mutant disagrees with the formula."""
    with mutant.patched():
        return any(not agree(ours(mutant.recipe, *step), expected, 1e-8) for _, step, expected in compared.cases)


def alone(name: str) -> bool:
    return load_recipe(name).scope.reach <= Scope.ROLLOUT.reach and name not in ACROSS_TURNS


@pytest.mark.parametrize("name", [name for name in list_recipes() if alone(name)])
def test_positive_drops_the_external_tokens_of_negative_advantage_and_changes_no_other(name: str) -> None:
    """The default of `replay.external`; formulas are typed with all tokens, and the step totals keep counting them.

    Beyond a rollout what is dropped changes the coefficients of others.
    """
    compared = truth(name)[0]
    num_dropped = 0
    for label, step, expected in compared.cases:
        batch, logprobs, entropy = step
        batch = with_proximal(compared.recipe, batch, logprobs)
        every = with_advantages(compared.recipe, batch, "all")
        kept = with_advantages(compared.recipe, batch, "positive")
        dropped = every.mask & batch.is_external[:, None] & (every.advantages < 0)
        assert torch.equal(kept.mask, every.mask & ~dropped), label
        found = gradients(compared.recipe, kept, logprobs, entropy)
        wanted = torch.where(dropped, 0.0, expected.logprobs)
        torch.testing.assert_close(found.logprobs, wanted, rtol=1e-10, atol=1e-14)
        num_dropped += int(dropped.sum())
    assert (num_dropped > 0) == (name not in NEVER_NEGATIVE)


def test_every_formula_belongs_to_a_recipe_and_imports_nothing_of_the_package() -> None:
    paths = sorted(FORMULAS.glob("*.py"))
    assert [path.stem for path in paths] == list(list_recipes())
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert set(names) <= ALLOWED_IMPORTS, f"{path.name} imports {names}"


def test_every_constant_is_a_plain_value() -> None:
    for name in list_recipes():
        for _, part in load_recipe(name).parts:
            constants = [getattr(part, field.name) for field in fields(cast("Any", part))]
            assert all(isinstance(value, str | int | float | bool) for value in constants)


def test_no_recipe_and_no_formula_changed_the_steps_that_all_of_them_share() -> None:
    for kind in KINDS:
        for seed in range(NUM_SEEDS):
            (kept, *kept_scores), (made, *made_scores) = shared_step(kind, seed), random_batch(kind, seed)
            for field in fields(made):
                one, other = getattr(kept, field.name), getattr(made, field.name)
                if field.name in ("prompts", "reward_parts") or isinstance(other, torch.Tensor):
                    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
                else:
                    assert one == other, field.name
            torch.testing.assert_close(kept_scores, made_scores, rtol=0, atol=0)
