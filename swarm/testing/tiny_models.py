"""Tiny models for tests: the shipped Llama, and a Qwen3 with random weights, each as a `model.source`.

Invariant: the Qwen3 differs from the Llama as Qwen3 does: normalised queries and keys, a head width that is not hidden
size / number of heads, and fewer key heads than query heads. Both have tied weights and the character tokenizer.
"""

from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from swarm.model.char_folder import write_char_tokenizer
from swarm.model.source import TINY_SHAPE
from swarm.model.tokenizer import CharTokenizer

KINDS: Final = ("llama", "qwen3")
QWEN3_SHAPE: Final[dict[str, Any]] = {
    **TINY_SHAPE,
    "model_type": "qwen3",
    "num_key_value_heads": 2,
    "head_dim": 32,  # not hidden_size / num_attention_heads, which is 24
}


def tiny_qwen3(seed: int = 0) -> nn.Module:
    """A Qwen3 of the tiny Llama's size with random weights, also in query and key norms; the CPU's RNG is unchanged."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = CharTokenizer()
    config = Qwen3Config(
        **QWEN3_SHAPE,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.eos_id,
        initializer_range=0.1,  # answers depend visibly on the prompt
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = cast("nn.Module", Qwen3ForCausalLM(config)).eval()
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if name.endswith(("q_norm.weight", "k_norm.weight")):  # all ones would hide that one is left out
                    parameter.uniform_(0.5, 1.5)
    return network


def model_source(kind: str, folder: Path) -> str:
    """`model.source` of the tiny model of `kind`, one of KINDS; a Qwen3 is written to `folder`."""
    if kind == "llama":
        return "tiny"
    cast("Any", tiny_qwen3()).save_pretrained(folder)
    write_char_tokenizer(folder)
    return str(folder)
