"""A-LoL: likelihood of rollouts that beat the reference policy's value, weighted by their ratio to it.

The whole answer is one action, and rollouts that do not beat the value are dropped, so any stored data will
do. The ratio is to the reference policy, whoever generated the rollout. Ours: the value is the mean reward of
the reference policy's own answers instead of a trained head.
"""

from swarm.objectives.parts.advantage.reference import ReferenceLead
from swarm.objectives.parts.aggregate.mean import RolloutSum
from swarm.objectives.parts.ratio.reference import ReferenceRatio
from swarm.objectives.parts.weight.detached import TrajectoryClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="reference_lead",
    title="Improving Language Models with Advantage-based Offline Policy Gradients",
    acronym="A-LoL",
    arxiv="2305.14718",
    row="S189",
    verification="code",
    advantage=ReferenceLead(),
    ratio=ReferenceRatio(),
    weight=TrajectoryClip(),
    aggregate=RolloutSum(),
)
