"""Functions that all engines share: seeds of samples, rollouts from generated sequences, and checks of arguments.

Invariant: a rollout marks the tokens that the model chose, turn by turn; its reward is NaN. A seed depends only on the
engine's seed, the policy id and step, the prompt, its number and the sample.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from swarm.episode import Actions
from swarm.errors import ConfigError
from swarm.interfaces import Prompts, Tokenizer
from swarm.types import FinishReason, FloatArray, IntArray, PolicyVersion, Rollout, Sampling, TokenTrace, VersionSpan

if TYPE_CHECKING:
    from swarm.model.version_digest import PublishedTensors


def to_rollout(
    tokenizer: Tokenizer,
    sampling: Sampling,
    token_ids: Sequence[int] | IntArray,
    logprobs: Sequence[float] | FloatArray | None,
    spans: Sequence[VersionSpan],
    finish: FinishReason,
    bounds: Sequence[tuple[int, int]] | None = None,
) -> Rollout:
    """Rollout of one sequence of T tokens, with NaN as its reward.

    Args:
        tokenizer: tokenizer of the engine's model.
        sampling: parameters that the tokens were drawn with.
        token_ids: [T], actions and observations.
        logprobs: [T] at the sampling temperature, NaN at observations; None if they are not known.
        spans: first token of each version that made tokens.
        finish: finish reason of the last action.
        bounds: (first token, one past the last) of each action; None: all tokens are one action.
    """
    num_tokens = len(token_ids)
    bounds = [(0, num_tokens)] if bounds is None else bounds
    action_mask, turn_ids = np.zeros(num_tokens, np.bool_), np.zeros(num_tokens, np.int16)
    for turn, (start, end) in enumerate(bounds):
        action_mask[start:end] = True
        turn_ids[start:] = turn
    trace = TokenTrace(
        token_ids=np.asarray(token_ids, np.int32),
        action_mask=action_mask,
        logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        turn_ids=turn_ids,
        spans=tuple(spans),
    )
    actions = actions_of(tokenizer, trace.token_ids.tolist(), bounds)
    return Rollout(actions=actions, trace=trace, sampling=sampling, finish=finish, claimed_reward=float("nan"))


def actions_of(tokenizer: Tokenizer, token_ids: Sequence[int], bounds: Sequence[tuple[int, int]]) -> Actions:
    """Text of each action; `bounds` as in `to_rollout`."""
    return tuple(tokenizer.decode(token_ids[start:end]) for start, end in bounds)


def by_prompt(rollouts: Sequence[Rollout], num_samples: int) -> list[list[Rollout]]:
    """Splits rollouts, `num_samples` consecutive ones per prompt, into one list per prompt."""
    return [list(rollouts[start : start + num_samples]) for start in range(0, len(rollouts), num_samples)]


def check_vocabulary(sequences: Prompts, tokenizer: Tokenizer) -> None:
    """Raises ValueError if a token id is outside the vocabulary."""
    outside = [i for sequence in sequences for i in sequence if not 0 <= i < tokenizer.vocab_size]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {tokenizer.vocab_size}")


def published_tensors(weights: object) -> "PublishedTensors":
    """The argument `weights` of `Generator.load` as tensors by name. Raises ConfigError if it is no dict."""
    if not isinstance(weights, dict):
        raise ConfigError(f"weights: expected published tensors by name, got {type(weights).__name__}")
    return cast("PublishedTensors", weights)


class SampleSeeds:
    """Source of the seeds of one engine; counts how often each prompt was answered with the current weights.

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
        """Seeds [B][num_samples] in [0, 2^128).

        Args:
            version: version of the weights.
            prompts: [B] token ids of each prompt.
            num_samples: samples of each prompt.
            numbers: [B] number of each prompt in the training sequence; None: number of earlier answers to the prompt.
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
        """Resets the counts, to be called when the weights are replaced."""
        self._num_answered.clear()


def _seed(key: bytes, number: int, sample: int) -> int:
    return int.from_bytes(hashlib.sha256(key + struct.pack("<QQ", number, sample)).digest()[:16], "little")
