"""CAPO (curvature-aware): tokens whose predicted step breaks a trust region in the last layer are masked.

The objective itself is GRPO's; predictions and thresholds are those of the authors' code, along a plain
gradient step. Ours: the length of that step, which follows from the step's own mean shift (see the part).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import CorrectionPart, Prediction, Probe, Scope, Scored, masked_sum
from swarm.objectives.parts import Clip, GroupZScore, RolloutMean, TokenRatio
from swarm.objectives.recipe import Recipe


def _moments(seen: Prediction) -> tuple[Tensor, Tensor, Tensor]:
    """(kernel, squared residual, curvature along it), each [c], with p the distribution and u = e_y - p.

    |h|^2 / T^2, |u|^2 and u^T (diag p - p p^T) u: what one token's gradient of the last layer does to its logits.
    """
    p = torch.softmax(seen.logits / seen.temperature[:, None], dim=1)
    chosen = p.gather(1, seen.targets[:, None])[:, 0]
    squares, cubes = (p**2).sum(dim=1), (p**3).sum(dim=1)
    kernel = (seen.hidden.to(p.dtype) ** 2).sum(dim=1) / seen.temperature**2
    along = cubes + chosen - 2 * chosen**2 - (chosen - squares) ** 2
    return kernel, 1 - 2 * chosen + squares, along.clamp(min=0)


def gradient_size(seen: Prediction) -> Tensor:
    """Squared norm [c] of the gradient of log pi(token) in the last layer."""
    kernel, residual, _ = _moments(seen)
    return kernel * residual


def gradient_curvature(seen: Prediction) -> Tensor:
    """That gradient's own quadratic form [c] in the Fisher matrix of the token's distribution."""
    kernel, _, along = _moments(seen)
    return kernel**2 * along


class CurvatureMask(CorrectionPart):
    """Leaves out tokens by a second-order prediction of what their own gradient step in the last layer does.

    The paper predicts along Adam's step or a plain gradient step; it reports the same for GRPO, and only the
    latter needs no optimizer state. Its thresholds are kept. Ours: the step has the one length for all tokens
    at which they shift the policy by `budget` on average, because its own length, the learning rate, fits one
    model and optimizer only; softmax sums are exact instead of over the most likely tokens.

    Source: CAPO (curvature-aware), arXiv:2510.00819; luckeciano/stable-pg-llm `grpo_entropy_trainer.py`.
    """

    equation = (
        "w = 1[m_F < shift, |m_H| < gain], m_F = (eta A s)^2 / 2, m_H = eta A^2 s + eta^2 A^3 (s^2 - q) / 2, "
        "eta such that mean m_F = budget, s = |g|^2, q = g^T F g, g = grad log pi in the last layer"
    )
    scope = Scope.STEP
    budget: float = 1e-5  # nats
    shift: float = 1e-4  # nats
    gain: float = 0.01  # of the objective

    def __post_init__(self) -> None:
        if min(self.budget, self.shift, self.gain) <= 0:
            raise ConfigError("budget, shift and gain must be positive")

    @property
    def probes(self) -> Mapping[str, Probe]:
        return {"gradient_size": gradient_size, "gradient_curvature": gradient_curvature}

    def __call__(self, scored: Scored) -> Tensor:
        advantages = scored.advantages.double()
        size, curvature = (scored.probes[name].double() for name in ("gradient_size", "gradient_curvature"))
        shifts = (advantages * size) ** 2 / 2
        mean = float(masked_sum(shifts, scored.mask)) / max(1, int(scored.mask.sum()))
        if mean == 0:
            return torch.ones_like(scored.logprobs)
        eta = (self.budget / mean) ** 0.5
        gains = eta * advantages**2 * size + eta**2 * advantages**3 * (size**2 - curvature) / 2
        kept = (eta**2 * shifts < self.shift) & (gains.abs() < self.gain)
        return kept.to(scored.logprobs.dtype)


RECIPE = Recipe(
    name="capo",
    title="Stabilizing Policy Gradients for Sample-Efficient Reinforcement Learning in LLM Reasoning",
    acronym="CAPO",
    arxiv="2510.00819",
    row="S114",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    corrections=(CurvatureMask(),),
    aggregate=RolloutMean(),
)
