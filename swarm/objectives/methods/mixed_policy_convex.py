"""ReMix: rollouts of older policies in every update, a trust region around the current one, two KL penalties.

Wants replayed rollouts (the paper: a share of 0.4 from the last two policies, replay.max_reuse or
replay.max_age_steps here) and two updates of each draw. Left open: after 50 or 100 steps the paper makes the
learner the new reference and goes on on-policy; without that switch its score falls from 52.1 to 47.3. Ours:
group advantages and their mean over rollouts in place of either base algorithm, width 0.2, k3, and the strengths
of penalty and entropy bonus.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.term.entropy import EntropyBonus
from swarm.objectives.parts.term.steered import ConvexKl
from swarm.objectives.parts.weight.surrogate import CentredClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="mixed_policy_convex",
    title="Squeeze the Soaked Sponge: Efficient Off-policy Reinforcement Finetuning for Large Language Model",
    acronym="ReMix",
    arxiv="2507.06892",
    row="S082",
    verification="secondary",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=CentredClip(width=0.2),
    aggregate=RolloutMean(),
    terms=(ConvexKl(), EntropyBonus(strength=0.001)),
)
