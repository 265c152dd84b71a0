"""HAPO (history-aware): a reward for being shorter than the prompt's shortest success so far.

The record is kept by prompt over the run, so that pressure on length follows what proved possible; failures
are never paid for being short. The repetition penalty, off in the released script, is left out. Ours: the
group z-score, clip and rollout mean of `grpo` around it.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.reward.length import HistoryLength
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="history_length",
    title="HAPO: Training Language Models to Reason Concisely via History-Aware Policy Optimization",
    acronym="HAPO (history-aware)",
    arxiv="2505.11225",
    row="S122",
    verification="code",
    rewards=(HistoryLength(weight=1.0, worst=-0.7),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
)
