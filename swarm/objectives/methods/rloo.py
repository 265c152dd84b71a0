"""Leave one out (RLOO): REINFORCE on whole responses, with the mean reward of the other responses as the baseline.

    A = R - mean of the others (R in a group of one); (1/N) sum_i sum_t -A log pi

No ratio and no clip; a response is one action, so its token losses are summed. The KL penalty in the reward is left
out, as in `grpo`. The recipe needs no log-probs of the generator.
"""

from swarm.objectives.parts import LeaveOneOut, Likelihood, NoRatio, RolloutSum
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="rloo",
    title="Back to Basics: Revisiting REINFORCE-Style Optimization for Learning from Human Feedback in LLMs",
    acronym="RLOO",
    arxiv="2402.14740",
    verification="code",
    advantage=LeaveOneOut(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=RolloutSum(),
)
