"""Best of group (Pass@k GRPO): only the best response of a group learns, by its lead over the second best.

    (R_max - R_second) / (std + 1e-6) for the best of a group, 0 for the others; clip .2, token mean

With binary rewards only the single success of a group learns; groups with several successes have no signal.
Ours: the token mean.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_statistics, group_sum, where_signal
from swarm.objectives.recipe import Recipe


class BestOfGroup(AdvantagePart):
    """Lead of the group's best member over the second best, in standard deviations; 0 for all other members.

    If several members are equally good, all get 0.
    """

    equation = "A_best = (R_best - R_second) / (std_G + floor), 0 for all others"
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(group.mean.dtype)
        is_best = rewards >= group.largest
        leads_alone = is_best & (group_sum(is_best.to(rewards.dtype), batch.group_index) == 1)
        below = torch.where(is_best, torch.full_like(rewards, -torch.inf), rewards)
        second = group_statistics(below, batch.group_index).largest
        lead = torch.where(leads_alone, rewards - second, torch.zeros_like(rewards))
        return where_signal(lead / (group.std + self.floor), group, batch.rewards)


RECIPE = Recipe(
    name="pass_at_k_grpo",
    title="Optimizing Language Models for Inference Time Objectives using Reinforcement Learning",
    acronym="pass@k GRPO",
    arxiv="2503.19595",
    verification="code",  # verl `compute_grpo_passk_outcome_advantage`
    advantage=BestOfGroup(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
