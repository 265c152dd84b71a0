"""Summaries (SUPO): all turns of a rollout, also summaries, get its advantage; rollouts that a limit ended are dropped.

    A_i = z_G(R), dropped for episodes that a limit ended; clip .2 / .28, token mean over all conversations

The environment asks for the summary and begins a conversation with it (kind `notes`, or your own). Statistics count
rollouts, not conversations. Known from notes on the paper. Ours: clip and token mean.
"""

from swarm.objectives.parts import Clip, FinishedEpisodes, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="supo",
    title="Scaling LLM Multi-turn RL with End-to-end Summarization-based Context Management",
    acronym="SUPO",
    arxiv="2510.06727",
    verification="secondary",
    advantage=FinishedEpisodes(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
