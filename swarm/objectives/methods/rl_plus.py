"""RL-PLUS: a mixture of policies is the ratio's denominator for rollouts of other generators; own ones are unclipped.

    external 2 pi/(pi_old + .5 (pi_old + 1)) A (1 - sg[pi])^.5, own r A; constant norm, entropy .001

External tokens need no log-probs of their generator, and no external ratio exceeds 4; tokens that the policy already
finds likely are damped. In the paper a group has own and external members, and only own members count in the baseline;
here (ours) a group has one producer and its own baseline. The released code divides by the width of the padded
batch. Ours: by the allowed length of each rollout.

Mechanism: mixture denominator.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from swarm.objectives.part import Bound, Positive, RatioPart, Requirement, Scored, ShapePart, on_mask
from swarm.objectives.parts import LOG_RATIO_BOUND, ConstantLength, EntropyBonus, GroupCentred, Surrogate, log_ratio
from swarm.objectives.recipe import Recipe


class MixtureRatio(RatioPart):
    """Multiple importance sampling: external tokens count as drawn from pi_old and a guess of the generator, half each.

    The guess is a mixture of pi_old and probability 1, since the token was in fact produced. Own tokens have the
    ratio to pi_old.
    """

    equation = "external: r_t = 2 pi / (pi_old + share pi_old + (1 - share)); own: r_t = pi / pi_old"
    always_needs = frozenset({Requirement.PROXIMAL_LOGPROBS})
    share: Annotated[float, Bound(at_least=0, below=1)] = 0.5  # of pi_old in the guess

    def __call__(self, scored: Scored) -> Tensor:
        own = log_ratio(scored.logprobs, scored.proximal, scored.mask)
        old = scored.proximal.clamp(max=0).exp()
        mixture = math.log(2) + scored.logprobs - torch.log(old + self.share * old + (1 - self.share))
        mixture = on_mask(mixture, scored.mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return torch.where(scored.batch.is_external[:, None], mixture, own)


class ExternalNovelty(ShapePart):
    """Scales advantages of external tokens by (1 - pi)^power, so that likely tokens are not learned again."""

    equation = "A_t <- A_t (1 - sg[pi_t])^power on external tokens"
    power: Positive = 0.5

    def __call__(self, scored: Scored) -> Tensor:
        unlikely = -torch.expm1(scored.logprobs.detach().clamp(max=0))
        shaped = scored.advantages * unlikely**self.power
        return torch.where(scored.batch.is_external[:, None], shaped, scored.advantages)


RECIPE = Recipe(
    name="rl_plus",
    title="RL-PLUS: Countering Capability Boundary Collapse of LLMs in Reinforcement Learning with "
    "Hybrid-policy Optimization",
    acronym="RL-PLUS",
    arxiv="2508.00222",
    verification="code",  # YihongDong/RL-PLUS `rlplus_core_alg.py`
    advantage=GroupCentred(),
    shapers=(ExternalNovelty(),),
    ratio=MixtureRatio(),
    weight=Surrogate(),
    aggregate=ConstantLength(),
    terms=(EntropyBonus(strength=0.001),),
)
