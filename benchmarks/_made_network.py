"""Networks of a known shape with random weights, made on their device: for time and memory, which are not the weights'.

Invariant: nothing learns from these networks; a table that measures one names it made-up.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import torch
from torch import nn

from swarm.episode import Message
from swarm.types import Digest, Task

SMOLLM2: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
ONE_BILLION: Final[dict[str, Any]] = {  # 1.1e9 parameters
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
SMALL: Final[dict[str, Any]] = {  # what a CPU makes in seconds
    **ONE_BILLION,
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def made_network(shape: dict[str, Any], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A Llama of that shape in evaluation mode; the weights are the same for the same kind of device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {name: value for name, value in shape.items() if name != "model_type"}
    config = LlamaConfig(**settings, max_position_embeddings=4096, bos_token_id=None, eos_token_id=0, pad_token_id=0)
    config.dtype = dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            return cast("nn.Module", LlamaForCausalLM(config)).eval()
    finally:
        torch.set_default_dtype(before)


class NumberTokenizer:
    """Implements `swarm.interfaces.Tokenizer` for a vocabulary of any size, whose tokens are written as numbers."""

    def __init__(self, vocab_size: int) -> None:
        self.digest: Digest = bytes(32)
        self.vocab_size = vocab_size
        self.eos_ids = frozenset({0})

    def encode_prompt(self, task: Task) -> list[int]:
        """Numbers of the last message."""
        return [int(word) for word in task.messages[-1].content.split()]

    def encode_observation(self, messages: Sequence[Message], is_ended: bool) -> list[int]:
        """Numbers of the messages."""
        return [int(word) for message in messages for word in message.content.split()]

    def encode_response(self, text: str) -> list[int]:
        """Numbers of the text and the end."""
        return [*map(int, text.split()), 0]

    def byte_lengths(self, text: str) -> list[int]:
        """All of its bytes count for the first token."""
        return [len(text.encode()), *[0] * len(text.split())]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Numbers with spaces between."""
        return " ".join(map(str, token_ids))
