"""A seed for each sample, so that samples are made again by whoever asks the same question of the same weights.

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
    """The seeds of one engine; remembers how often each prompt was asked of the current weights.

    Example:
        seeds = SampleSeeds(seed=0)
        for_first_prompt, *_ = seeds.of(version, prompts, num_samples=8)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked: Counter[bytes] = Counter()

    def of(
        self,
        version: PolicyVersion,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        numbers: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """[B][samples] seeds in [0, 2^128).

        Args:
            version: whose weights are asked.
            prompts: token ids.
            num_samples: of each prompt.
            numbers: of each prompt among all that the node asks; None: how often it was asked of these weights.
        """
        lineage = f"{self._seed}/{version.policy_id}/{version.step}".encode()
        seeds: list[list[int]] = []
        for index, prompt in enumerate(prompts):
            key = hashlib.sha256(lineage + b"\0" + np.asarray(prompt, dtype="<i8").tobytes()).digest()
            number = self._asked[key] if numbers is None else numbers[index]
            self._asked[key] += 1
            seeds.append([_seed(key, number, sample) for sample in range(num_samples)])
        return seeds

    def forget(self) -> None:
        """Called when the weights are replaced: nothing has been asked of the new ones."""
        self._asked.clear()


def _seed(key: bytes, number: int, sample: int) -> int:
    return int.from_bytes(hashlib.sha256(key + struct.pack("<QQ", number, sample)).digest()[:16], "little")
