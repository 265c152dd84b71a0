"""SPEAR, its objective: old rollouts are imitated where they beat what the policy does today, more so later on.

Ours: the buffer is whatever older rollouts a step draws, here with one step for both kinds instead of two.
Tokens of high covariance are left out by rank instead of at random. Its bonus for tool calls, its filters and
its selection of groups by spread belong to rewards and sampling and are left out.
"""

from swarm.objectives.parts.advantage.imitation import RecalibratedReplay
from swarm.objectives.parts.aggregate.mean import ConstantLength
from swarm.objectives.parts.correction.imitation import ReplayWarmup
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.covariance import CovarianceClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="self_imitation",
    title="Learn the Ropes, Then Trust the Wins: Self-imitation with Progressive Exploration for "
    "Agentic Reinforcement Learning",
    acronym="SPEAR",
    arxiv="2509.22601",
    row="S068",
    verification="code",
    advantage=RecalibratedReplay(),
    ratio=TokenRatio(),
    weight=CovarianceClip(low=0.2, high=0.28, share=0.02, least=1.0, most=40.0),
    corrections=(ReplayWarmup(),),
    aggregate=ConstantLength(),
)
