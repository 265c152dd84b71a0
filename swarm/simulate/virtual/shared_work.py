"""Work shared by hundreds of nodes in one process: each problem, verdict and check of a group is made once for all.

Invariant: a cached value is a function of configuration, number, answers and bytes alone. The keyed hash in place of
Ed25519 has the same length and domains, and does not verify for another key, domain or message; but anybody can compute
the hash, so it stands for a signature only where nobody forges.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Final, cast

from swarm.config import EnvironmentConfig
from swarm.environments.char_tasks import CharEnvironment
from swarm.environments.environment import Problem
from swarm.episode import Actions, Message
from swarm.exchange.checks.admission_checks import GroupForm, read_group
from swarm.exchange.checks.admission_limits import AdmissionLimits
from swarm.flow import BoundedTable
from swarm.identity import PUBLIC_KEY_BYTES, Identity, Verify
from swarm.interfaces import Environment, Offload, Producer, Result, Tokenizer, Verdict
from swarm.simulate.virtual.scale import VIRTUAL_ENVIRONMENTS
from swarm.testing.builders import InlineVerifier
from swarm.types import RolloutGroup, Task
from swarm.wire.envelopes import open_group

MAX_VERDICTS: Final = 8192  # kept
MAX_OPENED: Final = 8192  # opened groups kept


class KeptEnvironment(CharEnvironment):
    """A char environment that keeps every problem it made, since hundreds of nodes ask for the same ones."""

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config)
        self._kept: dict[int, tuple[Problem, Task]] = {}

    def problem(self, task_id: int) -> Problem:
        return self._keep(task_id)[0]

    def task(self, task_id: int) -> Task:
        return self._keep(task_id)[1]

    def _keep(self, task_id: int) -> tuple[Problem, Task]:
        kept = self._kept.get(task_id)
        if kept is None:
            problem = super().problem(task_id)
            question = self.config.prompt.replace("{question}", problem.question)
            chat = (Message(role="user", content=question),)
            task = Task(env=self.name, task_id=task_id, messages=chat, is_held_out=problem.is_held_out)
            kept = self._kept[task_id] = problem, task
        return kept


@cache  # for all runs of a process
def kept_environments() -> dict[str, Environment]:
    """The environments of every virtual swarm without episodes, by name."""
    return {config.name: KeptEnvironment(config) for config in VIRTUAL_ENVIRONMENTS}


class KeptVerifier(InlineVerifier):
    """A verifier that keeps its newest verdicts, since several nodes score the same group."""

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        super().__init__(environments)
        self._kept = BoundedTable[tuple[str, int, tuple[Actions, ...]], Verdict](MAX_VERDICTS)

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        """Scores episodes as `InlineVerifier.verify` does, or returns the kept verdict. Raises LookupError."""
        key = env, task_id, tuple(episodes)
        verdict = self._kept.get(key)
        if verdict is None:
            verdict = self._kept[key] = await super().verify(env, task_id, episodes)
        return verdict


_open_once = lru_cache(maxsize=MAX_OPENED)(open_group)


class _ReadOnce:
    """A `read_group` that keeps its newest results by the identity of the group: `_open_once` gives each group once."""

    def __init__(self) -> None:
        self._kept = BoundedTable[int, tuple[RolloutGroup, Tokenizer, AdmissionLimits, GroupForm]](MAX_OPENED)

    def __call__(self, group: RolloutGroup, tokenizer: Tokenizer, limits: AdmissionLimits) -> GroupForm:
        """Returns the result of `read_group`."""
        kept = self._kept.get(id(group))
        if kept is not None and kept[0] is group and kept[1] is tokenizer and kept[2] == limits:
            return kept[3]
        form = read_group(group, tokenizer, limits)
        self._kept[id(group)] = group, tokenizer, limits, form
        return form


_read_once = _ReadOnce()


def offload_in_place(verify: Verify) -> Offload:
    """An `Offload` of the nodes' admission that calls functions in place and caches two of them.

    Several nodes of this process open and check the same sealed group. `open_group` depends on its bytes alone, and
    `read_group` on group, tokenizer and limits, so that each runs once: the signature of a group is verified once in
    this process, not once per node.
    """

    async def in_place(function: Callable[..., Result], /, *arguments: object) -> Result:
        if function is open_group:
            return cast("Callable[..., Result]", _open_once)(*arguments, verify)
        if function is read_group:
            return cast("Callable[..., Result]", _read_once)(*arguments)
        return function(*arguments)

    return in_place


# --- signatures ----------------------------------------------------------------------------------


class HashIdentity(Identity):
    """An identity that signs with `hash_signature` in place of Ed25519."""

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """Signature of 64 bytes over public key, domain and message."""
        return hash_signature(self.public_key, domain, message)


def hash_signature(public_key: bytes, domain: bytes, message: bytes) -> bytes:
    """SHA-512 of key, domain and message: as long as an Ed25519 signature."""
    return hashlib.sha512(public_key + domain + b"\0" + message).digest()


def verify_hash(public_key: bytes, domain: bytes, message: bytes, signature: bytes) -> bool:
    """True if a HashIdentity of this key made the signature; takes the place of `swarm.identity.verify`."""
    return len(public_key) == PUBLIC_KEY_BYTES and signature == hash_signature(public_key, domain, message)
