"""Cost of the replay at admission beside the generation of the same episodes: CPU seconds of all processes.

Invariant: the episodes are sampled by a real engine, signed, and admitted through the whole of admission with the
confined process; a first group, which is not counted, starts the processes on both sides.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from swarm.clock import SystemClock
from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig, SandboxConfig
from swarm.environments.load import build_environment
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.episode import Actions, EpisodeOutcome
from swarm.exchange.agent import Agent
from swarm.generation.episode_player import player_of
from swarm.generation.produce import produce
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.network import LoadedModel
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import TOY_RUN_ID, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import PolicyVersion, Refused, Sampling, SealedGroup, Task

GROUP_SIZE: Final = 8
_KINDS: Final[dict[str, dict[str, Any]]] = {
    "calculator": {},
    "retry": {"inner": {"kind": "reasoning_gym", "dataset": "chain_sum"}},
    "look_up": {},
    "grid_world": {},
    "apps": {},
    "dialogue": {},
    "code": {},
}
ENVIRONMENTS: Final = tuple(
    EnvironmentConfig.model_validate({"name": kind, "kind": kind, "params": params}) for kind, params in _KINDS.items()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayCost:
    """Of one environment: CPU seconds of its episodes."""

    env: str
    num_episodes: int
    turns: float  # of an episode, on average
    action_tokens: float
    generation_s: float  # engine, tokenizer, and the environment in its confined process
    admission_s: float  # of the consumer, from sealed bytes to a stored group
    confined_s: float  # of that the process that replays

    @property
    def share(self) -> float:
        """Cost of admission over that of generation."""
        return self.admission_s / self.generation_s


def measure_replay_costs(model: LoadedModel, num_groups: int, num_tokens: int, repeats: int) -> Iterator[ReplayCost]:
    """A row for each shipped environment of several turns; of the repeats of admission the one in the middle."""
    for config in ENVIRONMENTS:
        yield asyncio.run(_measure(model, config, num_groups, num_tokens, repeats))


async def _measure(
    model: LoadedModel, config: EnvironmentConfig, num_groups: int, num_tokens: int, repeats: int
) -> ReplayCost:
    node_config = NodeConfig(
        environments=(config,),
        generator=GeneratorConfig(group_size=GROUP_SIZE, max_new_tokens=num_tokens),
    )
    environment = build_environment(config)
    tasks = [task for i in range(8 * (num_groups + 1)) if not (task := environment.task(i)).is_held_out]
    first, *rest = tasks[: num_groups + 1]
    producer, sealed, generation_s = await _generate(model, node_config, first, rest)
    admissions = sorted([await _admit(model, node_config, producer, sealed) for _ in range(repeats)])
    admission_s, confined_s = admissions[len(admissions) // 2]
    rollouts = [rollout for group in producer.made[1:] for rollout in group.rollouts]
    num_tokens_chosen = sum(int(r.trace.action_mask.sum()) for r in rollouts if r.trace is not None)
    return ReplayCost(
        env=config.name,
        num_episodes=len(rollouts),
        turns=sum(len(rollout.actions) for rollout in rollouts) / len(rollouts),
        action_tokens=num_tokens_chosen / len(rollouts),
        generation_s=generation_s,
        admission_s=admission_s,
        confined_s=confined_s,
    )


class _Producer:
    """A node that plays episodes of one policy, and its groups."""

    def __init__(self, model: LoadedModel, config: NodeConfig, verifier: SandboxVerifier) -> None:
        self.model, self.config, self.verifier = model, config, verifier
        self.identity = make_identity(1)
        clock = SystemClock()
        self.store = MemoryGroupStore(clock, 10**9)
        context = make_context(config, self.identity, clock=clock)
        self.agent = _agent(model, config, context, self.store, verifier)
        version = PolicyVersion(policy_id=self.identity.node_id, step=0)
        self.engine = TransformersGenerator(model.network, model.tokenizer, version, seed=0, max_rows=64)
        self.made: list[Any] = []
        self._loop = asyncio.get_running_loop()

    async def play(self, tasks: Sequence[Task], first: int) -> None:
        """Generates and stores a group of each task."""

        def step(env: str, task_id: int, actions: Actions) -> "Future[EpisodeOutcome]":
            return asyncio.run_coroutine_threadsafe(self.verifier.step(env, task_id, actions), self._loop)

        sampling = Sampling(max_new_tokens=self.config.generator.max_new_tokens)
        observe = player_of(self.model.tokenizer, self.config.generator.episode_limits, step, tasks, GROUP_SIZE)
        made = await asyncio.to_thread(
            produce,
            self.engine,
            self.model.tokenizer,
            tasks,
            GROUP_SIZE,
            sampling,
            run_id=TOY_RUN_ID,
            producer=self.identity.node_id,
            clock=SystemClock(),
            numbers=range(first, first + len(tasks)),
            observe=observe,
        )
        self.made += made

    async def seal(self) -> list[SealedGroup]:
        """All groups as they travel."""
        for group in self.made:
            await self.agent.local.put(group)
        head = await self.store.head()
        sequence = head.sequence - len(self.made)
        stored = await self.store.since(replace(head, sequence=sequence), len(self.made), own_only=True)
        return [sealed for _, sealed in stored]


async def _generate(
    model: LoadedModel, config: NodeConfig, first: Task, rest: Sequence[Task]
) -> tuple[_Producer, list[SealedGroup], float]:
    verifier = SandboxVerifier(config.environments, SandboxConfig())
    try:
        producer = _Producer(model, config, verifier)
        await producer.play([first], 0)
        own_s, confined_s = time.process_time(), _children_s()
        await producer.play(rest, 1)
        generation_s = time.process_time() - own_s + _children_s() - confined_s
        return producer, await producer.seal(), generation_s
    finally:
        await verifier.close()


async def _admit(
    model: LoadedModel, config: NodeConfig, producer: _Producer, sealed: Sequence[SealedGroup]
) -> tuple[float, float]:
    """CPU seconds of admitting all but the first, and of them those of the confined processes."""
    verifier = SandboxVerifier(config.environments, SandboxConfig())
    try:
        context = make_context(config, make_identity(2), clock=SystemClock())
        store = MemoryGroupStore(context.clock, 10**9)
        admission = _agent(model, config, context, store, verifier).admission
        first, *rest = sealed
        await admission.admit(first, producer.identity.node_id)
        own_s, children_s = time.process_time(), _children_s()
        for each in rest:
            result = await admission.admit(each, producer.identity.node_id)
            if isinstance(result, Refused):
                raise RuntimeError(f"an honest group was refused: {result.reason} {result.detail}")
        confined_s = _children_s() - children_s
        return time.process_time() - own_s + confined_s, confined_s
    finally:
        await verifier.close()


def _agent(
    model: LoadedModel, config: NodeConfig, context: Any, store: MemoryGroupStore, verifier: SandboxVerifier
) -> Agent:
    return make_agent(
        context,
        store,
        tokenizer=model.tokenizer,
        verifier=verifier,
        environments=frozenset(each.name for each in config.environments),
    )


def _children_s() -> float:
    """CPU seconds of the live processes below this one (Linux)."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    total, below = 0.0, children.get(os.getpid(), [])
    while below:
        pid = below.pop()
        below += children.get(pid, [])
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return total
