"""Texts of other tokenizers that have too many tokens here: scored and learned as far as one of our own could go."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from swarm.config import GeneratorConfig, NodeConfig
from swarm.episode import Actions
from swarm.exchange.novelty import Novelty
from swarm.interfaces import Producer, Verdict
from swarm.objectives.batch import Batch
from swarm.objectives.draw_batch import make_batch
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import ScriptedVerifier, ToyTokenizer, make_group, make_identity, make_sealed, toy_task
from swarm.testing.nodes import make_admission, make_context
from swarm.types import Draw, DrawnGroup, FinishReason, RefusalReason, Refused, Rollout, Sampling, ScoredGroup

ALICE, EVE = make_identity(4), make_identity(5)
LIMIT = 8
OURS = ToyTokenizer()


def rollout_of(text: str, finish: FinishReason) -> Rollout:
    return Rollout(
        actions=(text,),
        trace=None,
        sampling=Sampling(max_new_tokens=LIMIT),
        finish=finish,
        claimed_reward=float("7" in text),
    )


class LastLetter(ScriptedVerifier):
    """Pays for the end of an answer, whatever comes before it: as many do that look for the last number."""

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        return await super().verify(env, task_id, [(text[-1:],) for *_, text in episodes], producer)


async def admitted(texts: Sequence[str]) -> ScoredGroup | Refused:
    """Admission's verdict on answers of another tokenizer, which claims 1 for each that has the right letter."""
    context = make_context(NodeConfig(generator=GeneratorConfig(group_size=len(texts), max_new_tokens=LIMIT)))
    node = make_admission(context, MemoryGroupStore(context.clock, 10**8), tokenizer=OURS, verifier=LastLetter())
    group = make_group(EVE.node_id, tokenizer=ToyTokenizer("theirs"), task_id=7)
    rollouts = tuple(rollout_of(text, FinishReason.STOP) for text in texts)
    return await node.admit(make_sealed(replace(group, rollouts=rollouts), EVE), EVE.node_id)


def batch_of(scored: ScoredGroup) -> Batch:
    draw = Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)
    return make_batch(draw, OURS, task_of=toy_task)


async def test_a_right_end_beyond_the_limit_earns_nothing_for_what_comes_before_it() -> None:
    found = await admitted(["x" * 30 + "7", "7", "x", "y"])
    assert isinstance(found, ScoredGroup), found
    batch = batch_of(found)
    assert batch.texts[0] == "x" * LIMIT and batch.is_truncated.tolist() == [True, False, False, False]
    assert batch.rewards.tolist() == [0.0, 1.0, 0.0, 0.0]


async def test_texts_of_peers_make_no_row_longer_than_an_answer_of_our_own_and_no_end_is_appended() -> None:
    found = await admitted(["x" * 30, "y" * LIMIT, "z" * (LIMIT - 1), "7"])
    assert isinstance(found, ScoredGroup), found
    batch = batch_of(found)
    assert batch.token_ids.shape == (4, LIMIT)
    assert batch.length.tolist() == [LIMIT, LIMIT, LIMIT, 2]
    assert batch.token_ids[1].tolist() == OURS.encode_response("y" * LIMIT)[:-1]


async def test_a_claim_about_a_whole_text_that_was_cut_is_no_lie_and_one_about_a_text_that_fits_is() -> None:
    assert isinstance(await admitted(["x" * 30 + "7", "x"]), ScoredGroup)
    refused = await admitted(["7x", "x"])
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.FALSE_REWARD


async def original_and_copy() -> ScoredGroup | Refused:
    """An original that ran to the limit, then its answers as texts that go on: a batch takes the same of both."""
    texts = ["".join(random.Random(number).choices("abcdefghijklmnop", k=LIMIT)) for number in range(8)]
    context = make_context(NodeConfig(generator=GeneratorConfig(group_size=len(texts), max_new_tokens=LIMIT)))
    node = make_admission(context, MemoryGroupStore(context.clock, 10**8), tokenizer=OURS, novelty=Novelty())
    original = make_group(ALICE.node_id, texts=[text[:-1] for text in texts], logprob=-math.log(16))
    node._novelty.measure_own(original)
    ids = [OURS.encode_response(text)[:-1] for text in texts]
    whole = [
        replace(
            rollout,
            actions=(text,),
            finish=FinishReason.LENGTH,
            trace=rollout.trace and replace(rollout.trace, token_ids=np.array(answer, np.int32)),
        )
        for rollout, text, answer in zip(original.rollouts, texts, ids, strict=True)
    ]
    original = replace(original, rollouts=tuple(whole))
    assert isinstance(await node.admit(make_sealed(original, ALICE), ALICE.node_id), ScoredGroup)
    longer = [replace(rollout_of(text + " and more", FinishReason.STOP), claimed_reward=0.0) for text in texts]
    copy = replace(original, producer=EVE.node_id, policy_id=EVE.node_id, rollouts=tuple(longer))
    return await node.admit(make_sealed(copy, EVE), EVE.node_id)


async def test_a_copy_that_goes_on_where_nobody_learns_from_it_is_a_copy() -> None:
    result = await original_and_copy()
    assert isinstance(result, Refused) and result.reason is RefusalReason.COPIED, result
