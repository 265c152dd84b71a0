"""Completions that a node made or admitted from others, with prompt, rewards and tokens, for people to read.

Invariant: people see the data of the learner: texts and log-probs of the stored group, rewards of this node's own
verifier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from swarm.config import NODE_FILE, NodeConfig, load_config
from swarm.config.node_config import AGENT_RUNS
from swarm.environments.first_problem import require_first_problems
from swarm.environments.load import build_environments
from swarm.episode import Message
from swarm.errors import ConfigError
from swarm.interfaces import Environment, Tokenizer
from swarm.model.tokenizer import load_tokenizer
from swarm.trained.newest_groups import Origin, group_of, newest_groups, reading
from swarm.trained.own_directories import code_of, is_own, require_trusted
from swarm.types import NodeId, Rollout, ScoredGroup

STORE: Final = "groups.sqlite"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledToken:
    """One token of a response."""

    text: str
    is_action: bool  # the model chose it; else it is of an observation
    logprob: float | None  # nats, when it was chosen; None for observations, or where it is not known
    step: int  # of the policy version that made it


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response of a group."""

    actions: tuple[str, ...]
    observations: tuple[tuple[Message, ...], ...]  # after each action but the last
    reward: float
    reward_parts: Mapping[str, float]
    finish: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledGroup:
    """One group: a task, and the responses to it."""

    digest: str
    env: str
    task_id: int
    producer: NodeId
    is_made_here: bool
    at_s: float  # wall clock of this node, when it came
    messages: tuple[Message, ...]
    reference: str
    samples: tuple[Sample, ...]


class SampleReader:
    """Reads groups from a node's store: of environments in its node.toml, which rebuild the questions, and of agents.

    A group of agents' runs has its first prompt as its question, in the words of the tokenizer.

    Example:
        for group in SampleReader(directory).newest(4): ...
    """

    def __init__(self, directory: Path, is_trusted: bool = False) -> None:
        """Loads tokenizer and environments (blocking).

        Args:
            directory: directory of a node.
            is_trusted: True: code that it names is loaded, whoever made it.

        Raises:
            ConfigError: the directory is no node's, or its configuration, tokenizer or environments cannot be loaded;
                or it names code, and is neither own nor trusted.
        """
        path = directory / NODE_FILE
        if not path.is_file():
            raise ConfigError(f"{directory}: no {NODE_FILE}, so no node's directory; name the folder that has it")
        config = load_config(NodeConfig, path)
        require_trusted(directory, code_of(config.environments), is_trusted)
        if not is_trusted and not is_own(directory):
            require_first_problems(config.environments)
        self._directory = directory
        self._environments = build_environments(config.environments)
        self._names = (*self._environments, *([AGENT_RUNS] if any(key.learn for key in config.serve.keys) else []))
        self.tokenizer = load_tokenizer(config.model)

    def newest(self, limit: int, origin: Origin = "all", env: str = "") -> list[SampledGroup]:
        """Up to `limit` groups, newest first (blocking).

        Args:
            limit: at least 1.
            origin: own (made by this node), others (made by other nodes) or all.
            env: name of one environment; empty: all of them.

        Raises:
            ConfigError: no group yet, an unknown environment, or problems that are gone.
        """
        if env and env not in self._names:
            raise ConfigError(f"--env {env}: unknown environment; known: {', '.join(self._names)}")
        envs = [env] if env else self._names
        return [self._read(each) for each in newest_groups(self._directory / STORE, limit, origin, envs)]

    def group(self, digest: str) -> SampledGroup | None:
        """The group of a digest in hexadecimal; None if it is no longer stored, or its environment is not in node.toml.

        Raises:
            ConfigError: the store cannot be read, or the problem is gone.
        """
        with reading(self._directory / STORE) as connection:
            scored = group_of(connection, bytes.fromhex(digest))
        return None if scored is None or scored.group.env not in self._names else self._read(scored)

    def _read(self, scored: ScoredGroup) -> SampledGroup:
        try:
            return _read(scored, self._environments.get(scored.group.env), self.tokenizer)
        except LookupError as error:
            raise ConfigError(
                f"{error}; put the problems back from which the groups in {self._directory} were made"
            ) from None


def _read(scored: ScoredGroup, environment: Environment | None, tokenizer: Tokenizer) -> SampledGroup:
    group = scored.group
    if environment is None:
        messages, reference = (Message(role="prompt", content=tokenizer.decode(group.prompt_ids.tolist())),), ""
    else:
        messages, reference = environment.task(group.task_id).messages, environment.reference(group.task_id)
    samples: list[Sample] = []
    for index, rollout in enumerate(group.rollouts):
        outcome = scored.outcomes[index] if scored.outcomes else None
        samples.append(
            Sample(
                actions=rollout.actions,
                observations=tuple(each.messages for each in outcome.transitions[:-1]) if outcome else (),
                reward=float(scored.rewards[index]),
                reward_parts=dict(outcome.rewards) if outcome else {},
                finish=str(rollout.finish),
                tokens=tuple(_tokens(rollout, tokenizer)),
            )
        )
    return SampledGroup(
        digest=scored.digest.hex(),
        env=group.env,
        task_id=group.task_id,
        producer=group.producer,
        is_made_here=scored.is_made_here,
        at_s=scored.first_seen_s,
        messages=messages,
        reference=reference,
        samples=tuple(samples),
    )


def _tokens(rollout: Rollout, tokenizer: Tokenizer) -> Sequence[SampledToken]:
    trace = rollout.trace
    if trace is None:
        return ()
    starts = np.array([span.start for span in trace.spans])
    steps = [span.version.step for span in trace.spans]
    of_span = np.searchsorted(starts, np.arange(len(trace.token_ids)), side="right") - 1
    ids = [int(each) for each in trace.token_ids]
    return [
        SampledToken(
            text="<end>" if token in tokenizer.eos_ids else tokenizer.decode([token]),
            is_action=bool(trace.action_mask[index]),
            # JSON has no NaN, which stands off the mask
            logprob=float(trace.logprobs[index]) if trace.logprobs is not None and trace.action_mask[index] else None,
            step=steps[int(of_span[index])],
        )
        for index, token in enumerate(ids)
    ]
