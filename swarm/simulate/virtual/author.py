"""Author of scripted groups: the node, its configuration, and the tokenizer and environments of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.generation.produce import UNSCORED
from swarm.interfaces import Environment, Tokenizer
from swarm.types import NodeId, Rollout, RolloutGroup, Sampling, Task


@dataclass(frozen=True, kw_only=True)
class Author:
    """A node whose groups follow a script in place of a model."""

    node_id: NodeId
    config: NodeConfig
    tokenizer: Tokenizer
    environments: Mapping[str, Environment]
    clock: Clock  # of `created_at_s`

    @property
    def sampling(self) -> Sampling:
        """Temperature and token limit of the configuration."""
        generator = self.config.generator
        return Sampling(temperature=generator.temperature, max_new_tokens=generator.max_new_tokens)

    def group(
        self, task: Task, rollouts: Sequence[Rollout], policy_id: str = "", verifier: str = UNSCORED
    ) -> RolloutGroup:
        """A group of this node, created now; its lineage is the node's own unless `policy_id` names another."""
        return RolloutGroup(
            run_id=self.config.run_id,
            producer=self.node_id,
            policy_id=policy_id or self.node_id,
            env=task.env,
            task_id=task.task_id,
            tokenizer_digest=self.tokenizer.digest,
            prompt_ids=np.asarray(self.tokenizer.encode_prompt(task), dtype=np.int32),
            rollouts=tuple(rollouts),
            verifier=verifier,
            created_at_s=self.clock.now_s(),
        )
