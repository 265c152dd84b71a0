"""Models and tokenizers: their source, loading, published tensors and version digest.

Invariant: importing this package, or loading a tokenizer, never imports torch; names that need it resolve on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarm.model.source import default_cache_dir, resolve_source
from swarm.model.tokenizer import CharTokenizer, HfTokenizer, load_tokenizer

if TYPE_CHECKING:
    from swarm.model.lora import add_adapters, merged_state
    from swarm.model.network import LoadedModel, load_model, pick_device, save_model, tiny_network
    from swarm.model.version_digest import PublishedTensors, load_published, published_state, snapshot, weights_digest

__all__ = [
    "CharTokenizer",
    "HfTokenizer",
    "LoadedModel",
    "PublishedTensors",
    "add_adapters",
    "default_cache_dir",
    "load_model",
    "load_published",
    "load_tokenizer",
    "merged_state",
    "pick_device",
    "published_state",
    "resolve_source",
    "save_model",
    "snapshot",
    "tiny_network",
    "weights_digest",
]

_NEEDS_TORCH = {
    "add_adapters": "lora",
    "merged_state": "lora",
    "LoadedModel": "network",
    "load_model": "network",
    "pick_device": "network",
    "save_model": "network",
    "tiny_network": "network",
    "PublishedTensors": "version_digest",
    "load_published": "version_digest",
    "published_state": "version_digest",
    "snapshot": "version_digest",
    "weights_digest": "version_digest",
}


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
