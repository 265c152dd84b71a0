"""GPG: plain policy gradient with the group's mean as baseline, scaled up to make up for the rollouts without signal.

    token mean of -(B / #nonzero) (R - mean_G) log pi

No ratio, no clip and no standard deviation. The normaliser of rewards is 1, as in verl.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Positive, Requirement
from swarm.objectives.parts import Likelihood, NoRatio, TokenMean, group_centred
from swarm.objectives.recipe import Recipe


class SignalScaled(AdvantagePart):
    """Reward minus the group's mean, divided by the share of the step's rollouts whose advantage is not 0."""

    equation = "A_i = (N / #{A != 0}) (R_i - mean_G) / divisor"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})  # the scale counts them
    divisor: Positive = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        centred = group_centred(batch.rewards.double(), batch.group_index)
        scale = batch.num_rollouts / max(1, int((centred != 0).sum()))
        return (scale * centred / self.divisor).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="gpg",
    title="GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning",
    acronym="GPG",
    arxiv="2504.02546",
    verification="code",  # verl's `gpg` counts non-zero rewards instead of non-zero advantages
    advantage=SignalScaled(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
