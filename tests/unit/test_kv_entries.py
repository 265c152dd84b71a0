"""Prefill of several prompts: each as if it were alone, what they begin with computed once where that is possible."""

from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from swarm.generation.kv_entries import advance, prefill

SHAPE: Any = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def full_attention() -> torch.nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


def window_of_8() -> torch.nn.Module:
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))


def alibi_by_place() -> torch.nn.Module:
    return MptForCausalLM(
        MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=32, max_seq_len=64, initializer_range=0.3)
    )


def local_attention() -> torch.nn.Module:
    sizes: Any = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 32, "max_position_embeddings": 64}
    kinds: Any = {"attention_types": [[["global", "local"], 1]], "window_size": 8, "initializer_range": 0.3}
    return GPTNeoForCausalLM(GPTNeoConfig(**sizes, **kinds))


def prompts_of(num_shared: int, lengths: tuple[int, ...]) -> list[list[int]]:
    ids = torch.randint(2, 32, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1)).tolist()
    return [[*ids[0][:num_shared], *own[num_shared:length]] for own, length in zip(ids, lengths, strict=True)]


@pytest.mark.parametrize(
    ("make", "num_shared", "is_shared"),
    [
        (full_attention, 10, True),
        (full_attention, 3, False),
        (window_of_8, 10, False),
        (alibi_by_place, 10, False),
        (local_attention, 10, False),
    ],
)
@torch.inference_mode()
def test_each_prompt_is_as_if_it_were_alone(make: Any, num_shared: int, is_shared: bool) -> None:
    torch.manual_seed(0)
    network = make().eval()
    prompts, passes = prompts_of(num_shared, (19, 13, 16)), list[tuple[int, ...]]()
    network.register_forward_pre_hook(
        lambda _, __, given: passes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    entries, logits = prefill(network, prompts)
    num_passes = len(passes)
    following = [[7], [8], [9]]
    _, after = advance(network, entries, following)
    for row, prompt in enumerate(prompts):
        whole = network(input_ids=torch.tensor([[*prompt, *following[row]]])).logits[0]
        torch.testing.assert_close(logits[row], whole[-2], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(after[row], whole[-1], atol=1e-5, rtol=1e-5)
    assert passes[:num_passes] == ([(1, 10), (3, 9)] if is_shared else [(3, 19)])
