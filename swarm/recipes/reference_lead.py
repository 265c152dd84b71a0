"""A-LoL: likelihood of rollouts that beat the reference policy's value, weighted by their ratio to it.

The whole answer is one action, and rollouts that do not beat the value are dropped, so any stored data will
do. The ratio is to the reference policy, whoever generated the rollout. Ours: the value is the mean reward of
the reference policy's own answers instead of a trained head.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.reference import ReferenceLead
from swarm.parts.aggregate.mean import RolloutSum
from swarm.parts.ratio.reference import ReferenceRatio
from swarm.parts.weight.detached import TrajectoryClip

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
