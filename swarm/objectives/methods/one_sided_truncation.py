"""AIPO: the importance-weighted surrogate with the ratio cut from above, and no clip of PPO's kind.

Written as a surrogate, so a token over the cap has no gradient; LlamaRL's prose treats the cut ratio as a
constant weight instead, which is `detached_clip` with the same cap. The paper's cap is said to lie between 2
and 10. Ours: 4, and no KL or entropy term.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.surrogate import OneSidedTruncation
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="one_sided_truncation",
    title="LlamaRL: A Distributed Asynchronous Reinforcement Learning Framework for Efficient Large-scale LLM Training",
    acronym="AIPO",
    arxiv="2505.24034",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=OneSidedTruncation(cap=4.0),
    aggregate=TokenMean(),
)
