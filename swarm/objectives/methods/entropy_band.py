"""EPO's entropy bonus, and a penalty where the entropy leaves a band around that of earlier steps.

The penalty counts tokens, so it has no gradient: it shows in the reported loss and moves nothing. What acts is the
bonus. That follows from the released code; nothing was added to make the band pull.

The paper is about agents of many turns: it keeps one history for each turn and applies the penalty in the later
half of them. This is its single-turn form, in which there is one history and the penalty always applies. The
released scripts open the band to 0 and 2; the code's defaults, 0.8 and 1.2, are here. Ours: a penalty of 0.1 on
both sides, of which our notes on the code have 0.05 and 0.1.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.entropy import EntropyBand
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

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
