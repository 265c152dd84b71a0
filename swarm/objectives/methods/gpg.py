"""GPG: plain policy gradient with the group's mean as baseline, scaled up for the rollouts without signal.

    token mean of -(B / #nonzero) (R - mean_G) log pi

No ratio, no clip and no standard deviation. The normaliser of rewards is 1, as in verl.

Mechanism: signal scaled.
"""

from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Likelihood, NoRatio, TokenMean, group_statistics, where_signal
from swarm.objectives.recipe import Recipe


class SignalScaled(AdvantagePart):
    """Reward minus the group's mean, made up for the rollouts of the step whose advantage is 0.

    Source: GPG, arXiv:2504.02546. verl's `gpg` counts non-zero rewards instead of non-zero advantages.
    """

    equation = "A_i = (N / #{A != 0}) (R_i - mean_G) / divisor"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})  # the scale counts them
    divisor: float = 1.0

    def __post_init__(self) -> None:
        if self.divisor <= 0:
            raise ConfigError(f"divisor {self.divisor} must be positive")

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        centred = where_signal(batch.rewards.to(group.mean.dtype) - group.mean, group, group.mean)
        scale = batch.num_rollouts / max(1, int((centred != 0).sum()))
        return (scale * centred / self.divisor).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="gpg",
    title="GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning",
    acronym="GPG",
    arxiv="2504.02546",
    verification="code",
    advantage=SignalScaled(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
