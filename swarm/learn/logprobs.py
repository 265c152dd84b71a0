"""Scores the trained tokens of packed rows: runs the network's body, then the output layer where it predicts them.

Invariant: the output layer is applied only where a trained token is predicted, a chunk at a time.
Shape letters: B rows, S tokens of a row, n trained tokens, H hidden size.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from swarm.errors import ConfigError
from swarm.learn.fused_head import CHUNK_ELEMENTS, Head, Scores, score_hidden
from swarm.learn.packing import PackedRows
from swarm.objectives.part import Probe


def score_tokens(
    network: nn.Module,
    packed: PackedRows,
    probes: Mapping[str, Probe] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Scores:
    """Log-probability of each trained token, entropy of the predicted distribution, and probe values.

    Args:
        network: a Hugging Face causal language model (sdpa or eager attention).
        packed: n trained tokens.
        probes: further numbers of a token, by name.
        chunk_elements: most logits of one chunk.

    Returns:
        Nats [n] at the temperature of each token's rollout, float32 (float64 for a float64 network), without gradient.

    Raises:
        ConfigError: the model's attention window is shorter than a row, or its output layer is not linear.
    """
    with torch.no_grad():
        hidden = hidden_states(network, packed)
        return score_hidden(Head.of(network), hidden, packed.targets, packed.temperature, probes, chunk_elements)


def check_head(network: nn.Module) -> None:
    """Checks that `Head` reproduces the network's logits: the log-probs of another network would be wrong.

    Raises:
        ConfigError: the network's logits of a few tokens differ from those of `Head`.
    """
    model = cast(Any, network)
    head = Head.of(network)
    token_ids = torch.arange(4, device=head.weight.device)[None] % head.weight.shape[0]
    with torch.no_grad():
        own = cast(Tensor, model(input_ids=token_ids, use_cache=False).logits)[0].to(head.dtype)
        ours = head.logits(model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state[0])
    if float((ours - own).abs().max()) > 0.05 * float(own.abs().max()) + 1e-3:
        raise ConfigError(
            f"model: {type(network).__name__} changes its logits in a way that the learner does not know; "
            "its log-probs would be wrong, choose another architecture"
        )


def hidden_states(network: nn.Module, packed: PackedRows) -> Tensor:
    """Last hidden states [n, H] that predict the trained tokens. Raises ConfigError for a short attention window."""
    model = cast(Any, network)
    window = getattr(model.config, "sliding_window", None)
    if window is not None and packed.token_ids.shape[1] > window:
        raise ConfigError(
            f"a row of {packed.token_ids.shape[1]} tokens exceeds the model's sliding window {window}: "
            "lower learner.token_budget"
        )
    # Additive and finite: right for sdpa and eager alike, and no row of a softmax is all -inf.
    dtype = model.get_input_embeddings().weight.dtype
    allowed = packed.attention_mask()[:, None]
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)
    output = model.base_model(
        input_ids=packed.token_ids, attention_mask=mask, position_ids=packed.position_ids, use_cache=False
    )
    return cast(Tensor, output.last_hidden_state)[packed.rows, packed.columns]
