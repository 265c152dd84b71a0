"""ScaleRL, its loss: truncated constant ratios, rewards in deviations of the whole step, every prompt the same.

The parts of the recipe that are not an objective (an asynchronous pipeline, float32 logits, dropping groups
without signal, retiring solved prompts) belong to the run. Cap 5 of the ratio itself, as in TRL.
"""

from swarm.objectives.parts.advantage.batch import BatchDeviation
from swarm.objectives.parts.aggregate.mean import GroupMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.detached import DetachedClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="scaled_prompt_mean",
    title="The Art of Scaling Reinforcement Learning Compute for LLMs",
    acronym="ScaleRL",
    arxiv="2510.13786",
    verification="code",
    advantage=BatchDeviation(),
    ratio=TokenRatio(),
    weight=DetachedClip(low=1.0, high=4.0),
    aggregate=GroupMean(),
)
