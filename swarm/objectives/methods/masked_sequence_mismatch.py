"""MIS by response: responses whose probability at generator and learner differs too much are dropped as a whole.

Dropped responses stay in the denominator. Ours: GRPO's clip with a token mean as the host, the lower bound 0.5
(TRL has none by default); its upper bound is 3.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.mismatch import MaskedSequenceMismatch
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="masked_sequence_mismatch",
    title="When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    acronym="Seq-MIS",
    arxiv="",
    url="https://richardli.xyz/rl-collapse",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(MaskedSequenceMismatch(low=0.5, high=3.0),),
    aggregate=TokenMean(),
)
