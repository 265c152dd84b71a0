"""Decoupled PPO: the clip is centred on the policy at the start of the update, and pi_old/mu is a plain weight.

    pi_old/mu times PPO's clip around pi_old, token mean

arXiv:2110.00641 introduced the method; AReaL uses it for asynchronous data, and its code drops tokens whose weight
exceeds a cap (`icepop` with low 0). Here the weight is whole, as in both papers' equations.
Ours: group z-scores in place of a critic. In an open swarm prefer `icepop`: nothing bounds a weight here,
so that one false log-prob of a peer can outweigh a step.

Mechanism: decoupled clip.
"""

from swarm.objectives.parts import Clip, GroupZScore, Mismatch, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="decoupled_ppo",
    title="AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning",
    acronym="decoupled PPO",
    arxiv="2505.24298",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(Mismatch(),),
    aggregate=TokenMean(),
)
