"""Cost of admission without a transport: external groups with their rewards re-checked.

Invariant: groups are as the admission of a real node wants them (true prompt, true text, true rewards of char
tasks), so every one is admitted; the time is of `Admission.admit` alone.
"""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks._groups import GROUP_SIZE, RUN_ID
from swarm.clock import SystemClock
from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig, SandboxConfig
from swarm.environments.load import build_environments
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.identity import Identity
from swarm.interfaces import Verifier
from swarm.node_context import IN_PLACE_BYTES
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, ToyTokenizer, make_group
from swarm.types import Refused, Rollout, RolloutGroup, Sampling, SealedGroup, Task
from swarm.wire.envelopes import seal_group

if TYPE_CHECKING:
    from swarm.exchange.admission import Admission

_ENVIRONMENT: Final = EnvironmentConfig(name="reverse", kind="char", dataset="reverse", seed=1)
_MANY: Final = 10**9  # no quota: admission is measured, not the peer's allowance


@dataclass(frozen=True, slots=True)
class Recheck:
    """Admission with one verifier."""

    verifier: str
    num_groups: int
    mean_bytes: float
    seconds: float

    @property
    def ms_per_group(self) -> float:
        """Milliseconds from sealed bytes to a stored group with its own rewards."""
        return 1000 * self.seconds / self.num_groups


def measure_rechecks(num_groups: int) -> list[Recheck]:
    """Admits the same number of groups with the verifier in process and with the confined one."""
    return asyncio.run(_measure(num_groups))


async def _measure(num_groups: int) -> list[Recheck]:
    groups = _make_groups(Identity.create(), num_groups + 1)
    results: list[Recheck] = []
    inline = InlineVerifier(build_environments([_ENVIRONMENT]))
    sandbox = SandboxVerifier((_ENVIRONMENT,), SandboxConfig())
    for name, verifier in (("in process", inline), ("confined process", sandbox)):
        try:
            results.append(await _admit_all(name, verifier, groups))
        finally:
            await verifier.close()
    return results


async def _admit_all(name: str, verifier: Verifier, groups: list[SealedGroup]) -> Recheck:
    admission = _admission(verifier)
    first, *rest = groups
    await _admit(admission, first)  # starts the confined process
    began_s = time.monotonic()
    await asyncio.gather(*(_admit(admission, sealed) for sealed in rest))
    seconds = time.monotonic() - began_s
    return Recheck(name, len(rest), float(np.mean([sealed.size_bytes for sealed in rest])), seconds)


async def _admit(admission: "Admission", sealed: SealedGroup) -> None:
    result = await admission.admit(sealed, via=sealed.producer)
    if isinstance(result, Refused):
        raise RuntimeError(f"a genuine group was refused: {result.reason} {result.detail}")


def _admission(verifier: Verifier) -> "Admission":
    from swarm.testing.nodes import (  # a whole agent, which the peers' processes do not need
        make_admission,
        make_context,
    )

    config = NodeConfig(
        run_id=RUN_ID,
        generator=GeneratorConfig(group_size=GROUP_SIZE, max_new_tokens=16),
    )
    context = make_context(
        config, Identity.create(), clock=SystemClock(), offload=asyncio.to_thread, in_place_bytes=IN_PLACE_BYTES
    )
    store = MemoryGroupStore(context.clock, max_bytes=2**30)
    quota = Reputation(context.clock, _MANY)
    return make_admission(
        context, store, verifier=verifier, reputation=quota, environments=frozenset({_ENVIRONMENT.name})
    )


def _make_groups(identity: Identity, count: int) -> list[SealedGroup]:
    environment = build_environments([_ENVIRONMENT])[_ENVIRONMENT.name]
    usable = (task for task in map(environment.task, range(10 * count)) if not task.is_held_out)
    random = np.random.default_rng(1)
    return [
        seal_group(_group(task, environment.reference(task.task_id), environment.verifier, identity, random), identity)
        for task, _ in zip(usable, range(count), strict=False)
    ]


def _group(task: Task, reference: str, verifier: str, identity: Identity, random: np.random.Generator) -> RolloutGroup:
    """Half of the answers right, half wrong."""
    group = make_group(
        identity.node_id,
        task_id=task.task_id,
        texts=[reference, reference[:-1] + "?"] * (GROUP_SIZE // 2),
        env=task.env,
        run_id=RUN_ID,
        created_at_s=time.time(),
        sampling=Sampling(max_new_tokens=16),
    )
    return replace(
        group,
        prompt_ids=np.array(ToyTokenizer().encode_prompt(task), np.int32),
        rollouts=tuple(_with_noise(rollout, reference, random) for rollout in group.rollouts),
        verifier=verifier,
    )


def _with_noise(rollout: Rollout, reference: str, random: np.random.Generator) -> Rollout:
    assert rollout.trace is not None
    logprobs = -random.exponential(0.7, rollout.trace.token_ids.size).astype(np.float32)
    trace = replace(rollout.trace, logprobs=logprobs)
    return replace(rollout, trace=trace, claimed_reward=float(rollout.text == reference))
