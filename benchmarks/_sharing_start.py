"""Starting weights of a sharing run: a warm start, and specialists of it, built once and kept.

Invariant: a file holds the weights that its name says (warm seed, steps, node, own tasks), whole or not at all.
"""

import os
from pathlib import Path
from typing import Final

from safetensors.torch import load_file
from torch import nn

from swarm.config import ModelConfig
from swarm.environments.char_tasks import KINDS
from swarm.model.network import load_model, save_tensors, tiny_network
from swarm.model.source import default_cache_dir
from swarm.model.version_digest import PublishedTensors, load_published, published_state
from swarm.simulate.tiny import NUM_STEPS, fine_tune, training_pairs, warm_start

SPECIALIST_STEPS: Final = 120
OWN_SHARE: Final = 0.4  # probability of the right label in a specialist's own tasks
OTHER_SHARE: Final = 0.02  # and elsewhere: a success is rare, not impossible


def warm_weights(warm_seed: int, folder: Path | None = None) -> PublishedTensors:
    """The warm start of a seed; seed 0 is the shipped one, another is built when first asked for (60-100 s)."""
    if warm_seed == 0:
        return published_state(load_model(ModelConfig(source="tiny", dtype="float32")).network)
    path = (folder or _folder()) / f"warm-{NUM_STEPS}-{warm_seed}.safetensors"
    if not path.is_file():
        _keep(path, warm_start(warm_seed))
    return _read(path)


def specialist_weights(
    warm_seed: int, node: int, own: tuple[str, ...], folder: Path | None = None, num_steps: int = SPECIALIST_STEPS
) -> PublishedTensors:
    """A warm start after `num_steps` more supervised steps: its own tasks often right, the others rarely (about 8 s).

    Args:
        own: names of the tasks it is good at.
        folder: where results are kept; None takes `benchmarks/sharing` of the cache.
    """
    name = f"specialist-{warm_seed}-{node}-{num_steps}-{'-'.join(own)}.safetensors"
    path = (folder or _folder()) / name
    if not path.is_file():
        network = tiny_network()
        load_published(network, warm_weights(warm_seed, folder))
        shares = [OWN_SHARE if kind in own else OTHER_SHARE for kind in KINDS]
        fine_tune(network, training_pairs(), shares, num_steps=num_steps, seed=1000 * warm_seed + node)
        _keep(path, network)
    return _read(path)


def _folder() -> Path:
    return default_cache_dir() / "benchmarks" / "sharing"


def _keep(path: Path, network: nn.Module) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own while it is written: two processes may build the same one.
    partial = path.with_name(f"{path.stem}.{os.getpid()}.safetensors")
    save_tensors(published_state(network), partial)
    partial.replace(path)


def _read(path: Path) -> PublishedTensors:
    network = tiny_network()
    load_published(network, load_file(path))  # refuses a file of another model
    return published_state(network)
