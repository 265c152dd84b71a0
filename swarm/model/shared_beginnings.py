"""Beginnings that token sequences share, and the networks that can compute one copy for all of them.

Engine and learner compute a shared beginning once; columns of other sequences then lie between it and a continuation.
"""

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, Final

_FREE_OF_PLACE: Final = ("llama", "mistral", "qwen2", "qwen3")
_FIXED_ROTATIONS: Final = ("default", "linear", "llama3", "yarn")


def is_free_of_place(network: Any) -> bool:
    """True if position ids and mask alone determine a token's result, not columns of the cache or the row's length.

    Windows and some biases (alibi, local attention) count columns of the cache, padding included; some rotations depend
    on the longest row of the batch.
    """
    config = network.config.get_text_config()
    rope: Any = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in _FREE_OF_PLACE
        and not getattr(config, "sliding_window", None)
        and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
        and rope.get("rope_type", "default") in _FIXED_ROTATIONS
    )


def num_alike(prompts: Iterable[Sequence[int]]) -> int:
    """Number of first tokens that all prompts (none empty) share; no prompt's last token, which predicts a response."""
    prompts = [*prompts]
    columns = zip(*prompts, strict=False)  # as far as the shortest goes
    count = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
    return min(count, min(map(len, prompts)) - 1)
