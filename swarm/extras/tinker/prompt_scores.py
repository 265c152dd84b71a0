"""Log-probs at the places of a prompt: of the likeliest tokens, and of tokens that a client names.

Invariant: log-probs are at temperature 1, as those of the prompt itself; at most PLACES places have logits at a time.

Shape letters: L tokens of the prompt, K likeliest tokens, C named cells.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn

from swarm.learn.fused_head import Head

PLACES: Final = 512
Values = np.ndarray[Any, Any]


@torch.no_grad()
def prompt_scores(
    network: nn.Module, prompt: Sequence[int], num_top: int, rows: Sequence[int], ids: Sequence[int]
) -> tuple[list[list[tuple[int, float]]], Values]:
    """Scores tokens at each place of a prompt but the first, given the tokens before it (blocking).

    Args:
        network: causal network.
        prompt: token ids [L].
        num_top: K; 0 for none.
        rows: places [C] of the named cells, in [0, L - 1); row i is the place i + 1 of the prompt.
        ids: token ids [C] of the named cells, within the vocabulary.

    Returns:
        K pairs of token and log-prob for each of the L places, none for the first, the likeliest first, and the
        log-probs of the named cells, float32 [C].
    """
    device = next(network.parameters()).device
    body: Any = cast("Any", network).base_model  # without the output layer, whose logits of all places are gigabytes
    ids_in = torch.tensor([list(prompt)], device=device)
    hidden = body(input_ids=ids_in, use_cache=False).last_hidden_state[0, :-1]
    head = Head.of(network)
    places, tokens = np.asarray(rows, np.int64), np.asarray(ids, np.int64)
    top: list[list[tuple[int, float]]] = [[]]
    named = np.zeros(places.size, np.float32)
    for first in range(0, len(hidden), PLACES):
        logprobs = torch.log_softmax(head.logits(hidden[first : first + PLACES]), dim=-1)
        likeliest = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        pairs = zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        top += [list(zip(token_ids, values, strict=True)) for token_ids, values in pairs]
        here = (places >= first) & (places < first + PLACES)
        cells = torch.from_numpy(places[here] - first).to(device), torch.from_numpy(tokens[here]).to(device)
        named[here] = logprobs[cells].cpu().numpy()
    return top, named
