"""Reinforce-Ada (balanced): a prompt is answered again until its answers are mixed; a few of them are learned from.

The advantage compares with every answer drawn. A group therefore carries its whole pool, of up to four group
sizes. Ours: with graded rewards the mean is that of the rewards themselves; a pool of one response gets 0.
"""

from swarm.objectives.parts.advantage.pool import KeptOfPool
from swarm.objectives.parts.aggregate.kept import KeptTokenMean
from swarm.objectives.parts.prompts.rounds import SuccessiveElimination
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="successive_elimination",
    title="Reinforce-Ada: An Adaptive Sampling Framework for Reinforce-Style LLM Training",
    acronym="Reinforce-Ada",
    arxiv="2510.04996",
    row="S165",
    verification="code",
    advantage=KeptOfPool(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28, dual=3.0),
    aggregate=KeptTokenMean(),
    prompts=SuccessiveElimination(),
)
