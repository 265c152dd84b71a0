"""Every recipe against its formula, typed a second time in `formulas/`, and against mutants of itself.

Derivation: each formula file quotes its entry of the formula sheet. A formula imports nothing of the
package; gradients are compared in float64, with respect to every log-prob and every entropy.
"""

import ast
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from golden_case import KINDS, Case, case_of, predictions, random_batch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.learn.batch import Batch
from swarm.learn.objective import coefficients, with_advantages
from swarm.learn.part import AggregatePart, Prediction, Scored, TokenLosses, WeightPart
from swarm.learn.recipe import Recipe
from swarm.recipes import list_recipes, load_recipe

FORMULAS = Path(__file__).parent / "formulas"
NUM_SEEDS = 3
ALLOWED_IMPORTS = {"math", "cmath", "itertools", "collections", "collections.abc", "statistics", "torch", "golden_case"}


def formula(name: str) -> ModuleType:
    """`formulas/<name>.py`: `loss(case)`; optionally MEMORY, INERT and NUM_SEEDS (more random steps)."""
    path = FORMULAS / f"{name}.py"
    assert path.is_file(), f"recipe {name} has no formula: write {path.name} with loss(case)"
    spec = importlib.util.spec_from_file_location(f"golden_formula_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Gradients:
    loss: float
    logprobs: Tensor
    entropy: Tensor


def typed(loss: Callable[[Case], Tensor], batch: Batch, logprobs: Tensor, entropy: Tensor) -> Gradients:
    leaves = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
    value = loss(case_of(batch, *leaves))
    found = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else (None, None)
    by_logprob, by_entropy = (torch.zeros_like(logprobs) if each is None else each for each in found)
    return Gradients(float(value.detach()), by_logprob, by_entropy)


def ours(recipe: Recipe, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Gradients:
    found = coefficients(recipe, with_advantages(recipe, batch, "all"), logprobs, entropy, probed(recipe, batch))
    return Gradients(found.loss, found.logprobs, torch.zeros_like(entropy) if found.entropy is None else found.entropy)


def probed(recipe: Recipe, batch: Batch) -> dict[str, Tensor]:
    """What the recipe's probes say of the step's hidden states and logits: name -> [N, L]."""
    (hidden, logits), mask = predictions(batch), batch.mask
    temperature = batch.temperature.double()[:, None].expand(mask.shape)
    seen = Prediction(
        hidden=hidden[mask], logits=logits[mask], targets=batch.token_ids[mask], temperature=temperature[mask]
    )
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    return {name: zeros.masked_scatter(mask, probe(seen)) for name, probe in recipe.probes.items()}


def agree(a: Gradients, b: Gradients, tolerance: float) -> bool:
    def close(x: Tensor, y: Tensor) -> bool:
        return torch.allclose(x, y, rtol=tolerance, atol=tolerance * 1e-3)

    is_same_loss = abs(a.loss - b.loss) <= tolerance * (1e-3 + abs(b.loss))
    return is_same_loss and close(a.logprobs, b.logprobs) and close(a.entropy, b.entropy)


def steps(module: ModuleType) -> Iterator[tuple[str, tuple[Batch, Tensor, Tensor]]]:
    for kind in KINDS:
        for seed in range(getattr(module, "NUM_SEEDS", NUM_SEEDS)):
            yield f"{kind}, seed {seed}", random_batch(kind, seed, getattr(module, "MEMORY", None))


@pytest.mark.parametrize("name", list_recipes())
def test_a_recipe_has_the_gradient_of_its_formula(name: str) -> None:
    module, recipe = formula(name), load_recipe(name)
    largest = 0.0
    for label, step in steps(module):
        expected, found = typed(module.loss, *step), ours(recipe, *step)
        print(label)  # pytest shows the last one on failure
        torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-10, atol=1e-14)
        assert found.loss == pytest.approx(expected.loss, rel=1e-9, abs=1e-12), label
        largest = max(largest, float(expected.logprobs.abs().max()))
    assert largest > 0, "nothing was compared"


@pytest.mark.parametrize("name", list_recipes())
def test_no_mutant_of_a_recipe_passes_for_it(name: str) -> None:
    """A sign, a normaliser or a constant changed must show; INERT names constants that cannot, with the reason."""
    module, recipe = formula(name), load_recipe(name)
    inert: Mapping[str, str] = getattr(module, "INERT", {})
    batches = [step for _, step in steps(module)]
    truth = [typed(module.loss, *step) for step in batches]
    noticed: dict[str, bool] = {}
    for label, mutant in mutants(recipe):
        is_same = all(_same(mutant, step, expected) for step, expected in zip(batches, truth, strict=True))
        noticed[label] = noticed.get(label, False) or not is_same
    survivors = {label for label, was_noticed in noticed.items() if not was_noticed}
    assert survivors == set(inert), (
        f"{name}: changes that go unnoticed, and changes declared to: {survivors ^ set(inert)}"
    )


def _same(mutant: Recipe, step: tuple[Batch, Tensor, Tensor], expected: Gradients) -> bool:
    try:
        return agree(ours(mutant, *step), expected, 1e-8)
    except ConfigError:
        return False


def mutants(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The recipe with one thing changed."""
    yield "sign", replace(recipe, weight=_Negated(inner=recipe.weight))
    yield "normaliser", replace(recipe, aggregate=_Scaled(inner=recipe.aggregate))
    for slot in ("rewards", "shapers", "corrections", "terms"):
        chosen = getattr(recipe, slot)
        for index in range(len(chosen)):
            rest = chosen[:index] + chosen[index + 1 :]
            yield f"without {slot}.{type(chosen[index]).__name__}", replace(recipe, **{slot: rest})
    for address, value in recipe.constants.items():
        if address.startswith("prompts."):
            continue  # what is asked is no part of the loss: tests/unit/test_parts_prompts
        if isinstance(value, bool):
            yield from _changed(recipe, address, not value)
        elif isinstance(value, int):
            yield from _changed(recipe, address, value + 1)
        elif isinstance(value, float):
            yield from _changed(recipe, address, value * 1.37 + 0.011)
            yield from _changed(recipe, address, value * 0.71 if value else 1.5)


def _changed(recipe: Recipe, address: str, value: Any) -> Iterator[tuple[str, Recipe]]:
    try:
        yield address, recipe.with_params({address: value})
    except ConfigError:
        return  # refused, so nobody can make this mistake


@dataclass(frozen=True, kw_only=True, slots=True)
class _Negated(WeightPart):
    equation = "-L"
    inner: WeightPart

    def __call__(self, scored: Scored) -> TokenLosses:
        found = self.inner(scored)
        return TokenLosses(losses=-found.losses, bounded=found.bounded)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scaled(AggregatePart):
    equation = "1.01 L"
    inner: AggregatePart

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return 1.01 * self.inner(losses, scored)


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
            assert all(isinstance(getattr(part, field.name), str | int | float | bool) for field in fields(part))
