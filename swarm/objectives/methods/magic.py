"""Skywork-OR1's adaptive entropy control (MAGIC): a bonus that acts only while entropy is under its target.

    token mean of the clipped surrogate, minus c mean H while mean H <= target

The token-mean surrogate without KL is Skywork-OR1's. Ours: the strength never falls below 0; the entropy that is
compared with the target is that of all tokens of the step, external ones included.
"""

from torch import Tensor

from swarm.objectives.part import Memory, NotNegative, Scope, Scored, TermPart
from swarm.objectives.parts import Clip, GroupZScore, TokenMean, TokenRatio, mean_entropy
from swarm.objectives.recipe import Recipe


class AdaptiveEntropy(TermPart):
    """Entropy bonus that acts only at or below a target entropy; its strength grows there and shrinks above."""

    equation = "L -= c * 1[mean H <= target] * mean_t H_t; then c += pace if mean H <= target else -pace"
    scope = Scope.STEP
    start: NotNegative = 0.01
    pace: NotNegative = 0.005
    target: NotNegative = 0.2  # nats per token

    def initial(self) -> Memory:
        return {"strength": self.start}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        step = self.pace if float(mean_entropy(scored).detach()) <= self.target else -self.pace
        return {"strength": max(0.0, float(memory["strength"]) + step)}

    def __call__(self, scored: Scored) -> Tensor:
        entropy = mean_entropy(scored)
        is_low = float(entropy.detach()) <= self.target
        return -(float(self.remembered(scored.batch)["strength"]) if is_low else 0.0) * entropy


RECIPE = Recipe(
    name="magic",
    title="Skywork Open Reasoner 1 Technical Report",
    acronym="MAGIC",
    arxiv="2505.22312",
    verification="code",  # section 4
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
    terms=(AdaptiveEntropy(start=0.01, pace=0.005, target=0.2),),
)
