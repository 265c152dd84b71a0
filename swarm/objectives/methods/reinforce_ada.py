"""Reinforce-Ada (balanced): a prompt is answered again until its answers are mixed; a balanced few of them are used.

    A = R - mean of the pool, on at most 4 of it (2 right, 2 wrong, filled up); clip .2/.28, dual 10

The baseline is the mean of every answer drawn. A group therefore contains its whole pool, of up to four group sizes.
Ours: with graded rewards the mean is that of the rewards themselves; a pool of one response gets 0.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Bound, Count, PromptPart, Requirement
from swarm.objectives.parts import Clip, KeptTokenMean, TokenRatio, group_centred
from swarm.objectives.recipe import Recipe


def kept_of_pool(is_right: list[bool], keep: int) -> list[int]:
    """Returns sorted indices of at most `keep` answers: the first right and first wrong ones, half each if possible."""
    right = [place for place, each in enumerate(is_right) if each]
    wrong = [place for place, each in enumerate(is_right) if not each]
    num_right = min(keep // 2, len(right))
    num_wrong = min(keep - num_right, len(wrong))
    num_right = min(keep - num_wrong, len(right))
    return sorted(right[:num_right] + wrong[:num_wrong])


class KeptOfPool(AdvantagePart):
    """Reward minus the mean of all responses to the prompt, on a balanced selection; the others are dropped.

    The released code counts right answers as 1 and wrong ones as 0 in the mean, the same for binary rewards.

    Source: Reinforce-Ada, arXiv:2510.04996; RLHFlow/Reinforce-Ada (`global_stat_est`, no division by the
    deviation, as in its script).
    """

    equation = "A_i = R_i - mean of the pool, on keep/2 right and keep/2 wrong responses; the rest drop"
    keep: Annotated[int, Bound(at_least=2)] = 4
    right: float = 0.7  # a reward above it counts as right

    def __call__(self, batch: Batch) -> Tensor:
        centred = group_centred(batch.rewards, batch.group_index)
        is_kept = torch.zeros_like(batch.rewards, dtype=torch.bool)
        for group in batch.group_index.unique().tolist():
            members = torch.nonzero(batch.group_index == group).flatten()
            is_right = (batch.rewards[members] > self.right).tolist()
            is_kept[members[kept_of_pool(is_right, self.keep)]] = True
        return torch.where(is_kept, centred, torch.nan)


class SuccessiveElimination(PromptPart):
    """Asks a prompt again, a group at a time, until its answers are mixed enough or a limit is reached.

    The rule "balanced" wants keep/2 right and keep - keep/2 wrong answers, the rule "positive" one right answer. All
    responses form one group, so that every node can check and compare them; the advantage (`KeptOfPool`) selects
    those that are learned from.

    Source: Reinforce-Ada, arXiv:2510.04996 Algorithm 1; RLHFlow/Reinforce-Ada `verl/trainer/ppo/ray_trainer.py`.
    """

    equation = "again while rounds < 4 and not (#right >= keep/2 and #wrong >= keep - keep/2)"
    always_needs = frozenset({Requirement.VARIED_GROUPS})
    rounds: Count = 4
    keep: Annotated[int, Bound(at_least=2)] = 4  # responses learned from
    right: float = 0.7  # a reward above it counts as right
    rule: Literal["balanced", "positive"] = "balanced"

    def missing(self, rewards: Sequence[float], group_size: int, largest: int) -> int:
        num_right = sum(reward > self.right for reward in rewards)
        num_wrong = len(rewards) - num_right
        if self.rule == "balanced":
            is_enough = num_right >= self.keep // 2 and num_wrong >= self.keep - self.keep // 2
        else:
            is_enough = num_right >= 1
        limit = min(self.rounds * group_size, largest)
        return 0 if is_enough else max(0, min(group_size, limit - len(rewards)))


RECIPE = Recipe(
    name="reinforce_ada",
    title="Reinforce-Ada: An Adaptive Sampling Framework for Reinforce-Style LLM Training",
    acronym="Reinforce-Ada",
    arxiv="2510.04996",
    verification="code",
    advantage=KeptOfPool(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28, dual=10.0),  # clip_ratio_c of the released script
    aggregate=KeptTokenMean(),
    prompts=SuccessiveElimination(),
)
