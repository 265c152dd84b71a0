"""The perturbed policy of an update: where the noise is, where it is not, and how its size is learned."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.config import LearnerConfig, ReplayConfig
from swarm.errors import ConfigError
from swarm.learn.gradient import score_batch
from swarm.learn.layer_noise import LayerNoise, layers_of
from swarm.learn.learner import PolicyLearner
from swarm.learn.packing import pack
from swarm.learn.ranks import OneProcess
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.coefficients import with_advantages
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.methods import load_recipe
from swarm.objectives.methods.minirl import DetachedRatio
from swarm.objectives.part import Noise, RatioPart, Requirement, Scope, Scored
from swarm.objectives.recipe import Recipe
from swarm.testing.builders import make_group, make_scored
from swarm.types import Draw, DrawnGroup

TOKENIZER, OWN = CharTokenizer(), "a" * 64
TOKENS = torch.arange(1, 9)[None]


def draw(step: int) -> Draw:
    rng = np.random.default_rng(step)
    texts = [["".join(rng.choice(list("abcdefgh"), int(rng.integers(1, 7)))) for _ in range(4)] for _ in range(6)]
    groups = [
        make_scored(
            make_group(OWN, task_id=index, tokenizer=TOKENIZER, texts=found), rewards=[1.0, 0.0, 0.0, float(index % 2)]
        )
        for index, found in enumerate(texts)
    ]
    return Draw(step=step, groups=tuple(DrawnGroup(scored=g, age_steps=0, use=1) for g in groups), num_zero_variance=0)


def learner(
    dir: Path, recipe: str | Recipe, dtype: torch.dtype = torch.float32, network: Any = None, **config: Any
) -> PolicyLearner:
    network = network or tiny_network(seed=1).to(dtype)
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    settings = LearnerConfig.model_validate({"learning_rate": 1e-3, **config})
    return PolicyLearner(network, TOKENIZER, chosen, settings, ReplayConfig(), OWN, dir).resume()


def inputs_of_layers(network: torch.nn.Module) -> list[Tensor]:
    """The inputs of each layer, after hooks that were there before."""
    seen: list[Tensor] = []
    handles = [layer.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for layer in layers_of(network)]
    with torch.no_grad():
        network(TOKENS, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def test_every_layer_gets_noise_of_its_own_deviation_and_nothing_stays_behind() -> None:
    network = tiny_network(seed=1)
    noise = LayerNoise(network, Noise(std=0.5, rate=0.0), OneProcess())
    with torch.no_grad():
        noise.log_std[1] = math.log(1e-6)
    plain = inputs_of_layers(network)
    with noise.perturb(0):
        noisy = inputs_of_layers(network)
    added = noisy[0] - plain[0]
    assert 0.4 < float(added.std()) < 0.6 and abs(float(added.mean())) < 0.1
    assert float((added - added[:, :1]).abs().min(dim=2).values[:, 1:].max()) > 0, "every token has its own"
    with noise.perturb(0):
        network.base_model.layers[0].register_forward_hook(lambda *_: plain[1])  # type: ignore[reportAttributeAccess]
        assert float((inputs_of_layers(network)[1] - plain[1]).abs().max()) < 1e-5, "the second layer's is tiny"
    fresh = inputs_of_layers(network)
    assert torch.equal(fresh[0], plain[0]), "the noise outlived its pass"


def test_the_noise_is_that_of_the_update_and_the_micro_batch() -> None:
    network = tiny_network(seed=1)
    noise = LayerNoise(network, Noise(std=0.5, rate=0.1), OneProcess())

    def found(part: int) -> Tensor:
        with noise.perturb(part):
            return inputs_of_layers(network)[0]

    first = found(0)
    assert torch.equal(found(0), first) and not torch.equal(found(1), first)
    noise.log_std.grad = torch.zeros_like(noise.log_std)
    noise.step()
    assert noise.num_updates == 1 and not torch.equal(found(0), first)


class Plain(RatioPart):
    """Ratio 1 under noise: with `DetachedRatio` the loss is linear in log pi."""

    equation = "r = 1"
    # Beyond a rollout everything is scored before the first backward pass, under the same noise.
    scope: Scope  # pyright: ignore[reportIncompatibleVariableOverride] - a field: tests vary it

    @property
    def noise(self) -> Noise:
        return Noise(std=0.3, rate=0.01)

    def __call__(self, scored: Scored) -> Tensor:
        return torch.zeros_like(scored.logprobs)


@pytest.mark.parametrize("scope", [Scope.TOKEN, Scope.STEP])
def test_the_gradient_of_each_deviation_is_that_of_the_loss(tmp_path: Path, scope: Scope) -> None:
    ratio: Any = Plain(scope=scope)
    recipe = dataclasses.replace(load_recipe("grpo"), ratio=ratio, weight=DetachedRatio())
    one = learner(tmp_path, recipe, torch.float64)
    batch = with_advantages(recipe, make_batch(draw(1), one._tokenizer), "all")
    plan, noise = one._pack(batch, recipe.scope), one._noise
    assert noise is not None and len(plan) > 1

    def loss() -> float:
        found, _ = one._gradient(recipe).of(batch, plan)
        one._optimizer.discard()
        return found

    loss()
    assert noise.log_std.grad is not None
    found = noise.log_std.grad.tolist()
    for layer, expected in enumerate(found):
        sides: list[float] = []
        for change in (1e-3, -1e-3):
            with torch.no_grad():
                noise.log_std[layer] += change
            sides.append(loss())
            with torch.no_grad():
                noise.log_std[layer] -= change
        assert (sides[0] - sides[1]) / 2e-3 == pytest.approx(expected, rel=2e-3, abs=1e-6)
    assert max(map(abs, found)) > 1e-4


def test_only_the_numerator_is_perturbed_and_only_in_an_update(tmp_path: Path) -> None:
    one = learner(tmp_path, "alp")
    batch = make_batch(draw(1), one._tokenizer)
    plan = pack(batch, 100_000)
    plain = score_batch(one._network, batch, plan).logprobs
    assert one._noise is not None
    noisy = score_batch(one._network, batch, plan, noise=one._noise).logprobs
    again = score_batch(one._network, batch, plan, noise=one._noise).logprobs
    assert torch.equal(noisy, again) and not torch.equal(noisy, plain)
    assert torch.equal(score_batch(one._network, batch, plan).logprobs, plain)


def test_deviations_are_learned_saved_and_never_published(tmp_path: Path) -> None:
    one = learner(tmp_path, "alp")
    names = set(one.snapshot()[1])
    assert names == set(learner(tmp_path / "other", "grpo").snapshot()[1])
    for step in (1, 2):
        one.step(draw(step))
    assert one._noise is not None and one._noise.num_updates == 2
    learned = one._noise.log_std.tolist()
    assert all(abs(value - math.log(0.02)) > 1e-4 for value in learned)
    one.save()
    resumed = learner(tmp_path, "alp")
    assert resumed._noise is not None and resumed._noise.log_std.tolist() == learned
    assert resumed._noise.num_updates == 2


def test_a_skipped_update_leaves_the_deviations_as_they_were(tmp_path: Path) -> None:
    one = learner(tmp_path, "alp")
    hook = next(one._network.parameters()).register_hook(lambda gradient: gradient * float("nan"))
    assert one.step(draw(1)).was_skipped
    hook.remove()
    assert one._noise is not None and one._noise.num_updates == 0 and one._noise.log_std.grad is None


def test_a_step_with_the_safe_recipe_has_no_noise(tmp_path: Path) -> None:
    plain = learner(tmp_path / "a", "grpo").step(draw(1))
    guarded = learner(tmp_path / "b", "alp").step(draw(1), recipe=load_recipe("grpo"))
    assert guarded.loss == plain.loss and guarded.grad_norm == plain.grad_norm


def test_a_network_without_a_list_of_layers_is_refused(tmp_path: Path) -> None:
    network: Any = tiny_network(seed=1)
    network.config.num_hidden_layers = 7
    with pytest.raises(ConfigError, match="no list of 7 layers whose input could be perturbed"):
        LayerNoise(network, Noise(std=0.1, rate=0.1), OneProcess())
    with pytest.raises(ConfigError, match="no list of 7 layers"):
        learner(tmp_path, "alp", network=network)


def test_constants_and_needs_of_the_recipe() -> None:
    assert Requirement.PERTURBED_LOGPROBS in load_recipe("alp").needs
    with pytest.raises(ConfigError, match="must be above 0"):
        load_recipe("alp", {"ratio.std": 0.0})
