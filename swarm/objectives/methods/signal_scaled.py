"""GPG: plain policy gradient with the group's mean as baseline, scaled up for the rollouts without signal.

No ratio, no clip and no standard deviation. The normaliser of rewards is 1, as in verl.
"""

from swarm.objectives.parts.advantage.signal import SignalScaled
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import NoRatio
from swarm.objectives.parts.weight.detached import Likelihood
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="signal_scaled",
    title="GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning",
    acronym="GPG",
    arxiv="2504.02546",
    verification="code",
    advantage=SignalScaled(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
