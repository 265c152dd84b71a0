"""Tiny models for tests: the shipped Llama, and a Qwen3 with random weights, each as a `model.source`.

Invariant: the Qwen3 differs from the Llama as Qwen3 does: normalised queries and keys, a head width that is not hidden
size / number of heads, and fewer key heads than query heads. Both have tied weights and the character tokenizer.
"""

import json
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from swarm.config import LearnerConfig, ReplayConfig
from swarm.learn.learner import PolicyLearner
from swarm.model.char_folder import write_char_tokenizer
from swarm.model.network import tiny_network
from swarm.model.source import TINY_SHAPE
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.fallbacks import RecipeSet
from swarm.objectives.methods import load_recipe
from swarm.objectives.recipe import Recipe

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


def write_small_tokenizer(
    folder: Path, split: Any = None, adds: str | None = None, **settings: Any
) -> tuple[int, dict[str, int]]:
    """Writes a byte-level BPE tokenizer of a few hundred tokens to a new folder, as models come in.

    Args:
        split: pre-tokenizer; None: that of GPT-2.
        adds: token that the tokenizer puts before a text unless it is asked for no special tokens.
        settings: entries of tokenizer_config.json.

    Returns:
        Number of tokens, and their ids.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir()
    made: Any = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["the cat sat on the mat, said the hat", "12 times 34 is 408", "caf\u00e9"] * 4, trainer)
    if adds is not None:
        made.post_processor = processors.TemplateProcessing(f"{adds} $A", None, [(adds, made.token_to_id(adds))])
    made.save(str(folder / "tokenizer.json"))
    default = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(default | settings))
    return made.get_vocab_size(), made.get_vocab()


def model_source(kind: str, folder: Path) -> str:
    """`model.source` of the tiny model of `kind`, one of KINDS; a Qwen3 is written to `folder`."""
    if kind == "llama":
        return "tiny"
    cast("Any", tiny_qwen3()).save_pretrained(folder)
    write_char_tokenizer(folder)
    return str(folder)


def make_learner(dir: Path, recipe: str | Recipe | RecipeSet = "grpo", **changes: Any) -> PolicyLearner:
    """A learner with checkpoints in `dir`, over a tiny network; `changes` replace its other arguments."""
    given: dict[str, Any] = {
        "network": changes.pop("network", None) or tiny_network(seed=1),
        "tokenizer": CharTokenizer(),
        "config": LearnerConfig(learning_rate=1e-3),
        "replay": ReplayConfig(),
        "policy_id": "a" * 64,
    }
    chosen = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return PolicyLearner(**given | changes, recipe=chosen, dir=dir).resume()
