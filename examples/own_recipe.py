"""A recipe of your own: how the learner learns, as one equation in this file.

    python examples/own_recipe.py [STEPS] [DIRECTORY]      # tiny character model: 40 steps in about 15 seconds

The weight rule below is new: tokens count the less, the further the policy has moved from whoever generated them. The
other parts are those of published methods (docs/recipes.md); `swarm recipes show examples/own_recipe.py:RECIPE` shows
the whole equation, and `--set learner.recipe_params.weight.width=0.5` changes its constant.
"""

import sys

import torch

import swarm
from swarm.objectives.part import Positive, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupCentred, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class Bell(WeightPart):
    """A bell of the log-ratio, as a constant weight."""

    equation = "L_t = -sg[exp(-(log r_t / width)^2)] A log pi_t"
    width: Positive = 1.0  # nats

    def __call__(self, scored: Scored) -> TokenLosses:
        weight = torch.exp(-((scored.log_ratio.detach() / self.width) ** 2))
        return TokenLosses(losses=-weight * scored.advantages * scored.logprobs, bounded=weight < 0.5)


RECIPE = Recipe(
    name="bell",
    title="Bell",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=Bell(),
    aggregate=TokenMean(),
)


def main(steps: int = 40, directory: str = "own-recipe") -> None:
    run = swarm.train(
        "tiny", environments=("char:sort",), recipe=f"{__file__}:RECIPE", directory=directory, steps=steps
    )
    print("held out:", run.held_out("sort"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40, *sys.argv[2:])
