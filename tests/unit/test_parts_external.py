"""Reach of another node in a step: its claims reach neither our rewards, nor our memory, nor others' tokens."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.methods import load_recipe
from swarm.objectives.methods.bnpo import BetaNormalised
from swarm.objectives.methods.correct_likelihood import CorrectLikelihood
from swarm.objectives.methods.dcpo import CumulativeScore
from swarm.objectives.methods.gpg import SignalScaled
from swarm.objectives.methods.hapo_history import HistoryLength
from swarm.objectives.methods.reinforce_ada import KeptTokenMean
from swarm.objectives.methods.reinforce_plus_plus import WhitenedGroupCentred
from swarm.objectives.methods.reinforcement_comparison import PromptTracker
from swarm.objectives.methods.spear import RecalibratedReplay
from swarm.objectives.methods.st_ppo import BiasNormalisedClip
from swarm.objectives.part import Part, Requirement
from swarm.objectives.parts.advantage import BatchDeviation, WhitenedReturn
from swarm.testing.batches import toy_batch, toy_scored

LENGTH = 3
EXTERNAL = torch.tensor([False, False, True, True])


def step(rewards: list[float], external: Tensor = EXTERNAL) -> Batch:
    """Groups of two rollouts of three tokens, all at log-prob -1 under every policy; of one prompt each."""
    count = len(rewards)
    mask = torch.ones(count, LENGTH, dtype=torch.bool)
    same = -torch.ones(mask.shape, dtype=torch.float64)
    return toy_batch(
        rewards,
        mask,
        groups=torch.arange(count) // 2,
        is_external=external,
        sources=("a", "b", "c")[: count // 2],
        proximal_logprobs=same.clone(),
        reference_logprobs=same.clone(),
    )


def test_a_peer_cannot_write_its_own_reward_by_what_it_says_of_its_log_probs() -> None:
    honest = step([1.0, 0.0, 1.0, 0.0])
    claims = honest.behavior_logprobs.clone()
    claims[3, 1] = -100.0
    advantages = WhitenedReturn(kl=0.01)
    assert torch.equal(advantages(replace(honest, behavior_logprobs=claims)), advantages(honest))
    assert Requirement.PROXIMAL_LOGPROBS in advantages.needs and load_recipe("reinforce_plus_plus").needs_proximal_first


def test_the_penalty_in_a_reward_is_of_our_own_two_policies_and_bounded() -> None:
    moved = step([1.0, 1.0, 1.0, 1.0])
    policy = torch.full(moved.mask.shape, -1.0, dtype=torch.float64)
    policy[0], policy[1, 2] = -0.5, 1e6
    found = WhitenedReturn(kl=0.01)(replace(moved, proximal_logprobs=policy))
    returns = torch.ones(moved.mask.shape, dtype=torch.float64)
    returns[0] = torch.tensor([1 - 0.015, 1 - 0.01, 1 - 0.005])
    returns[1] = 1 - 0.2
    expected = (returns - returns.mean()) / returns.std()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_clipped_token_shrinks_the_step_no_more_whatever_its_generator_says() -> None:
    part = BiasNormalisedClip(low=0.2, high=0.2, reference=0.05)
    batch = step([1.0, 0.0, 1.0, 0.0])
    batch = replace(batch, advantages=torch.ones_like(batch.advantages))
    sizes = []
    for claim in (math.log(1.5), 15.0, 20.0):
        log_ratio = torch.zeros(batch.mask.shape, dtype=torch.float64)
        log_ratio[2, 0] = claim
        sizes.append(float(part(toy_scored(batch, log_ratio=log_ratio)).losses[0, 0]))
    assert sizes[1] == sizes[2] == pytest.approx(sizes[0])
    assert sizes[0] == pytest.approx(-1 / (1.4 / 3 / math.sqrt(4) / 0.05))


@pytest.mark.parametrize("part", [CumulativeScore(), PromptTracker(), HistoryLength(), RecalibratedReplay()])
def test_what_another_node_chose_to_send_is_not_remembered(part: Part) -> None:
    batch = step([1.0, 0.0, 1.0, 1.0])
    own = batch.select([0, 1])
    assert (
        part.observe(part.initial(), toy_scored(batch))
        == part.observe(part.initial(), toy_scored(own))
        != part.initial()
    )
    alone = step([1.0, 0.0], external=torch.ones(2, dtype=torch.bool))
    assert part.observe(part.initial(), toy_scored(alone)) == part.initial()


def test_successes_of_an_external_group_count_although_its_failures_are_left_out() -> None:
    recipe, batch = load_recipe("drpo"), step([1.0, 0.0, 1.0, 0.0])
    scores = torch.full(batch.mask.shape, -1.0, dtype=torch.float64), torch.ones(batch.mask.shape, dtype=torch.float64)
    found = {
        rule: coefficients(recipe, with_advantages(recipe, batch, rule), *scores).logprobs
        for rule in ("all", "positive")
    }
    assert bool((found["positive"][2] < 0).all()) and not found["positive"][3].any()
    assert torch.equal(found["positive"][:3], found["all"][:3])


@pytest.mark.parametrize("name", ["kept", "likelihood"])
def test_a_share_of_a_step_counts_as_much_as_its_tokens(name: str) -> None:
    """Two recipes of one step, each with half of its groups, and the one recipe of the whole of it."""
    batch = step([1.0, 1.0, 1.0, 1.0])
    part = replace(batch.of_groups([0])[1], step_tokens=batch.step_tokens, step_rollouts=4, step_groups=2)

    def value(of: Batch) -> float:
        scored = toy_scored(of)
        found = KeptTokenMean()(scored.logprobs, scored) if name == "kept" else CorrectLikelihood()(scored)
        return float(found)

    assert value(batch) != 0.0
    assert value(part) == pytest.approx(value(batch) / 2)


@pytest.mark.parametrize("part", [SignalScaled(), BetaNormalised(), WhitenedGroupCentred(), BatchDeviation()])
def test_statistics_of_the_step_want_groups_that_are_all_equal(part: Part) -> None:
    assert Requirement.ZERO_VARIANCE_GROUPS in part.needs


def test_a_reward_for_the_form_of_an_answer_is_tapered_like_none() -> None:
    recipe = load_recipe("topr_token")
    batch = step([1.0, 0.0, 1.0, 0.01], external=torch.zeros(4, dtype=torch.bool))
    far = batch.behavior_logprobs + 5.0
    ready = replace(with_advantages(recipe, batch, "all"), behavior_logprobs=far)
    found = coefficients(recipe, ready, far - 5.0, torch.zeros_like(far)).logprobs
    pull = -ready.advantages / batch.step_tokens
    torch.testing.assert_close(found[3], math.exp(-5) * pull[3])
    torch.testing.assert_close(found[2], pull[2])
