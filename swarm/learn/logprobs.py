"""Scores the trained tokens of packed rows: runs the network's body, then the output layer on the hidden states needed.

Invariant: the output layer is applied only where a trained token is predicted, a chunk at a time.
Shape letters: B rows, S tokens of a row, n trained tokens, H hidden size.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from swarm.errors import ConfigError
from swarm.learn.fused_head import CHUNK_ELEMENTS, Head, Scores, score_hidden
from swarm.learn.packing import PackedRows, pack
from swarm.objectives.batch import weighted_rows
from swarm.objectives.part import Probe

_CHECKED_WINDOW: Final = 3


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
        ConfigError: the network's output layer is not linear.
    """
    with torch.no_grad():
        hidden = hidden_states(network, packed)
        return score_hidden(Head.of(network), hidden, packed.targets, packed.temperature, probes, chunk_elements)


def check_head(network: nn.Module) -> None:
    """Checks that a packed row gets the logits of the network's own forward pass: other log-probs would be wrong.

    An attention window counts as 3 tokens for the check, so that a few tokens exceed it.

    Raises:
        ConfigError: the learner does not know the network's output layer, masks or positions.
    """
    model, head = cast(Any, network), Head.of(network)
    config = model.config.get_text_config()
    device, window = head.weight.device, getattr(config, "sliding_window", None)
    ids = torch.arange(12, device=device) % head.weight.shape[0]  # a prompt of 4, two responses of 4
    whole = torch.stack([ids[:8], torch.cat([ids[:4], ids[8:]])])
    try:
        if window is not None:
            config.sliding_window = min(window, _CHECKED_WINDOW)
        with torch.no_grad():
            own = cast(Tensor, model(input_ids=whole, use_cache=False).logits)[:, 3:7].flatten(0, 1).to(head.dtype)
            ours = head.logits(hidden_states(network, _two_responses(ids)))
        is_equal = float((ours - own).abs().max()) <= 0.05 * float(own.abs().max()) + 1e-3  # False for NaN, too
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"model: {type(network).__name__} cannot be trained here: {error}") from error
    finally:
        if window is not None:
            config.sliding_window = window
    if not is_equal:
        raise ConfigError(
            f"model: {type(network).__name__} computes its logits in a way that the learner does not know; "
            "its log-probs would be wrong, choose another architecture"
        )


def hidden_states(network: nn.Module, packed: PackedRows) -> Tensor:
    """Last hidden states [n, H] that predict the trained tokens."""
    model = cast(Any, network)
    output = model.base_model(
        input_ids=packed.token_ids,
        attention_mask=_masks(model, packed),
        position_ids=packed.position_ids,
        use_cache=False,
    )
    return cast(Tensor, output.last_hidden_state)[packed.rows, packed.columns]


def _masks(model: Any, packed: PackedRows) -> Tensor | dict[str, Tensor]:
    """The mask [B, 1, S, S] of all layers or, where only some have a window, the masks by kind of layer."""
    dtype, config = model.get_input_embeddings().weight.dtype, model.config.get_text_config()
    allowed = packed.attention_mask()[:, None]
    window: int | None = getattr(config, "sliding_window", None)
    kinds: set[str] = set(getattr(config, "layer_types", None) or ())
    if window is None or kinds == {"full_attention"}:
        return _additive(allowed, dtype)
    # Positions, not columns: between a prompt and its response lie other responses.
    distance = packed.position_ids[:, :, None] - packed.position_ids[:, None]
    in_window = _additive(allowed & (distance < window)[:, None], dtype)
    if "full_attention" not in kinds:
        return in_window
    return {"full_attention": _additive(allowed, dtype), "sliding_attention": in_window}


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    # Finite: right for sdpa and eager alike, and no row of a softmax is all -inf.
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


def _two_responses(ids: Tensor) -> PackedRows:
    """One row of the prompt ids[:4] with the responses ids[4:8] and ids[8:]."""
    responses = ids[4:].view(2, 4)
    rows = weighted_rows(responses, responses >= 0, torch.zeros_like(responses).float(), [ids[:4].tolist()] * 2)
    (packed,) = pack(replace(rows, group_index=torch.zeros_like(rows.group_index)), token_budget=10)
    return packed
