"""A language model without a network: the fake of `swarm.interfaces.Generator`, which keeps the whole contract.

Invariant: the distribution of a token is a hash of the weights and of all tokens before it, so equal weights give equal
log-probs on every machine and any other weights give others.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from swarm.errors import ConfigError, WeightsRefused
from swarm.generation.canaries import check_canaries
from swarm.generation.priority_lock import PriorityLock
from swarm.generation.sample_seeds import SampleSeeds
from swarm.interfaces import Tokenizer
from swarm.types import (
    Canary,
    FinishReason,
    FloatArray,
    LoadReport,
    PolicyVersion,
    Rollout,
    Sampling,
    TokenTrace,
    VersionSpan,
)

TOY_TENSOR: Final = "toy.weight"
TOY_SHAPE: Final = (4,)
_SPREAD: Final = 1.5  # standard deviation of logits
_END: Final = 2.0  # added to the end token's logit, so that answers end


def toy_weights(number: int) -> dict[str, FloatArray]:
    """Published tensors of a toy model; another number gives another model."""
    return {TOY_TENSOR: np.arange(number, number + TOY_SHAPE[0], dtype=np.float32)}


class ToyGenerator:
    """Samples from a hash.

    Args:
        tokenizer: whose tokens are made.
        version: of the weights at the start.
        weights: see `toy_weights`.
        seed: of all sampling.
        on_token: called between two tokens of a call of generate.

    Example:
        generator = ToyGenerator(ToyTokenizer(), PolicyVersion(policy_id="a", step=0), toy_weights(0))
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        version: PolicyVersion,
        weights: Mapping[str, FloatArray],
        seed: int = 0,
        *,
        on_token: Callable[[], None] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._version = version
        self._content = _content(weights)
        self._seeds = SampleSeeds(seed)
        self._weights = PriorityLock()
        self._on_token = on_token
        self._is_cancelled = False

    @property
    def version(self) -> PolicyVersion:
        """The weights that the next token comes from."""
        return self._version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """`num_samples` rollouts for each prompt, one after the other."""
        if sampling.temperature <= 0:
            raise ConfigError(f"sampling: temperature {sampling.temperature} must be above 0")
        self._is_cancelled = False
        with self._weights.held():
            seeds = self._seeds.of(self._version, prompts, num_samples, numbers)
        return [
            [self._rollout(prompt, sampling, seed) for seed in own] for prompt, own in zip(prompts, seeds, strict=True)
        ]

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[str]:
        """The most likely answer to each prompt."""
        with self._weights.held():
            return [self._tokenizer.decode(self._greedy(prompt, max_new_tokens)) for prompt in prompts]

    def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """[T] log-probs at temperature 1 of each token given all before it, the first NaN."""
        with self._weights.held():
            return self._score(sequences)

    def load(
        self, version: PolicyVersion, weights: object, *, canaries: Sequence[Canary] = (), in_flight: bool = False
    ) -> LoadReport:
        """Replaces the weights between two tokens, whatever `in_flight` says, or not at all."""
        content = _content(weights)
        with self._weights.held(first=True):
            before, self._content = self._content, content
            try:
                mismatch = check_canaries(version, canaries, self._score, tolerance_nats=1e-6)
            except WeightsRefused:
                self._content = before
                raise
            self._version = version
            self._seeds.forget()
        return LoadReport(mismatch_nats=mismatch)

    def cancel(self) -> None:
        """Ends the call in progress at its next token."""
        self._is_cancelled = True

    def _rollout(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Rollout:
        random = np.random.default_rng(seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        finish = FinishReason.ABORTED
        while finish is FinishReason.ABORTED and not self._is_cancelled:
            with self._weights.held():
                if not spans or spans[-1].version != self._version:
                    spans.append(VersionSpan(start=len(tokens), version=self._version))
                own = _log_softmax(self._logits([*prompt, *tokens]) / sampling.temperature)
            cumulative = np.exp(own).cumsum()
            place = np.searchsorted(cumulative, random.random() * cumulative[-1], side="right")
            tokens.append(min(int(place), len(own) - 1))
            logprobs.append(float(own[tokens[-1]]))
            if tokens[-1] in self._tokenizer.eos_ids:
                finish = FinishReason.STOP
            elif len(tokens) == sampling.max_new_tokens:
                finish = FinishReason.LENGTH
            if self._on_token is not None:
                self._on_token()
        return Rollout(
            text=self._tokenizer.decode(tokens),
            trace=TokenTrace(
                token_ids=np.asarray(tokens, np.int32),
                action_mask=np.ones(len(tokens), np.bool_),
                logprobs=np.asarray(logprobs, np.float32),
                turn_ids=np.zeros(len(tokens), np.int16),
                spans=tuple(spans) or (VersionSpan(start=0, version=self._version),),
            ),
            sampling=sampling,
            finish=finish,
            claimed_reward=float("nan"),
        )

    def _greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in self._tokenizer.eos_ids):
            tokens.append(int(self._logits([*prompt, *tokens]).argmax()))
        return tokens

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        scores = [np.full(len(sequence), np.nan, np.float32) for sequence in sequences]
        if any(not 0 <= token < self._tokenizer.vocab_size for sequence in sequences for token in sequence):
            raise ValueError(f"a token id is outside the vocabulary of {self._tokenizer.vocab_size}")
        for score, sequence in zip(scores, sequences, strict=True):
            for place in range(1, len(sequence)):
                score[place] = _log_softmax(self._logits(sequence[:place]))[sequence[place]]
        return scores

    def _logits(self, context: Sequence[int]) -> NDArray[np.float64]:
        """[V] of the token after the context."""
        key = hashlib.sha256(self._content + np.asarray(context, "<i8").tobytes()).digest()
        logits = np.random.default_rng(int.from_bytes(key, "little")).normal(size=self._tokenizer.vocab_size) * _SPREAD
        logits[list(self._tokenizer.eos_ids)] += _END
        return logits


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _content(weights: object) -> bytes:
    if not isinstance(weights, Mapping):
        raise ConfigError(f"weights: expected published tensors by name, got {type(weights).__name__}")
    state = cast("Mapping[str, Any]", weights)
    shapes = {name: np.asarray(tensor).shape for name, tensor in state.items()}
    if shapes != {TOY_TENSOR: TOY_SHAPE}:
        raise ConfigError(f"weights: the toy model has {TOY_TENSOR} {TOY_SHAPE}, got {shapes}")
    return np.asarray(state[TOY_TENSOR], "<f4").tobytes()
