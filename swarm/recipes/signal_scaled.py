"""GPG: plain policy gradient with the group's mean as baseline, scaled up for the rollouts without signal.

No ratio, no clip and no standard deviation. The normaliser of rewards is 1, as in verl.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.signal import SignalScaled
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import NoRatio
from swarm.parts.weight.detached import Likelihood

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
