"""Rollout groups of a wanted size whose content compresses like the real thing.

Invariant: a group is a function of its arguments; log-probs keep all 24 bits of noise, so that no
codec gets below their entropy, and text and token ids repeat as a natural vocabulary does.
"""

import hashlib
from typing import Final

import numpy as np

from swarm.identity import Identity
from swarm.types import (
    FinishReason,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Sampling,
    SealedGroup,
    TokenTrace,
    VersionSpan,
)
from swarm.wire.envelopes import seal_group

RUN_ID: Final = "benchmark"
GROUP_SIZE: Final = 8
VOCAB_SIZE: Final = 49_152  # of SmolLM2
_NUM_WORDS: Final = 8_000
_ZIPF: Final = 1.1  # exponent of word frequency
_PROMPT_TOKENS: Final = 32
_CREATED_AT_S: Final = 1_700_000_000.0


class GroupMaker:
    """Makes signed groups of one producer.

    Example:
        maker = GroupMaker(Identity.create(), seed=3)
        groups = maker.sealed(num_groups=64, target_bytes=4096)
    """

    def __init__(self, identity: Identity, seed: int) -> None:
        self._identity = identity
        self._random = np.random.default_rng(seed)
        words = np.random.default_rng(0)  # one language for all producers
        lengths = words.integers(1, 10, _NUM_WORDS)
        self._words = ["".join(map(chr, words.integers(97, 123, length))) for length in lengths]
        self._ids = words.permutation(VOCAB_SIZE)[:_NUM_WORDS].astype(np.int32)
        frequency = np.arange(1, _NUM_WORDS + 1) ** -_ZIPF
        self._cumulative = np.cumsum(frequency / frequency.sum())
        self._version = PolicyVersion(
            policy_id=identity.node_id, step=12, digest=hashlib.sha256(identity.public_key).digest()
        )

    def sealed(self, num_groups: int, target_bytes: int) -> list[SealedGroup]:
        """Groups of different content, each with a sealed body of about `target_bytes`."""
        mean_tokens = self._fit(target_bytes)
        return [seal_group(self._group(number, mean_tokens), self._identity) for number in range(num_groups)]

    def _fit(self, target_bytes: int) -> float:
        """Mean response tokens that give the wanted sealed size, by proportion over a few samples."""
        tokens = target_bytes / (8.0 * GROUP_SIZE)
        for _ in range(6):
            size = np.mean([seal_group(self._group(n, tokens), self._identity).size_bytes for n in range(4)])
            tokens = max(2.0, tokens * (1 + (target_bytes - float(size)) / target_bytes))
        return tokens

    def _group(self, task_id: int, mean_tokens: float) -> RolloutGroup:
        return RolloutGroup(
            run_id=RUN_ID,
            producer=self._identity.node_id,
            policy_id=self._identity.node_id,
            env="chain_sum",
            task_id=task_id,
            tokenizer_digest=hashlib.sha256(b"tokenizer").digest(),
            prompt_ids=self._ids[self._ranks(_PROMPT_TOKENS)],
            rollouts=tuple(self._rollout(mean_tokens) for _ in range(GROUP_SIZE)),
            verifier="reasoning_gym/0.1",
            created_at_s=_CREATED_AT_S,
        )

    def _rollout(self, mean_tokens: float) -> Rollout:
        num_tokens = max(1, round(mean_tokens * self._random.uniform(0.5, 1.5)))
        ranks = self._ranks(num_tokens)
        logprobs = -self._random.exponential(0.7, num_tokens).astype(np.float32)
        trace = TokenTrace(
            token_ids=self._ids[ranks],
            action_mask=np.ones(num_tokens, np.bool_),
            logprobs=logprobs,
            turn_ids=np.zeros(num_tokens, np.int16),
            spans=(VersionSpan(start=0, version=self._version),),
        )
        return Rollout(
            actions=(" ".join(self._words[rank] for rank in ranks),),
            trace=trace,
            sampling=Sampling(temperature=1.0, max_new_tokens=512),
            finish=FinishReason.STOP,
            claimed_reward=float(self._random.integers(0, 2)),
        )

    def _ranks(self, count: int) -> np.ndarray:
        """[count] ranks of words, by frequency."""
        drawn = np.searchsorted(self._cumulative, self._random.random(count))
        return np.minimum(drawn, _NUM_WORDS - 1)
