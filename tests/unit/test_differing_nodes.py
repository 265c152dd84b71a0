"""Nodes whose settings differ: a refusal keeps what was seen and expected, and `swarm status` says it with the key."""

import asyncio
from typing import Any

import pytest

from node.status import problems
from swarm.exchange.agent import Agent
from swarm.exchange.group_ingest import MAX_DETAIL
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.testing.builders import make_group, make_identity, make_sealed
from swarm.testing.nodes import make_agent, make_context
from swarm.types import RefusalReason, Refused, Sampling, short

OURS, OTHER = make_identity(1), make_identity(2)


def agent_on(clock: LoopClock) -> Agent:
    return make_agent(make_context(identity=OURS, clock=clock), MemoryGroupStore(clock, 2**24))


def status(**changes: Any) -> dict[str, Any]:
    idle: dict[str, Any] = {"at_s": 100.0, "last_step_at_s": 99.0, "pid": 1, "step": 5, "num_failures": 0}
    return {**idle, "advice": "ok", "num_admitted": 0, "refusals": {}, "node_id": OURS.node_id, **changes}


@pytest.mark.parametrize(
    ("sampling", "seen"),
    [
        (Sampling(temperature=0.5, max_new_tokens=8), "temperature 0.5, here 1.0"),
        (Sampling(max_new_tokens=16), "max_new_tokens 16 at its maker, 8 here"),
    ],
)
def test_a_refusal_keeps_who_and_what_and_status_says_it_with_the_key(sampling: Sampling, seen: str) -> None:
    async def main() -> tuple[str, str]:
        clock = LoopClock(asyncio.get_running_loop())
        agent = agent_on(clock)
        group = make_group(OTHER.node_id, sampling=sampling, created_at_s=clock.now_s())
        assert isinstance(await agent.ingest.receive(make_sealed(group, OTHER), OTHER.node_id), Refused)
        return agent.ingest.newest_refusals[RefusalReason.BAD_SAMPLING]

    kept: list[tuple[str, str]] = []

    async def keep() -> None:
        kept.append(await main())

    run_virtual(keep())
    assert kept == [(OTHER.node_id, seen)]
    refused = status(refusals={"bad_sampling": 20}, newest_refusals={"bad_sampling": list(kept[0])})
    (problem,) = problems(refused, 100.0, 300.0)
    assert "generator.temperature or generator.max_new_tokens must be equal on all nodes" in problem
    assert problem.endswith(f"(the newest, of {short(OTHER.node_id)}: {seen})")


def test_a_few_odd_peers_are_no_problem_of_a_node_that_learns_from_others() -> None:
    assert problems(status(refusals={"wrong_prompt": 50}, num_admitted=1), 100.0, 300.0) == []
    assert problems(status(refusals={"wrong_prompt": 3}), 100.0, 300.0) == []
    assert len(problems(status(refusals={"wrong_prompt": 4}), 100.0, 300.0)) == 1, "both streams may end at so few"
    assert problems(status(refusals={"duplicate": 500, "too_old": 50}), 100.0, 300.0) == []
    (problem,) = problems(status(refusals={"wrong_prompt": 50}), 100.0, 300.0)
    assert "tokenizer or prompt differ between the nodes" in problem
    (problem,) = problems(status(refusals={"other_environment": 50}), 100.0, 300.0)
    assert "the environment of that name is another version there" in problem


def test_what_a_peer_wrote_moves_no_cursor_and_has_a_bound() -> None:
    async def main() -> None:
        clock = LoopClock(asyncio.get_running_loop())
        agent = agent_on(clock)
        detail = "\x1b[2J" + "x" * 10_000
        agent.ingest._note_refused(Refused(reason=RefusalReason.OTHER_ENVIRONMENT, detail=detail), OTHER.node_id)  # pyright: ignore[reportPrivateUsage]
        assert agent.ingest.newest_refusals == {
            RefusalReason.OTHER_ENVIRONMENT: (OTHER.node_id, "?[2J" + "x" * (MAX_DETAIL - 4))
        }

    run_virtual(main())
