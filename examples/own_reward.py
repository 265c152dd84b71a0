"""A reward of your own, with callbacks: what an answer is worth is a Python function.

    python examples/own_reward.py [STEPS] [DIRECTORY]      # tiny character model: 40 steps in about 15 seconds

The function is copied as source and runs in the confined process that scores answers: no network, no files, and what
it uses is imported inside. Partial credit is what makes a hard task learnable.
"""

import random
import sys

import swarm


def in_order(question: str, answer: str, reference: str) -> float:
    """1 for the letters in order, less for some of them."""
    import difflib

    return 1.0 if answer == reference else 0.5 * difflib.SequenceMatcher(None, answer, reference).ratio()


class Watch(swarm.Callback):
    """Prints a figure now and then, and ends the training once it is good enough."""

    def on_step(self, run: swarm.Training, metrics: swarm.Metrics) -> None:
        if metrics["step"] % 10 == 0:
            print(f"step {metrics['step']:.0f}: reward {metrics['reward']:.2f}, entropy {metrics['entropy']:.2f}")

    def on_evaluation(self, run: swarm.Training, metrics: swarm.Metrics) -> None:
        if metrics["eval_own_accuracy"] > 0.95:
            run.stop()

    def on_end(self, run: swarm.Training) -> None:
        (sample,) = run.samples(1)
        print("asked", sample.messages[-1].content, "answered", [each.actions[-1] for each in sample.samples])


def main(steps: int = 40, directory: str = "own-reward") -> None:
    source = random.Random(1)
    words = ["".join(source.choice("abcdefgh") for _ in range(3)) for _ in range(600)]
    records = [{"question": f"sort:{word}=", "answer": "".join(sorted(word))} for word in words]
    run = swarm.train("tiny", records, in_order, directory=directory, steps=steps, callbacks=[Watch()])
    print("held out:", run.held_out())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40, *sys.argv[2:])
