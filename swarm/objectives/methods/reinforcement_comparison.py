"""Reinforcement comparison: REINFORCE with a running mean of each prompt's rewards as baseline; no group is needed.

    A = R - remembered mean of the prompt, or the step's mean for a new prompt; clip .2, token mean

The classical baseline, by prompt. Published single-rollout trainers (such as MSSR) refine the baseline with formulas
that we could not obtain; none of them is used here. Ours: the rate, the step's mean for a new prompt, and the clip
for rollouts that are not fresh.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Memory, PositiveShare, Requirement, Scored
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, own_rewards, renewed
from swarm.objectives.recipe import Recipe


class PromptTracker(AdvantagePart):
    """Reward minus the running mean of the prompt's rewards at earlier visits; for a new prompt, the step's mean.

    The running mean does not depend on the rollouts of this step, so that one rollout for each prompt is enough.

    Source: reinforcement comparison, in Williams 1992, doi:10.1007/BF00992696, section 4.
    """

    equation = "A_i = R_i - b(prompt), then b += rate (mean_G - b); b = mean of the step at first"
    always_needs = frozenset({Requirement.REPEATED_PROMPTS, Requirement.ZERO_VARIANCE_GROUPS})
    rate: PositiveShare = 0.2

    def initial(self) -> Memory:
        return {"prompts": {}}

    def __call__(self, batch: Batch) -> Tensor:
        known: Mapping[str, float] = self.remembered(batch)["prompts"]
        rewards = batch.rewards.to(torch.float64)
        usual = float(rewards.mean())
        baselines = [known.get(batch.task_keys[group], usual) for group in batch.group_index.tolist()]
        return (rewards - torch.tensor(baselines, dtype=torch.float64, device=rewards.device)).to(batch.rewards.dtype)

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        known: Mapping[str, float] = memory["prompts"]
        news: dict[str, float] = {}
        for index, key in enumerate(scored.batch.task_keys):
            rewards = own_rewards(scored.batch, index)
            if rewards.numel():
                mean = float(rewards.to(torch.float64).mean())
                before = news.get(key, known.get(key, mean))
                news[key] = before + self.rate * (mean - before)
        return {"prompts": renewed(known, news)}


RECIPE = Recipe(
    name="reinforcement_comparison",
    title="Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
    acronym="reinforcement comparison",
    url="https://doi.org/10.1007/BF00992696",
    verification="ours",
    advantage=PromptTracker(rate=0.2),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
