"""Turn ratio (AT2PO's turn-level ratio): GSPO by turn of a multi-turn response instead of by the whole response.

    (1/N) sum_i (1/|o_i|) sum_t PPO's minimum of u_k pi / sg[pi], half-widths 3e-3 / 4e-3, log at most 10

Turns are those the environment marked. The paper's tree search is not part of it.
"""

from swarm.objectives.parts import Clip, GroupZScore, RolloutMean, TurnRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="at2po",
    title="AT2PO: Agentic Turn-based Policy Optimization via Tree Search",
    acronym="AT2PO",
    arxiv="2601.04767",
    verification="code",
    advantage=GroupZScore(),
    ratio=TurnRatio(),
    weight=Clip(low=3e-3, high=4e-3),
    aggregate=RolloutMean(),
)
