"""Sampling: the next token from logits (greedy, temperature, top-k, top-p) and its log-probability.

Invariant: a row's choice depends on its own logits and its own random number, on nothing else in the batch.

Shape letters: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch

from swarm.generation.continuous_batching import Choose, Row
from swarm.types import Sampling


def choose_greedy(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row; log-probs are not taken (zeros)."""
    del rows
    chosen = logits.argmax(dim=-1)
    return chosen, torch.zeros_like(chosen, dtype=torch.float32)


def sampler(sampling: Sampling) -> Choose:
    """Inverse-CDF sampling: one uniform number of the row for each token."""

    def choose(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(logits.float() / sampling.temperature, dim=-1)
        cumulative = truncate(logprobs.exp(), sampling).double().cumsum(dim=-1)
        uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logits.device)
        # right=True: the first entry whose cumulative exceeds the wanted mass, never one of probability 0.
        wanted = uniforms[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, wanted, right=True).clamp(max=logits.shape[-1] - 1)
        return chosen[:, 0], logprobs.gather(-1, chosen)[:, 0]

    return choose


def truncate(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
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
