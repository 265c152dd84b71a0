"""MiniRL: REINFORCE weighted by the whole ratio to the generator, gated by PPO's clip around the start of the update.

The weight is mismatch times staleness, a constant; the gate drops tokens that a later update of the same batch
pushed out of the clip. The paper's half-widths are not known to us. Ours: 0.2. Replay of expert routing, its
third ingredient, concerns mixture-of-experts models and is not here.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import RolloutSum
from swarm.objectives.parts.correction.trust import SignGate
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.surrogate import DetachedRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="sign_gated_decoupled",
    title="Stabilizing Reinforcement Learning with LLMs: Formulation and Practices",
    acronym="MiniRL",
    arxiv="2512.01374",
    row="S088",
    verification="secondary",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=DetachedRatio(),
    corrections=(SignGate(low=0.2, high=0.2),),
    aggregate=RolloutSum(),
)
