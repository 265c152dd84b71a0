"""AIPO: the importance-weighted surrogate with the ratio cut from above, and no clip of PPO's kind.

    token mean of -min(pi/mu, 4) A

Written as a surrogate, so a token over the cap has no gradient; LlamaRL's prose treats the cut ratio as a
constant weight instead, which is `cispo` with the same cap. Secondary sources put the paper's cap between 2
and 10. Ours: 4, and no KL or entropy term.
"""

import torch

from swarm.objectives.part import Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupZScore, RatioAtMost, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class OneSidedTruncation(WeightPart):
    """The surrogate with the ratio cut from above, whatever the sign of the advantage; no gradient over the cap."""

    equation = "L_t = -min(r, cap) A"
    cap: RatioAtMost = 4.0

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio = torch.exp(scored.log_ratio)
        return TokenLosses(losses=-ratio.clamp(max=self.cap) * scored.advantages, bounded=ratio > self.cap)


RECIPE = Recipe(
    name="aipo",
    title="LlamaRL: A Distributed Asynchronous Reinforcement Learning Framework for Efficient Large-scale LLM Training",
    acronym="AIPO",
    arxiv="2505.24034",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=OneSidedTruncation(cap=4.0),
    aggregate=TokenMean(),
)
