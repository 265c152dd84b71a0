"""ST-PPO: a clip of turn-level ratios, the update divided by the size of the gradient that the clip removed.

    rollout mean of PPO (.997, 1.004) on the turn ratio u, / max(1, ||C|| / .05), r <= 1.008 in C

As `s_ppo`, with the ratio of a whole turn. Ours besides the core: the half-widths,
which are those of AT2PO for the same ratio. Turns are those the environment marked.

Mechanism: turn clip bias normalised.
"""

from dataclasses import replace

import torch

from swarm.objectives.part import Positive, Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupZScore, RolloutMean, TokenRatio, TurnRatio, clip_surrogate
from swarm.objectives.recipe import Recipe


class BiasNormalisedClip(WeightPart):
    """PPO's clip, with the loss divided by the norm of the gradient that the clip removed, if that norm is large.

    The paper takes the norm over all parameters, which costs a second backward pass. Ours: the norm of the
    removed coefficients of log pi, as if all token gradients had length 1 and were orthogonal, per rollout. In the norm
    a ratio counts up to 1 + 2 high, because the claimed log-prob of one clipped token must not shrink the step of all
    others. The norm is measured in units of `reference`: below that, the step is plain PPO, and no update is ever
    enlarged.
    """

    equation = (
        "L_t = -min(r A, clip(r, 1-low, 1+high) A) min(1, reference / ||C||), "
        "||C||^2 = (1/N) sum_i sum_t (1[t clipped] min(r, 1 + 2 high) A / |o_i|)^2"
    )
    scope = Scope.STEP
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    reference: Positive = 0.05  # size of the removed part up to which nothing is divided

    def __call__(self, scored: Scored) -> TokenLosses:
        found = clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.low, 1 + self.high)
        length = scored.mask.sum(dim=1, keepdim=True).clamp(min=1)
        ratio = torch.exp(scored.log_ratio.detach()).clamp(max=1 + 2 * self.high)
        pull = ratio * scored.advantages / length
        removed = torch.where(found.bounded & scored.mask, pull, torch.zeros_like(pull))
        size = float(removed.double().norm()) / max(1, scored.batch.step_rollouts) ** 0.5
        return TokenLosses(losses=found.losses / max(1.0, size / self.reference), bounded=found.bounded)


RECIPE = Recipe(
    name="st_ppo",
    title="ST-PPO: Stabilized Off-Policy Proximal Policy Optimization for Multi-Turn Agents Training",
    acronym="ST-PPO",
    arxiv="2511.20718",
    verification="ours",  # in public reviews and notes
    advantage=GroupZScore(),
    ratio=TurnRatio(),
    weight=BiasNormalisedClip(low=3e-3, high=4e-3),
    aggregate=RolloutMean(),
)

S_PPO = replace(
    RECIPE,
    name="s_ppo",
    acronym="S-PPO",
    about="Clip bias normalised (S-PPO): PPO's clip, the update divided by the size of the gradient that the clip "
    "removed. Very stale batches, of which the clip removes much, then count less. Known from reviews and "
    "notes only. Ours is the core: the size is that of the removed coefficients, not of parameter gradients, "
    "and never enlarges an update; a group z-score in place of the critic. The turn-level form is `st_ppo`. "
    "Formula: rollout mean of PPO (.8, 1.2) / max(1, ||C|| / .05), C_t = 1[clipped] min(r, 1.4) A/|o|.",
    ratio=TokenRatio(),
    weight=BiasNormalisedClip(),
)
