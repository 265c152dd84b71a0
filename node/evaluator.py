"""Evaluates the policy in training where no single process has its network as a whole.

Invariant: every answer and score is of the learner's newest version.
"""

from collections.abc import Sequence

from torch import nn

from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import TextCodec
from swarm.learn.learner import PolicyLearner
from swarm.types import FloatArray


class NewestWeights(TransformersGenerator):
    """An engine on a network of its own that takes what the learner published last before it is used."""

    def __init__(self, network: nn.Module, codec: TextCodec, learner: PolicyLearner, seed: int) -> None:
        super().__init__(network, codec, learner.version, seed)
        self._learner = learner
        self.load(*learner.snapshot())

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[str]:
        """As any engine, with the newest weights."""
        self._take()
        return super().greedy(prompts, max_new_tokens)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """As any engine, with the newest weights."""
        self._take()
        return super().score(sequences)

    def _take(self) -> None:
        version, weights = self._learner.snapshot()
        if version != self.version:
            self.load(version, weights)
