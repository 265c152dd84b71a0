"""Policy mirror descent of Kimi k1.5 as a token loss: REINFORCE and a squared log-ratio to the old policy.

No weight and no clip; the square holds the policy near the one that sampled. The old policy is here the
generator's, so that stale rollouts are held back the more. Ours: the group's mean as baseline, token mean.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.detached import AnchoredLikelihood
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="anchored_likelihood",
    title="Kimi k1.5: Scaling Reinforcement Learning with LLMs",
    acronym="PMD",
    arxiv="2501.12599",
    verification="code",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=AnchoredLikelihood(tau=0.1),
    aggregate=TokenMean(),
)
