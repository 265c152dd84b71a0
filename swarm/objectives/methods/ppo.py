"""PPO-clip without a critic: the outcome, whitened over all tokens of the step, is the advantage.

    token mean of -min(r A, clip(r, .8, 1.2) A); A the reward of each token, whitened over tokens

Ours, not the published method: the value network, its clipped loss and GAE are left out. With lambda = gamma = 1 and a
value of 0 everywhere, GAE is the reward of the whole response at each of its tokens; that remains here, whitened as in
verl. There is no KL penalty; REINFORCE++ is the same with one.
"""

from swarm.objectives.parts import Clip, TokenMean, TokenRatio, WhitenedReturn
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="ppo",
    title="Proximal Policy Optimization Algorithms",
    acronym="PPO",
    arxiv="1707.06347",
    verification="ours",
    advantage=WhitenedReturn(kl=0.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
