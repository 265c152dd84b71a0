"""DCPO (distribution-centric): entropy held at a target by a pull towards the policy at another temperature.

    A <- (1-a) A + a 1[R > .05] pi^T/pi, a/(1+a) of min(|.5 - H|, .1)/share correct; dual clip 3

Another method called DCPO clips by token probability. Groups whose rewards are all equal are pulled as well.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from swarm.objectives.part import (
    Bound,
    Memory,
    NotNegative,
    PositiveShare,
    Prediction,
    Probe,
    Requirement,
    Scope,
    Scored,
    ShapePart,
    masked_sum,
)
from swarm.objectives.parts import LOG_RATIO_BOUND, Clip, GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


def tempered_log_ratio(seen: Prediction, factor: float) -> Tensor:
    """log pi^T - log pi of each token [c], with pi^T at `factor` times the temperature of the token's rollout."""
    logits = seen.logits / seen.temperature[:, None].to(seen.logits.dtype)

    def logprob(scaled: Tensor) -> Tensor:
        return scaled.gather(1, seen.targets[:, None]).squeeze(1) - torch.logsumexp(scaled, dim=-1)

    return logprob(logits / factor) - logprob(logits)


class TemperedPull(ShapePart):
    """Mixes pi^T/pi into the advantages of correct rollouts: T is `flat` at low entropy, `sharp` at high entropy.

    The share of the ratio grows with the distance of the entropy to the target, up to `most`, and with the rarity of
    correct rollouts. The ratio is that of the policy at this update (the code: at the start of the first update).

    Source: DCPO (distribution-centric), 597358816/DCPO `verl/trainer/ray_trainer.py`.
    """

    equation = (
        "A <- (1-a) A + a 1[R > correct] pi^T/pi, a = d/(d + share correct), d = min(|target - H|, most), "
        "T = flat if H <= target else sharp"
    )
    scope = Scope.STEP
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
    target: NotNegative = 0.5  # nats per token
    flat: Annotated[float, Bound(at_least=1)] = 1.2  # temperature
    sharp: PositiveShare = 0.8
    most: NotNegative = 0.1  # nats
    correct: float = 0.05  # a reward above it counts

    @property
    def probes(self) -> Mapping[str, Probe]:
        return {self._name(factor): partial(tempered_log_ratio, factor=factor) for factor in (self.flat, self.sharp)}

    def initial(self) -> Memory:
        return {"entropy": 0.0}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        return {"entropy": float(masked_sum(scored.entropy.detach(), scored.mask)) / max(1, int(scored.mask.sum()))}

    def __call__(self, scored: Scored) -> Tensor:
        entropy = float(self.remembered(scored.batch)["entropy"])
        is_correct = scored.batch.rewards > self.correct
        distance = min(abs(self.target - entropy), self.most)
        if distance == 0:
            return scored.advantages
        share = distance / (distance + float(is_correct.double().mean()))
        factor = self.flat if entropy <= self.target else self.sharp
        log_ratio = scored.probes[self._name(factor)].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        pull = torch.where(is_correct[:, None], log_ratio.exp(), 0.0)
        return (1 - share) * scored.advantages + share * pull.to(scored.advantages.dtype)

    @staticmethod
    def _name(factor: float) -> str:
        return f"log_ratio_at_temperature_{factor}"


RECIPE = Recipe(
    name="dcpo_distribution",
    title="Distribution-Centric Policy Optimization Dominates Exploration-Exploitation Trade-off",
    acronym="DCPO (distribution-centric)",
    url="https://github.com/597358816/DCPO",
    verification="code",
    advantage=GroupZScore(),
    shapers=(TemperedPull(),),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2, dual=3.0),
    aggregate=TokenMean(),
)
