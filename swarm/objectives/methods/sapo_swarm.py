"""Swarm sampling (SAPO), as published: external rollouts are encoded as if generated here.

    token mean of -min(r A, clip(r, .8, 1.28) A), r against the consumer's own old log-probs

The recipe needs no log-probs of the generator: the "old" log-probs are the learner's own snapshot, so the ratio is 1
if a batch gets a single update. The mismatch to the generator stays uncorrected by design; diagnostics measure the
mismatch, and limits on age and effective sample size bound it.
"""

from swarm.objectives.parts import Clip, GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="sapo_swarm",
    title="Sharing is Caring: Efficient LM Post-Training with Collective RL Experience Sharing",
    acronym="SAPO (swarm)",
    arxiv="2509.08721",
    verification="secondary",
    advantage=GroupZScore(floor=1e-8),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
