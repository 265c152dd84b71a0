"""AEPO (agentic, entropy-balanced), its objective: clipped rising tokens keep a gradient, uncertain tokens weigh more.

    token mean of PPO (.8, 1.2 r/sg[r]) with dual clip 3; A <- A (1 + .2 (H - mean H) / std H)

The other half of the method, how many branches a tool call gets, belongs to the generator and is left out.
Not the AEPO that holds an arbitrary entropy. Ours: token mean.

Mechanism: entropy balanced clip.
"""

from torch import Tensor

from swarm.objectives.part import Scope, Scored, ShapePart
from swarm.objectives.parts import GroupZScore, PreservingClip, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class EntropyScaled(ShapePart):
    """Scales advantages up at tokens with more entropy than the step's mean, and down at tokens with less.

    Source: AEPO (agentic entropy-balanced); its `core_algos.py`.
    """

    equation = "A_t <- A_t (1 + strength (H_t - mean H) / std H), over the step's tokens; std 0 -> 1"
    scope = Scope.STEP
    strength: float = 0.2

    def __call__(self, scored: Scored) -> Tensor:
        entropy = scored.entropy.detach().double()
        kept = entropy[scored.mask]
        if kept.numel() < 2 or float(kept.max()) == float(kept.min()):
            return scored.advantages
        scores = (entropy - kept.mean()) / kept.std()
        return scored.advantages * (1 + self.strength * scores).to(scored.advantages.dtype)


RECIPE = Recipe(
    name="aepo",
    title="Agentic Entropy-Balanced Policy Optimization",
    acronym="AEPO",
    arxiv="2510.14545",
    verification="code",
    advantage=GroupZScore(),
    shapers=(EntropyScaled(),),
    ratio=TokenRatio(),
    weight=PreservingClip(preserve="upper", dual=3.0),
    aggregate=TokenMean(),
)
