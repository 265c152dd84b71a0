"""Clip-higher for tools (GRPO-TCR, DemyAgent): token mean, a wide upper clip and an overlong penalty, for tool users.

    R += min(0, -(|o| - .8 Lmax) / (.2 Lmax)), z-score, token mean of PPO clipped at .8 / 1.28, dual 10, no KL

The released run: DAPO's objective with a dual clip, over episodes with a code tool. The training on real traces that
precedes the run is left out. Lmax is the sum of the token limits of an episode's turns.
"""

from swarm.objectives.part import Requirement
from swarm.objectives.parts import Clip, GroupZScore, Overlong, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class EpisodeOverlong(Overlong):
    """The overlong penalty for episodes of several turns."""

    always_needs = frozenset({Requirement.TURNS})


RECIPE = Recipe(
    name="grpo_tcr",
    title="Demystifying Reinforcement Learning in Agentic Reasoning",
    acronym="GRPO-TCR",
    arxiv="2510.11701",
    verification="code",  # Gen-Verse/Open-AgentRL `recipe/demystify/grpo_tcr_qwen3_4b.sh`
    rewards=(EpisodeOverlong(),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28, dual=10.0),
    aggregate=TokenMean(),
)
