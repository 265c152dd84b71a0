"""CAPO (curvature-aware): tokens whose predicted step breaks a trust region in the last layer are masked.

    keep token t iff  m_F = d.F d / 2 < shift  and  |m_H| = |g.d + d.H d / 2| < gain

in the last layer, with g = A grad log pi, F the Fisher matrix, H = A (grad log pi grad log pi^T - F) and d the step
that Adam makes of g alone. The objective itself is GRPO's, and the thresholds are those of the authors' code. They are
absolute, so a larger learning rate masks more: as published they fit a hidden size of about 1500 and a rate of 1e-6;
elsewhere set them so that over nine tenths of the tokens are kept. Ours: d is Adam's first step, the rate times the
sign of g. The authors keep Adam's moments for each logit, which makes d at most 3 times longer and takes the
memory of a second layer. Softmax sums are exact instead of top-k.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm.objectives.part import CorrectionPart, Positive, Prediction, Probe, Scored
from swarm.objectives.parts import Clip, GroupZScore, RolloutMean, TokenRatio
from swarm.objectives.recipe import Recipe


def hidden_l1(seen: Prediction) -> Tensor:
    """|h|_1 / T, [c]: the change of a logit when every weight of the last layer changes by 1 in the sign of h."""
    return seen.hidden.to(seen.logits.dtype).abs().sum(dim=1) / seen.temperature


def probability(seen: Prediction) -> Tensor:
    """Probability [c] of the token, at its temperature."""
    chosen = torch.log_softmax(seen.logits / seen.temperature[:, None], dim=1).gather(1, seen.targets[:, None])
    return chosen[:, 0].exp()


class CurvatureMask(CorrectionPart):
    """Drops tokens by a second-order prediction of the effect of Adam's step along their own gradient.

    The step moves the token's logit by a = rate |h|_1 / T and every other logit by -a (times the sign of A), so that
    g.d = 2 a |A| (1 - p) and the variance of the logits' moves is 4 a^2 p (1 - p). At a rate of 0 nothing is masked.
    """

    equation = (
        "w = 1[m_F < shift, |m_H| < gain], m_F = 2 a^2 p (1-p), m_H = 2 a |A| (1-p) + 2 A a^2 (1-p) (1-2p), "
        "a = learning rate * |h|_1 / T"
    )
    shift: Positive = 1e-4  # nats
    gain: Positive = 0.01  # of the objective

    @property
    def probes(self) -> Mapping[str, Probe]:
        return {"hidden_l1": hidden_l1, "probability": probability}

    def __call__(self, scored: Scored) -> Tensor:
        advantages, p = scored.advantages.double(), scored.probes["probability"].double()
        a = scored.batch.learning_rate * scored.probes["hidden_l1"].double()
        shifts = 2 * a**2 * p * (1 - p)
        gains = 2 * a * advantages.abs() * (1 - p) + 2 * advantages * a**2 * (1 - p) * (1 - 2 * p)
        return ((shifts < self.shift) & (gains.abs() < self.gain)).to(scored.logprobs.dtype)


RECIPE = Recipe(
    name="capo",
    title="Stabilizing Policy Gradients for Sample-Efficient Reinforcement Learning in LLM Reasoning",
    acronym="CAPO",
    arxiv="2510.00819",
    verification="code",  # luckeciano/stable-pg-llm `grpo_entropy_trainer.py`, `sparse_adam_model.py`
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    corrections=(CurvatureMask(),),
    aggregate=RolloutMean(),
)
