"""Reference lead (A-LoL): likelihood of rollouts above the reference policy's value, weighted by their ratio to it.

    (1/N) sum_i of -max(R - V, 0) sg[clip(pi(y)/pi_ref(y), .1, 1.9)] sum_t log pi; V the mean of R_ref

The whole answer is one action, and rollouts that do not beat the value are dropped, so any stored data will
do. The ratio is to the reference policy, whoever generated the rollout. Ours: the value is the mean reward of
the reference policy's own answers instead of a trained head.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Requirement, Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import ReferenceRatio, RolloutSum
from swarm.objectives.parts.advantage import reference_rewards
from swarm.objectives.parts.group_statistics import group_statistics
from swarm.objectives.parts.likelihood import weighted_likelihood, whole_trajectory
from swarm.objectives.recipe import Recipe


class ReferenceLead(AdvantagePart):
    """Excess of a reward over the reference policy's mean reward; 0 for a reward below this mean.

    Source: A-LoL, arXiv:2305.14718 (there the value is a head trained on such responses).
    """

    equation = "A_i = max(R_i - mean_G(R_ref), 0)"
    always_needs = frozenset({Requirement.REFERENCE_REWARDS, Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        value = group_statistics(reference_rewards(batch), batch.group_index).mean
        return (batch.rewards.to(value.dtype) - value).clamp(min=0).to(batch.rewards.dtype)


class TrajectoryClip(WeightPart):
    """The clipped ratio of the whole trajectory as a constant weight of each of its tokens.

    The recipe's ratio must be a token ratio, which is multiplied over the trajectory here.

    Source: A-LoL, arXiv:2305.14718; abaheti95/LoL-RL.
    """

    equation = "L_t = -sg[clip(prod_s r_s, 1-low, 1+high)] A log pi_t"
    scope = Scope.ROLLOUT
    low: float = 0.9  # half-width
    high: float = 0.9  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        return weighted_likelihood(scored, whole_trajectory(scored), 1 - self.low, 1 + self.high)


RECIPE = Recipe(
    name="a_lol",
    title="Improving Language Models with Advantage-based Offline Policy Gradients",
    acronym="A-LoL",
    arxiv="2305.14718",
    verification="code",
    advantage=ReferenceLead(),
    ratio=ReferenceRatio(),
    weight=TrajectoryClip(),
    aggregate=RolloutSum(),
)
