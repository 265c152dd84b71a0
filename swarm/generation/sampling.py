"""Sampling: the next token from logits (greedy, temperature, top-k, top-p) and its log-probability.

Invariant: a row's choice depends on its own logits and its own random number, on nothing else in the batch.

Shape letters: R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch

from swarm.generation.row import Row
from swarm.types import Sampling


def choose(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each row, as its sampling says.

    Inverse-CDF sampling, one uniform number of the row for each token; at temperature 0 the likeliest one.

    Args:
        logits: [R, V] as the model gave them.
        rows: [R] they are for; those with `num_top` keep as many of the likeliest tokens.

    Returns:
        Ids [R], and their log-probs [R] at the row's temperature before any truncation (at temperature 0: at 1).
    """
    kinds = list(dict.fromkeys(row.sampling for row in rows))
    if len(kinds) == 1:
        return _choose_alike(logits, rows, kinds[0])
    chosen = torch.empty(len(rows), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(rows), device=logits.device)
    for kind in kinds:
        places = [place for place, row in enumerate(rows) if row.sampling == kind]
        index = torch.tensor(places, device=logits.device)
        chosen[index], logprobs[index] = _choose_alike(logits[index], [rows[place] for place in places], kind)
    return chosen, logprobs


def _choose_alike(logits: torch.Tensor, rows: Sequence[Row], sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    if any(row.num_top for row in rows):
        for row, own in zip(rows, logprobs, strict=True):
            values, ids = own.topk(min(row.num_top, own.numel()))
            row.top.append(list(zip(ids.tolist(), values.tolist(), strict=True)))
    if sampling.temperature == 0:
        chosen = logits.argmax(dim=-1)[:, None]
    else:
        cumulative = truncate(logprobs.exp(), sampling).double().cumsum(dim=-1)
        uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64, device=logits.device)
        # right=True: the first entry whose cumulative exceeds the wanted mass, never one of probability 0.
        wanted = uniforms[:, None] * cumulative[:, -1:]
        chosen = torch.searchsorted(cumulative, wanted, right=True).clamp(max=logits.shape[-1] - 1)
    return chosen[:, 0], logprobs.gather(-1, chosen)[:, 0]


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
