"""Per-sample seeds: the same prompt, number and weights give the same samples again.

Invariant: a seed depends on the engine's seed, the policy version, the prompt, its number and the sample, on nothing
else.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence

import numpy as np

from swarm.types import PolicyVersion


class SampleSeeds:
    """The seeds of one engine; counts how often each prompt was answered with the current weights.

    Example:
        seeds = SampleSeeds(seed=0)
        for_first_prompt, *_ = seeds.of(version, prompts, num_samples=8)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_answered: Counter[bytes] = Counter()

    def of(
        self,
        version: PolicyVersion,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        numbers: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """[B][samples] seeds in [0, 2^128).

        Args:
            version: of the weights.
            prompts: token ids.
            num_samples: of each prompt.
            numbers: of each prompt in the node's training sequence; None: how often these weights answered it.
        """
        lineage = f"{self._seed}/{version.policy_id}/{version.step}".encode()
        seeds: list[list[int]] = []
        for index, prompt in enumerate(prompts):
            key = hashlib.sha256(lineage + b"\0" + np.asarray(prompt, dtype="<i8").tobytes()).digest()
            number = self._num_answered[key] if numbers is None else numbers[index]
            self._num_answered[key] += 1
            seeds.append([_seed(key, number, sample) for sample in range(num_samples)])
        return seeds

    def forget(self) -> None:
        """Starts counting anew; called when the weights are replaced."""
        self._num_answered.clear()


def _seed(key: bytes, number: int, sample: int) -> int:
    return int.from_bytes(hashlib.sha256(key + struct.pack("<QQ", number, sample)).digest()[:16], "little")
