"""Memory that groups of peers hold: the estimate against what is measured, and that the replay buffer bounds it."""

import gc
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig, ReplayConfig
from swarm.environments.look_up import LookUpEnvironment
from swarm.episode import Actions, outcomes_from_json, outcomes_to_json
from swarm.exchange.admission import Admission
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.exchange.replay_tables import held_bytes
from swarm.interfaces import Producer, Verdict
from swarm.model.tokenizer import CharTokenizer
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_context
from swarm.types import Cursor, Sampling, ScoredGroup, SealedGroup

CONFIG = EnvironmentConfig(name="get", kind="look_up", params={"style": "char", "people": 3, "max_turns": 64})
ENVIRONMENT = LookUpEnvironment(CONFIG)
TASKS = [i for i in range(400) if not ENVIRONMENT.task(i).is_held_out]
MAX_NEW_TOKENS = 4096
PEER = make_identity(5)


class SandboxReplies(InlineVerifier):
    """Outcomes as they come from another process: nothing of them is shared."""

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        verdict = await super().verify(env, task_id, episodes, producer)
        return replace(verdict, outcomes=outcomes_from_json(outcomes_to_json(verdict.outcomes)))


class Nowhere(MemoryGroupStore):
    """A store that forgets."""

    async def put(self, scored: ScoredGroup, sealed: SealedGroup) -> Cursor:
        return await self.head()


def make_gate() -> Admission:
    generator = GeneratorConfig(group_size=4, max_new_tokens=MAX_NEW_TOKENS, max_episode_tokens=8 * MAX_NEW_TOKENS)
    context = make_context(NodeConfig(environments=(CONFIG,), generator=generator))
    return make_admission(
        context,
        Nowhere(context.clock, 10**9),
        tokenizer=CharTokenizer(),
        verifier=SandboxReplies({"get": ENVIRONMENT}),
        environments=frozenset({"get"}),
    )


def sealed_groups(count: int, episodes: Sequence[Actions], *, is_text: bool) -> Iterator[SealedGroup]:
    """Groups of a right episode and these."""
    for task_id in TASKS[:count]:
        right = ENVIRONMENT.demonstration(task_id)
        sampling = Sampling(max_new_tokens=MAX_NEW_TOKENS)
        all_four = [right, *episodes, *[right] * 3][:4]
        group = make_episode_group(ENVIRONMENT, task_id, all_four, CharTokenizer(), PEER.node_id, sampling)
        if is_text:
            bare = tuple(replace(rollout, trace=None) for rollout in group.rollouts)
            group = replace(group, tokenizer_digest=b"\7" * 32, rollouts=bare)
        yield make_sealed(group, PEER)


SHAPES: dict[str, Sequence[Actions]] = {
    "short": [],
    "long": [("?" + "a" * 4000, "?b", "x") for _ in range(3)],
    "many turns": [("?a",) * 63 + ("x",) for _ in range(3)],
}


async def held(gate: Admission, sealed: Sequence[SealedGroup]) -> list[ScoredGroup]:
    taken = list[ScoredGroup]()
    for each in sealed:
        found = await gate.admit(each, PEER.node_id)
        assert isinstance(found, ScoredGroup), found
        taken.append(found)
    return taken


@pytest.mark.parametrize("is_text", [True, False], ids=["texts", "tokens"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_the_estimate_is_near_what_the_interpreter_counts(
    shape: str, is_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = [*sealed_groups(20, SHAPES[shape], is_text=is_text)]
    gate = make_gate()
    monkeypatch.setattr(gate._novelty, "record", lambda *_: None)
    await held(gate, sealed[:5])  # caches
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        groups = await held(gate, sealed[5:])
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.8 < sum(map(held_bytes, groups)) / traced < 2.0


async def test_groups_that_are_small_on_the_wire_fill_the_buffer_all_the_same() -> None:
    """40 groups of 500 bytes hold a megabyte; the buffer may hold half of one."""
    config = ReplayConfig(local_groups=1, external_groups=4, max_bytes=500_000)
    gate = make_gate()
    buffer = ReplayBuffer(config, "own", 0, gate._context.clock)
    sealed = [*sealed_groups(40, SHAPES["long"], is_text=True)]
    assert max(each.size_bytes for each in sealed) < 600
    for each in await held(gate, sealed):
        buffer.add(each)
    assert buffer.num_bytes <= config.max_bytes
    texts = sum(sum(map(len, rollout.actions)) for group in all_of(buffer) for rollout in group.group.rollouts)
    assert texts <= 400_000 and buffer.num_groups < 40


def all_of(buffer: ReplayBuffer) -> list[ScoredGroup]:
    return [entry.scored for entry in buffer._held.all.values()]
