"""Well formed, signed, hostile groups, sent to a node over real sockets: no step takes them as they were meant."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from attacked_node import VICTIM, AttackedNode, batch_of

from swarm.exchange.checks.admission_limits import AdmissionLimits
from swarm.objectives.batch import Batch
from swarm.testing.builders import TOY_NOW_S, ToyTokenizer, make_group, make_identity
from swarm.types import PolicyVersion, RefusalReason, RolloutGroup, TokenTrace, VersionSpan

ALICE, EVE = make_identity(2), make_identity(3)
EOS, PAD = ToyTokenizer.EOS_ID, 0
RIGHT, OTHER = ToyTokenizer().encode_response("7")[:-1], ToyTokenizer().encode_response("8")[:-1]
# --- what is trained is what is read -----------------------------------------------------------------------


def with_tokens(ids: Sequence[int], num_untrained: int = 0, second_turn_at: int | None = None) -> RolloutGroup:
    """A right group whose first answer has other tokens than its text."""
    group = make_group(EVE.node_id, logprob=None)
    mask, turns = np.arange(len(ids)) >= num_untrained, np.zeros(len(ids), np.int16)
    if second_turn_at is not None:
        turns[second_turn_at:] = 1
    trace = TokenTrace(
        token_ids=np.array(ids, np.int32),
        action_mask=mask,
        logprobs=None,
        turn_ids=turns,
        spans=(VersionSpan(start=0, version=PolicyVersion(policy_id=EVE.node_id, step=0)),),
    )
    return replace(group, rollouts=(replace(group.rollouts[0], trace=trace), *group.rollouts[1:]))


def longest_row(batch: Batch) -> int:
    prompts = [prompt.numel() for prompt in batch.prompts]
    lengths = (batch.mask | (batch.token_ids != PAD)).sum(1).tolist()
    return max(prompts[group] + length for group, length in zip(batch.group_index.tolist(), lengths, strict=True))


def is_too_long(batch: Batch) -> bool:
    return longest_row(batch) > max(prompt.numel() for prompt in batch.prompts) + AdmissionLimits().max_new_tokens


def trains_what_nobody_reads(batch: Batch) -> bool:
    """A trained token that is no part of the text, other than the end."""
    shown = [[*ToyTokenizer().encode_response(text)] for text in batch.texts]
    rows = [ids[mask].tolist() for ids, mask in zip(batch.token_ids, batch.mask, strict=True)]
    return any(row not in (text, text[:-1]) for row, text in zip(rows, shown, strict=True))


def is_in_another_context(batch: Batch) -> bool:
    """Tokens of the sender between prompt and answer."""
    return any(bool((mask.int().diff() > 0).any()) for mask in batch.mask)


# the group of an attack, and whether a batch with it does harm
TOKENS: dict[str, tuple[Callable[[], RolloutGroup], Callable[[Batch], bool]]] = {
    "pill": (lambda: with_tokens([*OTHER * 200_000, *RIGHT, EOS], num_untrained=200_000), is_too_long),
    "slow pill": (lambda: with_tokens([*OTHER * 6_000, *RIGHT, EOS], num_untrained=6_000), is_too_long),
    "context injection": (lambda: with_tokens([*OTHER, *RIGHT, EOS], num_untrained=1), is_in_another_context),
    "trained end": (lambda: with_tokens([EOS, *RIGHT, EOS], second_turn_at=1), trains_what_nobody_reads),
    "hidden token": (lambda: with_tokens([PAD, *RIGHT, EOS]), trains_what_nobody_reads),
}


@pytest.mark.parametrize("name", TOKENS)
async def test_no_token_reaches_a_step_that_its_text_does_not_show(name: str, tmp_path: Path) -> None:
    """One hostile group, and an honest one right behind it."""
    group, hurts = TOKENS[name]
    async with AttackedNode(tmp_path) as node:
        eve, alice = await node.follow(EVE), await node.follow(ALICE)
        eve.send(group())
        await node.judged(1)
        alice.send(make_group(ALICE.node_id, task_id=17))
        await node.judged(2)
        draw = await node.draw()
        producers = [drawn.scored.group.producer for drawn in draw.groups]
        assert ALICE.node_id in producers, "honest groups go on"
        assert (EVE.node_id in producers) != bool(node.refused)
        assert not hurts(batch_of(draw))


# --- whose work it is, and of which task -------------------------------------------------------------------


def written(rng: random.Random, task_id: int = 7) -> RolloutGroup:
    """A group of Alice with signal, whose wrong answers nobody else comes upon by chance."""
    texts = [str(task_id % 10), *("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(7))]
    return make_group(ALICE.node_id, task_id=task_id, texts=texts, logprob=-2.8)


def taken_over(group: RolloutGroup, step: int = 0) -> RolloutGroup:
    """The same answers, as if Eve's policy had given them at that step, a little later."""
    copy = make_group(
        EVE.node_id, task_id=group.task_id, texts=[each.text for each in group.rollouts], step=step, logprob=-2.8
    )
    return replace(copy, created_at_s=TOY_NOW_S + step)


NUM_SENT = 12


async def test_groups_of_another_node_signed_again_are_no_source(tmp_path: Path) -> None:
    """Plagiarism."""
    rng = random.Random(1)
    originals = [written(rng, task_id=10 * number + 7) for number in range(NUM_SENT)]
    async with AttackedNode(tmp_path) as node:
        node.agent.novelty.measure_own(written(rng))
        alice, eve = await node.follow(ALICE), await node.follow(EVE)
        for original in originals:
            alice.send(original)
        await node.judged(NUM_SENT)
        for original in originals:
            eve.send(taken_over(original))
        await node.judged(2 * NUM_SENT)
        assert node.refused == {RefusalReason.COPIED: NUM_SENT}
        drawn = await node.drawn(3)
        assert not drawn[EVE.node_id] and drawn[ALICE.node_id] > 0
        assert node.agent.reputation.is_allowed(EVE.node_id), "it may have been the faster one of two honest nodes"


async def test_old_answers_with_a_new_date_and_step_are_old(tmp_path: Path) -> None:
    """The same rollouts signed again and again.

    The node generates nothing: one that does counts an eighth of the bits only, which these answers are too short for.
    """
    content = written(random.Random(1))
    async with AttackedNode(tmp_path) as node:
        eve = await node.follow(EVE)
        for step in range(NUM_SENT):
            eve.send(taken_over(content, step))
        await node.judged(NUM_SENT)
        assert node.agent.ingest.num_admitted == 1


async def test_one_task_in_every_group_fills_no_step(tmp_path: Path) -> None:
    """Sent by a member, whose other groups count in full."""
    rng = random.Random(1)
    async with AttackedNode(tmp_path, members=(EVE, ALICE, VICTIM)) as node:
        eve, alice = await node.follow(EVE), await node.follow(ALICE)
        for _ in range(NUM_SENT):
            texts = [rollout.text for rollout in written(rng).rollouts]
            eve.send(make_group(EVE.node_id, task_id=7, texts=texts))
        alice.send(make_group(ALICE.node_id, task_id=17))
        await node.judged(NUM_SENT + 1)
        draw = await node.draw()
        of_task = [drawn for drawn in draw.groups if drawn.scored.group.task_id == 7]
        assert len(of_task) == 1
