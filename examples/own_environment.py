"""An environment of your own: episodes of several turns, with rewards by name.

    python examples/own_environment.py [STEPS] [DIRECTORY]      # tiny character model: 20 steps in about 15 seconds

The model guesses a digit and reads back "higher" or "lower". An environment is a pure function of the task's
number and the actions, so that every node can replay what another one played (docs/environments.md). Of one turn it
would be an `AnswerEnvironment`: two methods, `build` and `judge` (CONTRIBUTING.md).
"""

import sys

import swarm
from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.episode import Action, Message, Transition


class Guess(NumberedEnvironment):
    """Guess a digit within three turns."""

    max_turns = 3

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config, verifier="guess/1")

    def build(self, task_id: int) -> Problem:
        return Problem(question=f"guess {task_id}=", reference=str(task_id % 10))

    def begin(self, problem: Problem) -> "Game":
        return Game(int(problem.reference))


class Game:
    """One episode."""

    def __init__(self, right: int) -> None:
        self.right = right

    def step(self, action: Action) -> Transition:
        text = action.text.strip()
        guess = int(text) if text in tuple("0123456789") else -1
        if guess == self.right:
            return Transition(is_end=True, rewards={"outcome": 1.0})
        near = 0.5 * (1 - abs(guess - self.right) / 10) if guess >= 0 else 0.0  # where the turns end here
        word = "higher" if guess < self.right else "lower"
        return Transition(messages=(Message(role="user", content=word),), rewards={"outcome": near})


def main(steps: int = 20, directory: str = "own-environment") -> None:
    run = swarm.train("tiny", environments=(f"plugin:{__file__}:Guess",), directory=directory, steps=steps)
    print("held out:", run.held_out("guess"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, *sys.argv[2:])
