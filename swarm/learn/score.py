"""Log-probabilities and entropies of trained tokens, without ever holding the full logits.

Invariant: the output layer is applied only where a trained token is predicted, a chunk at a time, and
its activations are recomputed in the backward pass; peak memory is one chunk of [tokens, vocabulary].
Shape letters: B rows, S tokens of a row, n trained tokens, H hidden size, V vocabulary.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarm.errors import ConfigError
from swarm.learn.packing import PackedRows

CHUNK_ELEMENTS = 8 * 2**20  # logits of one chunk: 32 MiB in float32


def token_logprobs(
    network: nn.Module, packed: PackedRows, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Tensor, Tensor]:
    """Log-probability of each trained token and entropy of its distribution, at its rollout's temperature.

    Args:
        network: a Hugging Face causal language model (sdpa or eager attention).
        packed: n trained tokens.
        chunk_elements: most logits that exist at one time.

    Returns:
        logprobs [n] and entropy [n] in nats, float32 (float64 for a float64 network), differentiable.

    Raises:
        ConfigError: the model's attention window is shorter than a row.
    """
    hidden = _hidden_states(network, packed)[packed.rows, packed.columns]
    head = cast(nn.Module, cast(Any, network).get_output_embeddings())
    chunk = max(1, chunk_elements // int(cast(Any, network).config.vocab_size))
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        arguments = (network, head, hidden[part], packed.targets[part], packed.temperature[part])
        if torch.is_grad_enabled():
            outputs = checkpoint(_score_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
        else:
            outputs = _score_chunk(*arguments)
        logprob, entropy = cast(tuple[Tensor, Tensor], outputs)
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies)


def _score_chunk(
    network: nn.Module, head: nn.Module, hidden: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    logits = _final_logits(network, head(hidden))
    logits = logits / temperature[:, None].to(logits.dtype)
    log_normaliser = torch.logsumexp(logits, dim=-1)
    logprob = logits.gather(1, targets[:, None]).squeeze(1) - log_normaliser
    expected = (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return logprob, log_normaliser - expected


def _final_logits(network: nn.Module, logits: Tensor) -> Tensor:
    """Logits in at least float32, with what some families do after the output layer."""
    config = cast(Any, network).config
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scaling := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scaling
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


def _hidden_states(network: nn.Module, packed: PackedRows) -> Tensor:
    model = cast(Any, network)
    window = getattr(model.config, "sliding_window", None)
    if window is not None and packed.token_ids.shape[1] > window:
        raise ConfigError(
            f"a row of {packed.token_ids.shape[1]} tokens exceeds the model's sliding window {window}: "
            "lower learner.token_budget or set learner.share_prompt = false"
        )
    # Additive and finite: right for sdpa and eager alike, and no row of a softmax is all -inf.
    dtype = model.get_input_embeddings().weight.dtype
    allowed = packed.attention_mask()[:, None]
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)
    output = model.base_model(
        input_ids=packed.token_ids, attention_mask=mask, position_ids=packed.position_ids, use_cache=False
    )
    return cast(Tensor, output.last_hidden_state)
