"""A trained node's directory, made without training."""

from pathlib import Path
from typing import Any, Final

import torch

from swarm.config import NODE_FILE, NodeConfig
from swarm.events import GroupsDrawn, GroupUse, PolicyEvaluated, StepMade
from swarm.identity import Identity
from swarm.learn.learner import PolicyLearner
from swarm.model.network import load_model
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.methods import load_recipe
from swarm.telemetry import EventLog
from swarm.types import NodeId
from swarm.wire.run_manifest import write_toml

OTHER: Final[NodeId] = "b" * 64  # made two of the node's three groups
TASKS: Final = (
    {"name": "reverse", "kind": "char", "dataset": "reverse"},
    {"name": "sort", "kind": "char", "dataset": "sort"},
)


def make_trained_node(directory: Path, *, seed: int = 3, **model: Any) -> NodeConfig:
    """Writes a new directory as training the tiny model leaves it, with a checkpoint, a draw and an evaluation.

    `seed` and `model` (keys of the section besides source and dtype) change the weights. Returns the configuration.
    """
    directory.mkdir()
    config = NodeConfig.model_validate(
        {
            "dir": str(directory),
            "run_id": "letters",
            "environments": TASKS,
            "model": {"source": "tiny", "dtype": "float32", **model},
            "generator": {"max_new_tokens": 8},
        }
    )
    write_toml(config.model_dump(mode="json"), directory / NODE_FILE)
    identity = Identity.create()
    identity.save(directory / "identity.key")
    network = load_model(config.model).network
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.add_((torch.randn(parameter.shape, generator=generator) * 0.02).to(parameter))
    recipe = load_recipe(config.learner.recipe)
    PolicyLearner(
        network, CharTokenizer(), recipe, config.learner, config.replay, identity.node_id, directory / "checkpoints"
    ).save()
    log = EventLog(directory / "events.jsonl")
    log.write(PolicyEvaluated(step=0, env="sort", split="held_out", accuracy=0.25, num_problems=8, majority_baseline=0))
    uses = tuple(
        GroupUse(digest=str(index), producer=producer, policy_id=producer, age_steps=0, is_own_policy=False)
        for index, producer in enumerate([identity.node_id, OTHER, OTHER])
    )
    log.write(GroupsDrawn(draw_step=0, groups=uses, max_age_steps=4, max_reuse=1))
    log.write(StepMade(step=0, draw_step=0, digest="", loss=0.0, grad_norm=0.0, num_tokens=1))
    log.close()
    return config
