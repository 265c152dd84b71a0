"""DPPO: a trust region on the probability of a token, not on the ratio; rare tokens may change by any factor."""

from dataclasses import replace

import torch
from torch import Tensor

from swarm.objectives.part import Scored
from swarm.objectives.parts import (
    DetachedClip,
    DivergenceMask,
    GroupZScore,
    ProbabilityDifferenceMask,
    TokenMean,
    TokenRatio,
    pushed,
)
from swarm.objectives.recipe import Recipe

PROBABILITY_FLOOR = 1e-8
"""Added to the probability of all other tokens, so that its logarithm is finite."""


class BernoulliDivergenceMask(DivergenceMask):
    """Drops tokens by KL(mu || pi) of "this token or another", in the direction of the token's advantage."""

    equation = (
        "L_t <- M L_t, M = 0 if KL > high, A > 0, p > p_mu or KL > low, A <= 0, p < p_mu; "
        "KL = p_mu log(p_mu/p) + (1-p_mu) log((1-p_mu)/(1-p))"
    )

    def __call__(self, scored: Scored) -> Tensor:
        behavior = self.denominator(scored).clamp(max=0)
        current = scored.logprobs.detach().clamp(max=0)
        others = torch.log((PROBABILITY_FLOOR - torch.expm1(behavior)) / (PROBABILITY_FLOOR - torch.expm1(current)))
        divergence = behavior.exp() * (behavior - current) - torch.expm1(behavior) * others
        rises, falls = current > behavior, current < behavior
        return pushed(scored.advantages, rises & (divergence > self.high), falls & (divergence > self.low))


DPPO_TV = Recipe(
    name="dppo_tv",
    title="Rethinking the Trust Region in LLM Reinforcement Learning",
    acronym="DPPO-TV",
    arxiv="2602.04879",
    verification="code",  # sail-sg/Stable-RL; verl `dppo_tv`, `dppo_kl`
    about="Probability difference mask (DPPO-Binary-TV): tokens whose probability itself moved too far are dropped; "
    "rare tokens may change by any factor. The anchor is the policy that sampled, also with several updates a "
    "batch. Bounds 0.15 and the cap 20 on the constant weight are those of the authors' version in verl; "
    "their paper's experiments vary. Formula: -M sg[min(r, 20)] A log pi, M by p - p_mu beyond .15 where A "
    "pushes to, token mean.",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=DetachedClip(low=1.0, high=19.0),
    corrections=(ProbabilityDifferenceMask(low=0.15, high=0.15),),
    aggregate=TokenMean(),
)

DPPO_KL = replace(
    DPPO_TV,
    name="dppo_kl",
    acronym="DPPO-KL",
    about='Bernoulli divergence mask (DPPO-Binary-KL): as `dppo_tv`, by the KL divergence of "this token or '
    "another\". Bounds 0.05 and the cap 20 on the constant weight are those of the authors' version in verl. "
    "Formula: -M sg[min(r, 20)] A log pi, M by KL(mu || pi) of the token against the rest, bound .05.",
    corrections=(BernoulliDivergenceMask(low=0.05, high=0.05),),
)
