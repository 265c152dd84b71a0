"""Where the nodes of a sharing run start: a warm start, and specialists of it, built once and kept.

Invariant: a file holds the weights that its name says (warm seed, steps, shares, node), whole or not at all.
"""

import os
from pathlib import Path

from safetensors.torch import load_file

from swarm.config import ModelConfig
from swarm.environments.char_tasks import KINDS
from swarm.model.network import load_model, save_tensors, tiny_network
from swarm.model.source import default_cache_dir
from swarm.model.version_digest import PublishedTensors, load_published, published_state
from swarm.simulate.tiny import NUM_STEPS, fine_tune, training_pairs, warm_start

SPECIALIST_STEPS = 120
OWN_SHARE = 0.4  # probability of the right label in a specialist's own tasks
OTHER_SHARE = 0.02  # and elsewhere: a success is rare, not impossible


def shipped_start() -> PublishedTensors:
    """Warm seed 0 as it is installed with the package."""
    return published_state(load_model(ModelConfig(source="tiny", dtype="float32")).network)


def warm_weights(warm_seed: int, folder: Path | None = None) -> PublishedTensors:
    """The warm start of a seed; seed 0 is the shipped one, another is built when first asked for (60-100 s)."""
    if warm_seed == 0:
        return shipped_start()
    path = (folder or _folder()) / f"warm-{NUM_STEPS}-{warm_seed}.safetensors"
    if not path.is_file():
        _keep(path, published_state(warm_start(warm_seed)))
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
        _keep(path, published_state(network))
    return _read(path)


def _folder() -> Path:
    return default_cache_dir() / "benchmarks" / "sharing"


def _keep(path: Path, tensors: PublishedTensors) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own while it is written: two processes may build the same one.
    partial = path.with_name(f"{path.stem}.{os.getpid()}.safetensors")
    save_tensors(tensors, partial)
    partial.replace(path)


def _read(path: Path) -> PublishedTensors:
    network = tiny_network()
    load_published(network, load_file(path))  # refuses a file of another model
    return published_state(network)
