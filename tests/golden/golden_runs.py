"""Gradients of a recipe and of its formula on the same random steps; shared by the tests of gradients and of mutants.

A formula file has `loss(case)` and may have
    MEMORY: memory of stateful parts, or a list of memories that the seeds take in turn;
    NUM_SEEDS: more random steps;
    VARIANTS: [(overrides of constants, their loss(case))], for constants that the defaults hardly show;
    INERT: {change: reason} for changes of the recipe that cannot show.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from golden_case import KINDS, Case, case_of, predictions, random_batch
from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.methods import load_recipe
from swarm.objectives.part import Prediction
from swarm.objectives.recipe import Recipe

FORMULAS = Path(__file__).parent / "formulas"
NUM_SEEDS = 3

Step = tuple[Batch, Tensor, Tensor]
"""Batch, log pi [N, L] and entropy [N, L]."""


@dataclass(frozen=True)
class Gradients:
    """Gradients of a loss by log-probs [N, L] and entropies [N, L]."""

    loss: float
    logprobs: Tensor
    entropy: Tensor


@functools.cache
def formula(name: str) -> ModuleType:
    """`formulas/<name>.py`."""
    path = FORMULAS / f"{name}.py"
    assert path.is_file(), f"recipe {name} has no formula: write {path.name} with loss(case)"
    spec = importlib.util.spec_from_file_location(f"golden_formula_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Compared:
    """A recipe with some constants replaced, and its formula's gradients on every step: (label, step, gradients)."""

    recipe: Recipe
    cases: list[tuple[str, Step, Gradients]]


@functools.cache
def truth(name: str) -> tuple[Compared, ...]:
    """The recipe as it is and its variants: typed once, compared with the recipe and with each of its mutants."""
    module = formula(name)
    variants = (({}, module.loss), *getattr(module, "VARIANTS", ()))
    every = list(_steps(module))
    return tuple(
        Compared(
            load_recipe(name, overrides),
            [(f"{overrides or ''} {label}", step, typed(loss, *step)) for label, step in every],
        )
        for overrides, loss in variants
    )


def _steps(module: ModuleType) -> Iterator[tuple[str, Step]]:
    memory = getattr(module, "MEMORY", None)
    memories = memory if isinstance(memory, list) else [memory]
    for kind in KINDS:
        for seed in range(getattr(module, "NUM_SEEDS", NUM_SEEDS)):
            given = memories[seed % len(memories)]
            yield f"{kind}, seed {seed}", random_batch(kind, seed, given) if given else shared_step(kind, seed)


shared_step = functools.cache(random_batch)


def typed(loss: Callable[[Case], Tensor], batch: Batch, logprobs: Tensor, entropy: Tensor) -> Gradients:
    """The gradient of a formula."""
    leaves = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
    value = loss(case_of(batch, *leaves))
    found = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else (None, None)
    by_logprob, by_entropy = (torch.zeros_like(logprobs) if each is None else each for each in found)
    return Gradients(float(value.detach()), by_logprob, by_entropy)


def ours(recipe: Recipe, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Gradients:
    """The gradient of a recipe that learns from all external tokens."""
    batch = with_proximal(recipe, batch, logprobs)
    return gradients(recipe, with_advantages(recipe, batch, "all"), logprobs, entropy)


def with_proximal(recipe: Recipe, batch: Batch, logprobs: Tensor) -> Batch:
    """The batch with pi as pi_old where the recipe's advantages take it, as the learner scores it."""
    is_missing = recipe.needs_proximal_first and batch.proximal_logprobs is None
    return replace(batch, proximal_logprobs=logprobs) if is_missing else batch


def gradients(recipe: Recipe, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Gradients:
    """The gradient of a recipe on a batch that has its advantages."""
    if recipe.needs_proximal_first and batch.proximal_logprobs is None:  # as the learner does
        batch = replace(batch, proximal_logprobs=logprobs)
    found = coefficients(recipe, batch, logprobs, entropy, probed(recipe, batch))
    return Gradients(found.loss, found.logprobs, torch.zeros_like(entropy) if found.entropy is None else found.entropy)


def probed(recipe: Recipe, batch: Batch) -> dict[str, Tensor]:
    """Results of the recipe's probes on the step's hidden states and logits: name -> [N, L]."""
    if not recipe.probes:
        return {}
    (hidden, logits), mask = predictions(batch), batch.mask
    temperature = batch.temperature.double()[:, None].expand(mask.shape)
    seen = Prediction(
        hidden=hidden[mask], logits=logits[mask], targets=batch.token_ids[mask], temperature=temperature[mask]
    )
    zeros = torch.zeros(mask.shape, dtype=torch.float64)
    return {name: zeros.masked_scatter(mask, probe(seen)) for name, probe in recipe.probes.items()}


def agree(a: Gradients, b: Gradients, tolerance: float) -> bool:
    """Equal up to that relative tolerance, in loss and in every coefficient."""

    def close(x: Tensor, y: Tensor) -> bool:
        return torch.allclose(x, y, rtol=tolerance, atol=tolerance * 1e-3)

    is_same_loss = abs(a.loss - b.loss) <= tolerance * (1e-3 + abs(b.loss))
    return is_same_loss and close(a.logprobs, b.logprobs) and close(a.entropy, b.entropy)
