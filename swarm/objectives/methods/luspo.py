"""LUSPO: GSPO's loss times the length of the response, so that long responses are not discounted.

    GSPO with half-widths 2e-3 / 2.5e-3, each response's loss times its length, mean over responses

With one ratio for each response, the sum of the token losses is this product.

Mechanism: length scaled sequence.
"""

from swarm.objectives.parts import Clip, GroupZScore, RolloutSum, SequenceRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="luspo",
    title="Length-Unbiased Sequence Policy Optimization: Revealing and Controlling Response Length Variation in RLVR",
    acronym="LUSPO",
    arxiv="2602.05261",
    verification="code",
    advantage=GroupZScore(),
    ratio=SequenceRatio(),
    weight=Clip(low=2e-3, high=2.5e-3),
    aggregate=RolloutSum(),
)
