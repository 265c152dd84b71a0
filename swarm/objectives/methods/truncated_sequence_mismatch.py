"""TIS by response: the generator's gap as a product over the response, cut at 2, on all its tokens.

Unbiased before it is cut, with more variance than by token. Ours: GRPO's clip with a token mean as the host,
cap 2 (verl advises 2 to 10).
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.mismatch import TruncatedSequenceMismatch
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="truncated_sequence_mismatch",
    title="When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    acronym="Seq-TIS",
    arxiv="",
    url="https://richardli.xyz/rl-collapse",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(TruncatedSequenceMismatch(cap=2.0),),
    aggregate=TokenMean(),
)
