"""M2PO as AReaL has it: the tokens of largest mismatch are dropped until the rest have a small second moment.

An unclipped surrogate around the policy at the start of the update; the mask looks at the generator's gap to
that policy. AReaL's count of tokens leaves the dropped ones out. Ours: the denominator counts them, so that
the step size does not depend on how many were dropped.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.trust import SecondMomentMask
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.surrogate import Surrogate
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="second_moment_mask",
    title="Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?",
    acronym="M2PO-mask",
    arxiv="2510.01161",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Surrogate(),
    corrections=(SecondMomentMask(budget=0.04),),
    aggregate=TokenMean(),
)
