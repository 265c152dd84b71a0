"""Agreement of processes that share a step before they send anything: the turn, and the words of a command."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from swarm.config import LearnerConfig, NodeConfig
from swarm.errors import ConfigError
from swarm.learn.data_parallel import ShardedRanks
from swarm.learn.leader import RankCommand
from swarm.learn.packing import pack
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.draw_batch import make_batch
from swarm.testing.builders import make_group, make_scored
from swarm.types import Draw, DrawnGroup, Role

TOKENIZER = CharTokenizer()


def draw(num_groups: int) -> Draw:
    groups = [
        make_scored(
            make_group("a" * 64, task_id=index, tokenizer=TOKENIZER, texts=["ab", "abcd", "c"]), is_made_here=index != 1
        )
        for index in range(num_groups)
    ]
    drawn = tuple(DrawnGroup(scored=group, age_steps=index, use=1) for index, group in enumerate(groups))
    return Draw(step=7, groups=drawn, num_zero_variance=2, baselines=tuple(0.1 * index for index in range(num_groups)))


def rank(index: int, count: int) -> ShardedRanks:
    one = object.__new__(ShardedRanks)  # no process group: turns need none
    one._mesh = SimpleNamespace(get_rank=lambda: index, size=lambda: count)  # pyright: ignore
    return one


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("num_parts", range(8))
def test_every_part_counts_once_and_all_ranks_make_equally_many_passes(num_parts: int, count: int) -> None:
    turns = [rank(index, count).assign(num_parts) for index in range(count)]
    assert len({len(own) for own in turns}) == 1
    assert sorted(place for own in turns for place, counts in own if counts) == list(range(num_parts))
    assert all(0 <= place < num_parts for own in turns for place, _ in own)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 9])
def test_no_micro_batch_has_more_rows_than_the_share_of_one_rank(num_ranks: int) -> None:
    batch = make_batch(draw(4), TOKENIZER)
    whole, shared = pack(batch, 10_000), pack(batch, 10_000, num_ranks=num_ranks)
    assert [packed.token_ids.shape[0] for packed in whole] == [4], "a group shares one row"
    assert max(packed.token_ids.shape[0] for packed in shared) == math.ceil(4 / num_ranks)
    seen = [torch.stack([packed.rollouts, packed.positions], dim=1) for packed in shared]
    assert sorted(torch.cat(seen).tolist()) == batch.mask.nonzero().tolist()


@pytest.mark.parametrize("ratio_band", [math.inf, 4.0])
def test_an_order_arrives_as_it_was_said(ratio_band: float) -> None:
    order = RankCommand(kind="step", draw=draw(3), is_safe=True, is_frozen=True, ratio_band=ratio_band)
    copy = RankCommand.from_bytes(order.to_bytes())
    assert order.draw is not None and copy.draw is not None
    assert replace(copy, draw=None) == replace(order, draw=None)
    assert (copy.draw.step, copy.draw.num_zero_variance) == (7, 2)
    assert copy.draw.baselines == order.draw.baselines
    for ours, theirs in zip(order.draw.groups, copy.draw.groups, strict=True):
        assert (ours.age_steps, ours.scored.digest, ours.scored.is_made_here) == (
            theirs.age_steps,
            theirs.scored.digest,
            theirs.scored.is_made_here,
        )
        np.testing.assert_array_equal(ours.scored.rewards, theirs.scored.rewards)
        np.testing.assert_array_equal(ours.scored.group.prompt_ids, theirs.scored.group.prompt_ids)
    assert RankCommand.from_bytes(RankCommand(kind="save").to_bytes()) == RankCommand(kind="save")


def test_threads_of_the_agent_are_one_process_and_a_node_that_does_not_train_needs_one() -> None:
    from node.ranks import num_ranks

    shared = LearnerConfig(num_processes=2)
    with pytest.raises(ValueError, match=r"learner\.num_processes: .* set worker = \"process\""):
        NodeConfig(worker="inline", learner=shared)
    assert num_ranks(NodeConfig(learner=shared)) == 2
    assert num_ranks(NodeConfig(learner=shared, roles=(Role.GENERATOR,))) == 1


def test_a_model_of_several_dtypes_is_refused() -> None:
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to(torch.bfloat16))
    with pytest.raises(ConfigError, match="several dtypes"):
        rank(0, 2).prepare(mixed)
