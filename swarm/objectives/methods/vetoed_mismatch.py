"""TIS by token with a veto: a response with one token that the policy would never give is dropped as a whole.

Such a token marks a broken record or a broken kernel rather than a stale policy. Ours: GRPO's clip around the
start of the update and a token mean as the host.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.correction.mismatch import TruncatedMismatch
from swarm.objectives.parts.correction.rejection import Veto
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="vetoed_mismatch",
    title="When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    acronym="TIS-veto",
    arxiv="",
    url="https://richardli.xyz/rl-collapse",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(
        TruncatedMismatch(cap=2.0),
        Veto(least=1e-4),
    ),
    aggregate=TokenMean(),
)
