"""Fused output layer: log-probs and entropies straight from hidden states, and their gradient, by chunks of tokens.

Invariant: [tokens, vocabulary] never exists as a whole; at most two chunks of it do. One row of the gradient is
d/dz = b (onehot - p) - e p (z - lse + H), for upstream gradients b of the log-prob and e of the entropy.
Shape letters: n tokens, H hidden size, V vocabulary, c tokens of a chunk.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm.errors import ConfigError
from swarm.objectives.part import Prediction, Probe

CHUNK_ELEMENTS = 16 * 2**20  # logits of one chunk: 64 MiB in float32

Upstream = tuple[Tensor, Tensor | None]
"""d(loss)/d(log-prob) [n] and d(loss)/d(entropy) [n]; None where nothing uses the entropy with gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Log-probs, entropies and probes of n tokens, each at the temperature of its rollout."""

    logprobs: Tensor  # [n] nats
    entropy: Tensor  # [n] nats
    probes: Mapping[str, Tensor]  # name -> [n]


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The output layer of a network, with the scale and cap that its model family applies to logits."""

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    cap: float = 0.0  # logits become cap * tanh(logits / cap); 0 = off

    @classmethod
    def of(cls, network: nn.Module) -> "Head":
        """The head of a Hugging Face causal language model. Raises ConfigError if the output layer is not linear."""
        layer, config = cast(Any, network).get_output_embeddings(), cast(Any, network).config.get_text_config()
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"model: its output layer is a {type(layer).__name__}; only linear ones can be trained")
        scale = 1.0 / (getattr(config, "logits_scaling", None) or 1.0)  # Granite
        scale *= getattr(config, "logit_scale", None) or 1.0  # Cohere
        scale *= getattr(config, "lm_head_multiplier", None) or 1.0  # Falcon-H1
        cap = getattr(config, "final_logit_softcapping", None) or 0.0  # Gemma
        return cls(weight=layer.weight, bias=cast("Tensor | None", layer.bias), scale=scale, cap=cap)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of logits and scores: float32 at least."""
        return torch.promote_types(self.weight.dtype, torch.float32)

    def rows(self, chunk_elements: int) -> int:
        """Most tokens of a chunk of `chunk_elements` logits, at least 1."""
        return max(1, chunk_elements // self.weight.shape[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [c, V] at temperature 1 of `hidden` [c, H], in a new tensor."""
        logits = functional.linear(hidden, self.weight, self.bias).to(self.dtype)
        if self.scale != 1:
            logits = logits.mul_(self.scale)
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits


@dataclass(slots=True)
class _Chunk:
    """Logits and probabilities of one chunk of tokens; `gradient` may overwrite them."""

    head: Head
    hidden: Tensor  # [c, H]
    targets: Tensor  # int64 [c]
    temperature: Tensor  # [c]
    logits: Tensor  # [c, V], at the temperature
    probs: Tensor  # [c, V]
    scores: Scores

    @classmethod
    def compute(
        cls, head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor, probes: Mapping[str, Probe]
    ) -> "_Chunk":
        logits = head.logits(hidden)
        temperature = temperature.to(logits.dtype)
        seen = Prediction(hidden=hidden, logits=logits, targets=targets, temperature=temperature)
        probed = {name: probe(seen).to(logits.dtype) for name, probe in probes.items()}
        logits.div_(temperature[:, None])
        probs = torch.softmax(logits, dim=1)
        largest, index = logits.max(dim=1, keepdim=True)
        log_normaliser = largest - probs.gather(1, index).log()
        logprobs = (logits.gather(1, targets[:, None]) - log_normaliser).squeeze(1)
        expected = torch.bmm(probs[:, None], logits[:, :, None]).flatten()
        scores = Scores(logprobs=logprobs, entropy=log_normaliser.squeeze(1) - expected, probes=probed)
        return cls(head, hidden, targets, temperature, logits, probs, scores)

    def gradient(self, upstream: Upstream, weight_grad: Tensor | None, bias_grad: Tensor | None) -> Tensor:
        """d(loss)/d(hidden) [c, H]; adds the gradients of weight and bias to their buffers."""
        is_live = upstream[0] != 0 if upstream[1] is None else (upstream[0] != 0) | (upstream[1] != 0)
        live = is_live.nonzero().squeeze(1)  # tokens that were clipped or have no advantage cost nothing more
        hidden_grad = torch.zeros_like(self.hidden)
        if live.numel() == 0:
            return hidden_grad
        chunk = self if live.numel() == is_live.numel() else self._select(live)
        by_logprob, by_entropy = (None if each is None else each[live].to(self.probs.dtype) for each in upstream)
        assert by_logprob is not None
        by_logits = chunk._by_logits(by_logprob, by_entropy)
        if weight_grad is not None:
            _add_product(weight_grad, by_logits.T, chunk.hidden)
        if bias_grad is not None:
            bias_grad.add_(by_logits.sum(dim=0, dtype=bias_grad.dtype))
        hidden_grad[live] = by_logits.to(self.head.weight.dtype) @ self.head.weight
        return hidden_grad

    def _select(self, live: Tensor) -> "_Chunk":
        names = ("hidden", "targets", "temperature", "logits", "probs")
        scores = replace(self.scores, logprobs=self.scores.logprobs[live], entropy=self.scores.entropy[live])
        return _Chunk(head=self.head, scores=scores, **{name: getattr(self, name)[live] for name in names})

    def _by_logits(self, by_logprob: Tensor, by_entropy: Tensor | None) -> Tensor:
        """Gradient [c, V] with respect to the linear layer's output, before scale, cap and temperature."""
        factor = self.head.scale / self.temperature
        by_logprob = by_logprob * factor
        slope = (1 - (self.logits * (self.temperature[:, None] / self.head.cap)) ** 2) if self.head.cap else None
        if by_entropy is None:
            by_logits = self.probs.mul_(-by_logprob[:, None])
        else:
            expected = self._expected_logit()
            weight = self.logits.sub_(expected[:, None]).mul_((by_entropy * factor)[:, None]).add_(by_logprob[:, None])
            by_logits = self.probs.mul_(weight.neg_())
        by_logits.scatter_add_(1, self.targets[:, None], by_logprob[:, None])
        return by_logits if slope is None else by_logits.mul_(slope)

    def _expected_logit(self) -> Tensor:
        """sum_v p_v z_v = lse - H, [c]."""
        chosen = self.logits.gather(1, self.targets[:, None]).squeeze(1)
        return chosen - self.scores.logprobs - self.scores.entropy


def score_hidden(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    probes: Mapping[str, Probe] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Scores:
    """Scores of n tokens without gradient.

    Args:
        head: output layer of the network.
        hidden: [n, H], last hidden states that predict the tokens.
        targets: int64 [n], the tokens.
        temperature: [n], > 0.
        probes: further values of each token.
        chunk_elements: most logits of one chunk.
    """
    size = head.rows(chunk_elements)
    parts = [slice(start, start + size) for start in range(0, hidden.shape[0], size)]
    with torch.no_grad():
        return _concatenate(
            [_Chunk.compute(head, hidden[p], targets[p], temperature[p], probes or {}).scores for p in parts]
        )


def fused_backward(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    segments: Sequence[int],
    rule: Callable[[slice, Scores], Upstream],
    weight_grad: Tensor | None,
    bias_grad: Tensor | None = None,
    probes: Mapping[str, Probe] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Forward and backward through the output layer, chunk by chunk: each chunk of logits is computed once.

    The loss's gradient with respect to a log-prob is known only after the token is scored. So this function scores a
    run of tokens, `rule` turns their scores into upstream gradients, and the backward pass of the run follows while
    the run's logits are still in memory.

    Args:
        head: output layer of the network.
        hidden: [n, H], detached.
        targets: int64 [n].
        temperature: [n], > 0.
        segments: ends of the runs of tokens that the rule must see together, ascending, the last n.
        rule: takes a slice of tokens and their scores, returns their upstream gradients.
        weight_grad: [V, H] float buffer to which the weight's gradient is added; None if the weight is not trained.
        bias_grad: [V], likewise.
        probes: further values of each token for the rule.
        chunk_elements: most logits of one chunk. A run that exceeds it is computed twice, to score and for backward.

    Returns:
        d(loss)/d(hidden) [n, H].
    """
    size, hidden_grad = head.rows(chunk_elements), torch.empty_like(hidden)
    with torch.no_grad():
        for run in _runs(segments, size):

            def chunk(part: slice) -> _Chunk:
                return _Chunk.compute(head, hidden[part], targets[part], temperature[part], probes or {})

            parts = [slice(start, min(start + size, run.stop)) for start in range(run.start, run.stop, size)]
            if len(parts) == 1:
                only = chunk(run)
                hidden_grad[run] = only.gradient(rule(run, only.scores), weight_grad, bias_grad)
                continue
            by_logprob, by_entropy = rule(run, _concatenate([chunk(part).scores for part in parts]))
            for part in parts:
                inner = slice(part.start - run.start, part.stop - run.start)
                upstream = by_logprob[inner], None if by_entropy is None else by_entropy[inner]
                hidden_grad[part] = chunk(part).gradient(upstream, weight_grad, bias_grad)
    return hidden_grad


def _runs(segments: Sequence[int], size: int) -> list[slice]:
    """Neighbouring segments merged up to `size` tokens; a longer segment stays alone."""
    runs: list[slice] = []
    start = end = 0
    for stop in segments:
        if end > start and stop - start > size:
            runs.append(slice(start, end))
            start = end
        end = stop
    return [*runs, slice(start, end)] if end > start else runs


def _concatenate(parts: Sequence[Scores]) -> Scores:
    return Scores(
        logprobs=torch.cat([scores.logprobs for scores in parts]),
        entropy=torch.cat([scores.entropy for scores in parts]),
        probes={name: torch.cat([scores.probes[name] for scores in parts]) for name in parts[0].probes},
    )


@cache
def has_wide_product(device: torch.device, dtype: torch.dtype) -> bool:
    """True if torch adds a half-precision product to a float32 matrix (from 2.8 on CUDA); tested once."""
    ones, total = torch.ones((16, 16), dtype=dtype, device=device), torch.ones((16, 16), device=device)
    try:
        _add_wide_product(total, ones.T, ones)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def _add_wide_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    torch.addmm(total, left, right, out_dtype=total.dtype, out=total)  # pyright: ignore[reportCallIssue]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without rounding the product to half precision: rounding errors of chunks would add up."""
    if total.is_cuda and right.dtype in (torch.bfloat16, torch.float16) and has_wide_product(total.device, right.dtype):
        _add_wide_product(total, left.to(right.dtype), right)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))
