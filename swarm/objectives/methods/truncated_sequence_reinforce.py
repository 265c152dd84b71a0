"""Bypass mode: the proximal policy is left out, REINFORCE is weighted by the whole response's ratio, cut at 2.

No clip and no extra forward pass: pi_old is taken to be the generator. Ours: the group z-score.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutSum
from swarm.objectives.parts.ratio.sequence import FullSequenceRatio
from swarm.objectives.parts.weight.detached import DetachedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="truncated_sequence_reinforce",
    title="When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    acronym="Bypass-PG-Seq-TIS",
    arxiv="",
    url="https://richardli.xyz/rl-collapse",
    verification="code",
    advantage=GroupZScore(),
    ratio=FullSequenceRatio(),
    weight=DetachedClip(low=1.0, high=1.0),
    aggregate=RolloutSum(),
)
