"""Models to use: the version in a checkpoint of a node, or a model that nobody trained here.

Invariant: the weights of a loaded version hash to the digest under which its node published it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch import nn

from swarm.config import NODE_FILE, ModelConfig, NodeConfig, load_config
from swarm.errors import ConfigError
from swarm.interfaces import Tokenizer
from swarm.learn.best_version import BEST
from swarm.learn.checkpoint import Checkpoint, checkpoint_steps, read_checkpoint
from swarm.model.network import load_model
from swarm.model.version_digest import load_published, published_state, weights_digest
from swarm.types import Digest, PolicyVersion, Role

CHECKPOINTS: Final = "checkpoints"  # of a node's directory
_MASTER: Final = "master."  # before the names of trained weights in a checkpoint

WhichStep = int | Literal["best"] | None
"""Step of a checkpoint of a node; "best" is the step that was best on held-out problems, None the newest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """Network and tokenizer, with their origin."""

    network: nn.Module  # transformers causal LM, eval mode, with adapters where the node trains these
    tokenizer: Tokenizer
    source: str  # the initial model, as `model.source`
    base_digest: Digest  # of its published tensors
    version: PolicyVersion | None = None  # None: nobody trained it here
    config: NodeConfig | None = None  # of its node
    directory: Path | None = None  # of its node

    @property
    def source_name(self) -> str:
        """Name of the initial model for an export: `source`, or only its last part if it is a path on this machine."""
        path = Path(self.source).expanduser()
        return path.resolve().name if path.exists() else self.source


def is_node(target: str) -> bool:
    """True for the directory of a node, False for a model source."""
    return (Path(target).expanduser() / NODE_FILE).is_file()


def load_target(target: str, step: WhichStep = None) -> TrainedModel:
    """Loads the model of a node's directory, or of any other `model.source` (blocking, slow).

    Args:
        target: directory of a node, or a model source.
        step: checkpoint of the node; None for any other target.

    Raises:
        ConfigError: there is no such model or checkpoint; names the path and the fix.
    """
    if is_node(target):
        return load_trained(Path(target).expanduser(), step)
    folder = Path(target).expanduser()
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{target}: an adapter, which needs its initial model: load both with PEFT, or export with --format hf"
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ConfigError(
            f"{target}: neither a node's directory ({NODE_FILE}) nor a model's (config.json); "
            "`swarm status --dir` shows a node, and `swarm simulate` keeps its nodes in <run>/swarm/<name>"
        )
    if step is not None:
        raise ConfigError(f"--step {step}: {target} is no node's directory and has no checkpoints; leave it out")
    loaded = load_model(ModelConfig(source=target, dtype="float32"))
    return TrainedModel(network=loaded.network, tokenizer=loaded.tokenizer, source=target, base_digest=loaded.digest)


def load_trained(directory: Path, step: WhichStep = None) -> TrainedModel:
    """Loads the version in a checkpoint of a node, which may be running (blocking, slow).

    Raises:
        ConfigError: no such node or checkpoint, another model, or weights other than those that were published.
    """
    config = load_config(NodeConfig, directory / NODE_FILE)
    checkpoint = _checkpoint(directory, config, step)
    loaded = load_model(config.model)
    try:
        _load(loaded.network, checkpoint)
    except (ConfigError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"{directory / CHECKPOINTS}: checkpoint of another model than model.source {config.model.source!r} with "
            f"lora_rank {config.model.lora_rank}: {error}; put both back as they were when the node ran"
        ) from error
    digest = weights_digest(published_state(loaded.network))
    saved, policy_id = (str(checkpoint.state.get(key, "none")) for key in ("digest", "policy_id"))
    if digest.hex() != saved:
        raise ConfigError(
            f"{directory / CHECKPOINTS}: step {checkpoint.step} gives weights {digest.hex()[:8]}, its node had "
            f"{saved[:8]}: put model.source and model.dtype in {directory / NODE_FILE} back as "
            "they were when the node ran"
        )
    return TrainedModel(
        network=loaded.network,
        tokenizer=loaded.tokenizer,
        source=config.model.source,
        base_digest=loaded.digest,
        version=PolicyVersion(policy_id=policy_id, step=checkpoint.step, digest=digest),
        config=config,
        directory=directory,
    )


def _load(network: nn.Module, checkpoint: Checkpoint) -> None:
    """Loads a checkpoint into the network. Raises ConfigError, KeyError or RuntimeError for another model's tensors."""
    if not any(name.startswith(_MASTER) for name in checkpoint.tensors):
        load_published(network, checkpoint.tensors)  # of the best version
        return
    with torch.no_grad():
        for name, param in network.named_parameters():  # in the published dtype: nobody has widened it yet
            if param.requires_grad:
                param.copy_(checkpoint.tensors[_MASTER + name])


def _checkpoint(directory: Path, config: NodeConfig, step: WhichStep) -> Checkpoint:
    root, best = directory / CHECKPOINTS, checkpoint_steps(directory / BEST)
    steps = checkpoint_steps(root)
    if best and (step == "best" or (step in best and step not in steps)):
        return read_checkpoint(directory / BEST)
    if step == "best":
        raise ConfigError(
            f"--step best: {directory} keeps none; a node with evaluation.keep_best = true does, from its first "
            "evaluation on (`swarm train` sets it)"
        )
    if not steps:
        if Role.TRAINER not in config.roles:
            reason = "it only generates, with the weights of a trainer: export from the trainer's directory"
        elif (directory / "events.jsonl").exists():
            reason = (
                "it has not saved one yet (learner.checkpoint_every, or a stop with Ctrl-C, saves one), or they were "
                "deleted, as `swarm simulate` does without --keep-checkpoints"
            )
        else:
            reason = "it has not run yet"
        raise ConfigError(f"{directory}: no checkpoint; {reason}")
    if step is not None and step not in steps:
        held = [*map(str, steps), *(f"{each} (best)" for each in best)]
        raise ConfigError(f"--step {step}: {directory} holds steps {', '.join(held)}")
    return read_checkpoint(root, step)
