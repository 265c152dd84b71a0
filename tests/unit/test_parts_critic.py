"""The probe on the policy's own states, fitted step by step, against a regression over everything it saw.

Derivation: with decay near 1 the fit is the ridge regression over all steps; a reward that the states give
away must be predicted, and never from a rollout's own response.
"""

import json
from dataclasses import replace

import torch
from torch import Tensor

from swarm.objectives.methods.poise import CrossBaseline, project
from swarm.objectives.part import Memory, Prediction, Scored
from swarm.testing.batches import toy_batch, toy_scored

NUM_GROUPS, LENGTH = 6, 3


def step(seed: int, part: CrossBaseline, memory: Memory) -> Scored:
    """Pairs of rollouts; the reward of both is a linear function of the first direction's value at the prompt."""
    generator = torch.Generator().manual_seed(seed)
    count = 2 * NUM_GROUPS
    mask = torch.ones(count, LENGTH, dtype=torch.bool)
    level = torch.rand(NUM_GROUPS, generator=generator, dtype=torch.float64).repeat_interleave(2)
    probes = {
        name: torch.randn(count, LENGTH, generator=generator, dtype=torch.float64) for name in sorted(part.probes)
    }
    probes["direction_0"][:, 0] = level
    batch = toy_batch(
        0.2 + 0.5 * level,
        mask,
        groups=torch.arange(NUM_GROUPS).repeat_interleave(2),
        memory={"CrossBaseline": json.loads(json.dumps(memory))},
    )
    entropy = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    return toy_scored(batch, entropy=entropy, probes=probes)


def after(part: CrossBaseline, steps: int) -> Memory:
    memory = part.initial()
    for seed in range(steps):
        memory = part.observe(json.loads(json.dumps(memory)), step(seed, part, memory))
    return memory


def test_a_reward_that_the_states_give_away_leaves_no_advantage() -> None:
    part = CrossBaseline(directions=2, ridge=1e-9)
    fresh = part(step(99, part, part.initial()))
    assert torch.allclose(fresh, torch.zeros_like(fresh)), "at first the other's reward, which here is the same"
    memory = after(part, 8)
    unequal = step(99, part, memory)
    lifted = unequal.batch.rewards.clone()
    lifted[::2] += 1.0
    advantages = part(replace(unequal, batch=replace(unequal.batch, rewards=lifted)))
    expected = torch.tensor([1.0, 0.0] * NUM_GROUPS, dtype=torch.float64)[:, None].expand(advantages.shape)
    assert torch.allclose(advantages, expected, atol=1e-4), "the other's luck is no part of the baseline"


def test_the_baseline_does_not_see_the_own_response() -> None:
    part = CrossBaseline(directions=2)
    scored = step(5, part, after(part, 3))
    changed = {name: values.clone() for name, values in scored.probes.items()}
    for values in changed.values():
        values[0] += 3.0
    before, now = part(scored), part(replace(scored, probes=changed))
    assert torch.allclose(before[0], now[0], atol=1e-12) and not torch.allclose(before[1], now[1], atol=1e-6)


def test_older_steps_fade_by_the_decay() -> None:
    part = CrossBaseline(directions=1, decay=0.5)
    first = part.observe(part.initial(), step(0, part, part.initial()))
    alone = part.observe(part.initial(), step(1, part, part.initial()))
    both = part.observe(first, step(1, part, first))
    for name in ("gram", "moment"):
        old, new, joined = (torch.tensor(memory[name]) for memory in (first, alone, both))
        assert torch.allclose(joined, new + 0.5 * old)
    assert both["rewards"] == [
        min(first["rewards"][0], alone["rewards"][0]),
        max(first["rewards"][1], alone["rewards"][1]),
    ]


def test_a_memory_of_other_constants_is_left_alone() -> None:
    part = CrossBaseline(directions=2)
    external = after(CrossBaseline(directions=3), 2)
    scored = step(7, part, external)
    assert torch.equal(part(scored), part(step(7, part, part.initial())))
    assert part.observe(external, scored) == part.observe(part.initial(), scored)


def test_a_group_of_one_gets_no_advantage_and_teaches_nothing() -> None:
    part = CrossBaseline(directions=1)
    memory = after(part, 2)
    alone = step(3, part, memory)
    alone = replace(alone, batch=replace(alone.batch, group_index=torch.arange(2 * NUM_GROUPS)))
    assert not part(alone).any()
    assert part.observe(memory, alone) == memory


def test_a_direction_depends_on_its_number_alone() -> None:
    def seen(hidden: Tensor) -> Prediction:
        count = len(hidden)
        return Prediction(
            hidden=hidden,
            logits=torch.zeros(count, 2),
            targets=torch.zeros(count, dtype=torch.int64),
            temperature=torch.ones(count),
        )

    hidden = torch.randn(5, 7)
    chunks = torch.cat([project(seen(hidden[:2]), 3), project(seen(hidden[2:].bfloat16().float()), 3)])
    assert torch.allclose(project(seen(hidden), 3), chunks, atol=0.05)
    assert not torch.allclose(project(seen(hidden), 3), project(seen(hidden), 4), atol=0.05)
