"""Clip-higher (DAPO): an upper clip bound wider than the lower, a mean over tokens, and a penalty on overlong answers.

    R += min(0, -(|o| - .8 Lmax) / (.2 Lmax)), z-score, token mean of PPO clipped at .8 / 1.28

The objective and the reward of the method; its dynamic sampling (groups without signal are replaced) is the
sampler's work. The overlong buffer is 4096 of 20480 tokens; ours: the same share of each generator's limit.
"""

from dataclasses import replace

from torch import Tensor

from swarm.objectives.part import CorrectionPart, Scored
from swarm.objectives.parts import Clip, GroupZScore, Overlong, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class FinishedOnly(CorrectionPart):
    """Drops responses cut off by the token limit, whose reward says little about the whole answer.

    These responses still count in their group's statistics. TRL takes their tokens out of the denominator as well;
    here the denominator keeps them, so that the step does not grow.

    Source: overlong filtering, arXiv:2503.14476 section 3.4; TRL `mask_truncated_completions`.
    """

    equation = "L_t <- 1[response ended before its limit] L_t"

    def __call__(self, scored: Scored) -> Tensor:
        is_kept = ~scored.batch.is_truncated[:, None]
        return is_kept.to(scored.advantages.dtype).expand(scored.mask.shape)


RECIPE = Recipe(
    name="dapo",
    title="DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    acronym="DAPO",
    arxiv="2503.14476",
    verification="code",
    rewards=(Overlong(),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)

DAPO_OVERLONG_FILTER = replace(
    RECIPE,
    name="dapo_overlong_filter",
    acronym="DAPO (overlong filtering)",
    about="DAPO with overlong filtering in place of its soft punishment: responses cut off by the limit are not "
    "learned from. Ours: they stay in the denominator of the mean. Formula: token mean of -min(r A, clip(r, "
    ".8, 1.28) A) over responses that ended before their limit.",
    corrections=(FinishedOnly(),),
    rewards=(),
)
