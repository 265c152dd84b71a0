"""Geometric masked mismatch (seq-mask-tis of OpenRLHF): responses kept or dropped by their mismatch, tokens weighted.

    rho on PPO's clip around pi_old, exp(mean log rho) in [.5, 5], token mean

The whole response is kept or dropped by its length-normalised mismatch. Ours: GRPO's clip around the start of the
update and a token mean as the host.
"""

from swarm.objectives.parts import Clip, GeometricRejection, GroupZScore, Mismatch, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="seq_mask_tis",
    title="OpenRLHF: An Easy-to-use, Scalable and High-performance RLHF Framework",
    acronym="seq-mask-tis",
    arxiv="2405.11143",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(GeometricRejection(low=0.5, high=5.0), Mismatch()),
    aggregate=TokenMean(),
)
