"""Groups as a node has them: generated, scored by the verifier, ready for a draw.

Invariant: same weights, tasks and seeds, same groups; digests are unique within a run, and names only.
"""

import hashlib
from collections.abc import Sequence

from swarm.clock import SystemClock
from swarm.generation.produce import produce
from swarm.interfaces import Generator, Tokenizer, Verifier
from swarm.types import Correction, NodeId, Sampling, ScoredGroup, Task


async def scored_groups(
    generator: Generator,
    tokenizer: Tokenizer,
    verifier: Verifier,
    tasks: Sequence[Task],
    group_size: int,
    sampling: Sampling,
    *,
    producer: NodeId,
    label: str,
) -> list[ScoredGroup]:
    """One own group for each task, with its rewards.

    Args:
        generator: whose weights answer.
        tokenizer: the one of its model.
        verifier: of the answers; a pure function, so one verdict serves every consumer.
        tasks: the questions.
        group_size: rollouts of each.
        sampling: how tokens are drawn.
        producer: node id.
        label: of this call, unique within the run.
    """
    groups = produce(
        generator, tokenizer, tasks, group_size, sampling, run_id="benchmark", producer=producer, clock=SystemClock()
    )
    scored: list[ScoredGroup] = []
    for index, group in enumerate(groups):
        verdict = await verifier.verify(group.env, group.task_id, [rollout.actions for rollout in group.rollouts])
        scored.append(
            ScoredGroup(
                digest=hashlib.sha256(f"{label}/{index}".encode()).digest(),
                group=group,
                rewards=verdict.rewards,
                correction=Correction.EXACT,
                is_made_here=True,
                first_seen_s=group.created_at_s,
                size_bytes=1,
            )
        )
    return scored
