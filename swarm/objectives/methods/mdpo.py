"""MDPO: the plain surrogate with a growing divergence penalty to the policy of the draw, over several updates.

    token mean of -r A + KL / t, t = 1 - k/1000; KL by k3 with the gradient of k2

Written for control tasks. Ours: group advantages in place of a critic's, a horizon of 1000 steps, and the
divergence estimated on the sampled tokens with the gradient of the reverse KL.
"""

from torch import Tensor

from swarm.objectives.part import Count, Memory, Requirement, Scope, Scored, TermPart
from swarm.objectives.parts import GroupZScore, Surrogate, TokenMean, TokenRatio
from swarm.objectives.parts.kl import Estimator, Mean, difference, estimate, step_mean
from swarm.objectives.recipe import Recipe


class MirrorKl(TermPart):
    """The proximal term of mirror descent: the divergence from the policy at the start of the update."""

    equation = "L += (1 / t_k) * mean_t k(log pi - log pi_old), t_k = 1 - k/horizon after k steps"
    scope = Scope.ROLLOUT
    always_needs = frozenset({Requirement.PROXIMAL_LOGPROBS, Requirement.SEVERAL_UPDATES})
    horizon: Count = 1000  # optimizer updates of the run; ours: the last strength stays
    estimator: Estimator = "k3+"
    mean: Mean = "token"

    def initial(self) -> Memory:
        return {"steps": 0}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        return {"steps": min(int(memory["steps"]) + 1, self.horizon - 1)}

    def __call__(self, scored: Scored) -> Tensor:
        steps = min(int(self.remembered(scored.batch)["steps"]), self.horizon - 1)
        gap = estimate(difference(scored, "proximal"), self.estimator)
        return step_mean(gap, scored, self.mean) / (1 - steps / self.horizon)


RECIPE = Recipe(
    name="mdpo",
    title="Mirror Descent Policy Optimization",
    acronym="MDPO",
    arxiv="2005.09814",
    verification="code",  # section 4.1
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Surrogate(),
    aggregate=TokenMean(),
    terms=(MirrorKl(horizon=1000),),
)
