"""An exact generator over any Hugging Face causal language model.

Invariant: the log-probability of a token is that of its own row, whatever else is in the batch, and so is the
random number that chose it: a rollout depends on (seed, version, prompt, number of the question, sample).

Shape letters: B prompts, R rows (B x samples, finished ones dropped), P longest prompt, V vocabulary.
"""

import hashlib
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from swarm.errors import ConfigError
from swarm.interfaces import TextCodec
from swarm.model import PublishedTensors, load_published
from swarm.types import FinishReason, PolicyVersion, Rollout, Sampling, TokenTrace, VersionSpan

# (logits [R, V] as the model gave them, tokens so far, rows [R]) -> chosen ids [R] and their log-probs [R].
Choose = Callable[[torch.Tensor, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class _Row:
    """One response in the making."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish: FinishReason = FinishReason.ABORTED


class TransformersGenerator:
    """Samples from a network that it owns; implements `swarm.interfaces.Generator`.

    Args:
        network: a transformers causal LM in eval mode, used by nobody else (load another copy, or deepcopy).
        codec: its tokenizer.
        version: the weights it holds.
        seed: of all sampling.
        max_rows: most sequences decoded together; bounds memory, changes no result.

    Example:
        generator = TransformersGenerator(model.network, model.codec, PolicyVersion(policy_id="a", step=0), seed=0)
        rollouts = generator.generate([codec.encode_prompt(task)], 8, Sampling(max_new_tokens=6))
    """

    def __init__(
        self, network: nn.Module, codec: TextCodec, version: PolicyVersion, seed: int, *, max_rows: int = 64
    ) -> None:
        assert max_rows > 0, max_rows
        self._network = network.eval()
        self._codec = codec
        self._version = version
        self._seed = seed
        self._max_rows = max_rows
        self._asked: Counter[bytes] = Counter()  # how often a prompt was asked of these weights
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

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
        """`num_samples` rollouts for each prompt (blocking). Rewards are NaN.

        Args:
            prompts: token ids, none empty.
            num_samples: rollouts of each.
            sampling: how tokens are drawn.
            numbers: of each prompt among all that the node asks; None: how often it was asked of these weights.

        Raises:
            ConfigError: a temperature of 0 or a repetition penalty, which this engine does not apply.
        """
        if sampling.temperature <= 0 or sampling.repetition_penalty != 1.0:
            raise ConfigError(
                f"sampling: temperature {sampling.temperature} must be above 0 and repetition_penalty "
                f"{sampling.repetition_penalty} must be 1 with the transformers engine"
            )
        with self._lock:
            self._cancelled.clear()
            uniforms = self._uniforms(prompts, num_samples, sampling.max_new_tokens, numbers)
            groups: list[list[Rollout]] = [[] for _ in prompts]
            for indices in self._chunks(prompts, num_samples):
                chosen = uniforms[indices].reshape(len(indices) * num_samples, sampling.max_new_tokens)
                choose = _sampler(sampling, torch.from_numpy(chosen))
                rows = self._decode([prompts[i] for i in indices], num_samples, sampling.max_new_tokens, choose)
                for place, index in enumerate(indices):
                    own = rows[place * num_samples : (place + 1) * num_samples]
                    groups[index] = [self._rollout(row, sampling) for row in own]
            return groups

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[str]:
        """The greedy answer text for each prompt (blocking)."""
        with self._lock:
            self._cancelled.clear()
            texts = [""] * len(prompts)
            for indices in self._chunks(prompts, 1):
                rows = self._decode([prompts[i] for i in indices], 1, max_new_tokens, _choose_greedy)
                for index, row in zip(indices, rows, strict=True):
                    texts[index] = self._codec.decode(row.tokens)
            return texts

    def load(self, version: PolicyVersion, weights: object) -> None:
        """Replaces the weights by published tensors, after the call in progress; all or nothing.

        Raises:
            ConfigError: they do not fit this network, which then keeps its weights and version.
        """
        if not isinstance(weights, dict):
            raise ConfigError(f"weights: expected published tensors by name, got {type(weights).__name__}")
        with self._lock:
            load_published(self._network, cast("PublishedTensors", weights))
            self._version = version
            self._asked.clear()

    def cancel(self) -> None:
        """Ends the call in progress at its next token (from any thread); unfinished rollouts come back ABORTED."""
        self._cancelled.set()

    def _uniforms(
        self, prompts: Sequence[Sequence[int]], num_samples: int, num_tokens: int, numbers: Sequence[int] | None
    ) -> np.ndarray[Any, Any]:
        """[B, samples, tokens] float64 in [0, 1), each row from a key of its own."""
        lineage = f"{self._seed}/{self._version.policy_id}/{self._version.step}".encode()
        uniforms = np.empty((len(prompts), num_samples, num_tokens))
        for index, prompt in enumerate(prompts):
            key = hashlib.sha256(lineage + b"\0" + np.asarray(prompt, dtype="<i8").tobytes()).digest()
            number = self._asked[key] if numbers is None else numbers[index]
            self._asked[key] += 1
            for sample in range(num_samples):
                row = hashlib.sha256(key + struct.pack("<QQ", number, sample)).digest()
                uniforms[index, sample] = np.random.default_rng(int.from_bytes(row[:16], "little")).random(num_tokens)
        return uniforms

    def _chunks(self, prompts: Sequence[Sequence[int]], num_samples: int) -> Iterator[list[int]]:
        """Indices of prompts that are decoded together; similar lengths, so that little is padded."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        size = max(1, self._max_rows // num_samples)
        return (order[start : start + size] for start in range(0, len(order), size))

    @torch.inference_mode()
    def _decode(
        self, prompts: Sequence[Sequence[int]], num_samples: int, max_new_tokens: int, choose: Choose
    ) -> list[_Row]:
        network: Any = self._network
        rows = [_Row() for _ in range(len(prompts) * num_samples)]
        logits, mask, cache = self._prefill(prompts, num_samples)
        live = torch.arange(len(rows), device=logits.device)  # [R] row of each cache entry
        is_live = torch.ones_like(live, dtype=torch.bool)
        for position in range(max_new_tokens):
            if self._cancelled.is_set():
                return rows  # those that stopped say so, the others are ABORTED
            chosen, logprobs = choose(logits, position, live)
            is_live &= self._append(rows, live, is_live, chosen, logprobs)
            num_live = int(is_live.sum())
            if position + 1 == max_new_tokens or num_live == 0:
                break
            if num_live <= live.shape[0] // 2:
                kept = is_live.nonzero()[:, 0]
                cache.batch_select_indices(kept)
                chosen, mask, live, is_live = chosen[kept], mask[kept], live[kept], is_live[kept]
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
            output = network(
                input_ids=chosen[:, None],
                attention_mask=mask,
                position_ids=mask.sum(dim=1, keepdim=True) - 1,
                past_key_values=cache,
                use_cache=True,
            )
            logits = output.logits[:, -1]
        for row in rows:
            if row.finish is FinishReason.ABORTED:
                row.finish = FinishReason.LENGTH
        return rows

    def _prefill(self, prompts: Sequence[Sequence[int]], num_samples: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Each prompt once, left-padded, then one row per sample: logits [R, V], mask [R, P], cache."""
        from transformers import DynamicCache

        network: Any = self._network
        assert all(len(prompt) > 0 for prompt in prompts), "an empty prompt has no next token"
        longest = max(len(prompt) for prompt in prompts)
        pads = torch.tensor([longest - len(prompt) for prompt in prompts])
        padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = (torch.arange(longest) >= pads[:, None]).long()
        padded, mask = padded.to(network.device), mask.to(network.device)
        cache: Any = DynamicCache(config=network.config)
        output = network(
            input_ids=padded,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_repeat_interleave(num_samples)
        return (
            output.logits[:, -1].repeat_interleave(num_samples, dim=0),
            mask.repeat_interleave(num_samples, dim=0),
            cache,
        )

    def _append(
        self, rows: list[_Row], live: torch.Tensor, is_live: torch.Tensor, chosen: torch.Tensor, logprobs: torch.Tensor
    ) -> torch.Tensor:
        """Adds a token to each live row; [R] True where the row goes on."""
        goes_on: list[bool] = []
        for row_index, was_live, token, logprob in zip(
            live.tolist(), is_live.tolist(), chosen.tolist(), logprobs.tolist(), strict=True
        ):
            if was_live:
                row = rows[row_index]
                row.tokens.append(token)
                row.logprobs.append(logprob)
                if token in self._codec.eos_ids:
                    row.finish = FinishReason.STOP
            goes_on.append(was_live and token not in self._codec.eos_ids)
        return torch.tensor(goes_on, device=live.device)

    def _rollout(self, row: _Row, sampling: Sampling) -> Rollout:
        num_tokens = len(row.tokens)
        trace = TokenTrace(
            token_ids=np.asarray(row.tokens, dtype=np.int32),
            action_mask=np.ones(num_tokens, dtype=np.bool_),
            logprobs=np.asarray(row.logprobs, dtype=np.float32),
            turn_ids=np.zeros(num_tokens, dtype=np.int16),
            spans=(VersionSpan(start=0, version=self._version),),
        )
        return Rollout(
            text=self._codec.decode(row.tokens),
            trace=trace,
            sampling=sampling,
            finish=row.finish,
            claimed_reward=float("nan"),
        )


def _choose_greedy(logits: torch.Tensor, position: int, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    del position, live
    chosen = logits.argmax(dim=-1)
    return chosen, torch.zeros_like(chosen, dtype=torch.float32)


def _sampler(sampling: Sampling, uniforms: torch.Tensor) -> Choose:
    """Inverse-CDF sampling: `uniforms` [rows, tokens] holds one number per token."""

    def choose(logits: torch.Tensor, position: int, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
        cumulative = _truncated(logprobs.exp(), sampling).double().cumsum(dim=-1)
        wanted = uniforms[live.cpu(), position].to(logits.device)[:, None] * cumulative[:, -1:]
        # right=True: the first entry whose cumulative exceeds the wanted mass, never one of probability 0.
        chosen = torch.searchsorted(cumulative, wanted, right=True).clamp(max=logits.shape[-1] - 1)
        return chosen[:, 0], logprobs.gather(-1, chosen)[:, 0]

    return choose


def _truncated(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[R, V] with the entries outside top-k and top-p set to 0 (not renormalised)."""
    if sampling.top_k > 0:
        least = probabilities.topk(min(sampling.top_k, probabilities.shape[-1]), dim=-1).values[:, -1:]
        probabilities = torch.where(probabilities >= least, probabilities, 0.0)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        total = ordered.sum(dim=-1, keepdim=True)
        is_outside = ordered.cumsum(dim=-1) - ordered >= sampling.top_p * total  # the most likely entry always stays
        is_outside[:, 0] = False
        probabilities = probabilities.masked_fill(torch.zeros_like(is_outside).scatter(-1, order, is_outside), 0.0)
    return probabilities
