"""EPO's entropy band: a bonus that a penalty holds within a band around the entropy of earlier steps.

The paper is about agents of many turns: it keeps one history for each turn and applies the penalty in the later
half of them. This is its single-turn form, in which there is one history and the penalty always applies. The
released scripts open the band to 0 and 2; the code's defaults, 0.8 and 1.2, are here.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupZScore
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import TokenRatio
from swarm.parts.term.entropy import EntropyBand
from swarm.parts.weight.clip import Clip

RECIPE = Recipe(
    name="entropy_band",
    title="EPO: Entropy-regularized Policy Optimization for LLM Agents Reinforcement Learning",
    acronym="EPO",
    arxiv="2509.22576",
    row="S081",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2, dual=3.0),
    aggregate=TokenMean(),
    terms=(EntropyBand(),),
)
