"""Credit over turns: what counts as the same turn or state, where it lands, and what an outsider can reach."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from swarm.config import EnvironmentConfig
from swarm.environments.load import build_environment, signals_of
from swarm.environments.replay import replay
from swarm.episode import TurnStatus
from swarm.errors import ConfigError
from swarm.exchange.checks.reward_recheck import to_scored_group
from swarm.interfaces import Environment
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import Requirement
from swarm.objectives.parts import by_cell, discounted_returns, group_centred, on_turn_tokens, state_cells, turns_of
from swarm.testing.batches import toy_batch
from swarm.testing.builders import ToyTokenizer, make_identity
from swarm.testing.episodes import make_episode_group
from swarm.testing.outcomes import make_outcome, make_scored_episodes
from swarm.types import Draw, DrawnGroup, Sampling
from swarm.wire.envelopes import seal_group

OK = TurnStatus.OK
TURN_RECIPES = [name for name in list_recipes() if Requirement.TURNS in load_recipe(name).needs]


def episodes(rewards: list[float], states: list[tuple[str, ...]], **changes: Any) -> Batch:
    """One token a turn, no reward of a turn; a state is that after it."""
    most = max(map(len, states))
    counts = [len(each) for each in states]
    mask = torch.arange(most)[None] < torch.tensor(counts)[:, None]
    plain: dict[str, Any] = {
        "turn_ids": torch.arange(most).expand(len(rewards), most).contiguous(),
        "turn_rewards": torch.zeros(len(rewards), most, dtype=torch.float64),
        "num_turns": torch.tensor(counts),
        "num_calls": torch.ones(len(rewards), most, dtype=torch.int64) * mask,
        "state_keys": tuple(states),
        "turn_statuses": tuple((OK,) * count for count in counts),
        "actions": tuple(("go",) * count for count in counts),
    }
    return toy_batch(rewards, mask, **{**plain, **changes})


def as_scored(batch: Batch) -> Batch:
    """With what the learner adds before a step."""
    shape = (batch.num_rollouts, 1) if batch.turn_rewards is None else batch.turn_rewards.shape
    probs = torch.linspace(0.1, 0.9, shape[0] * shape[1]).reshape(shape)
    reference = torch.zeros_like(batch.behavior_logprobs)
    return replace(batch, answer_probs=probs, feedback_shifts=probs - 0.5, reference_logprobs=reference)


def advantages(name: str, batch: Batch) -> list[list[float]]:
    found = load_recipe(name).advantage(batch)
    return (found[:, None].expand(batch.mask.shape) if found.dim() == 1 else found).tolist()


def test_turns_begin_in_the_same_state_where_the_environment_says_so_and_at_the_start() -> None:
    batch = episodes(
        [1, 0, 1, 0], [("a", "b", "c"), ("a", "", "c"), ("a", "a", "c"), ("a", "b", "c")], groups=[0, 0, 0, 1]
    )
    cells = state_cells(batch, turns_of(batch)).tolist()
    assert cells[0][0] == cells[1][0] == cells[2][0] != cells[3][0], "a group begins in one state, another in its own"
    assert cells[0][1] == cells[1][1] == cells[2][1] == cells[2][2], "the same state twice in one episode"
    assert cells[0][1] != cells[3][1]
    unknown = cells[1][2]
    assert [each for row in cells for each in row].count(unknown) == 1


def test_a_group_statistic_counts_rollouts_and_never_turns() -> None:
    long = episodes([1, 0], [("a",) * 6, ("a",)])
    for name in ("grpo", "mini_o3", "malformed_turn_filter", "simpletir"):
        found = advantages(name, long)
        assert found[0][0] == pytest.approx(-found[1][0]), name


def test_the_limit_of_turns_is_no_failure_and_a_void_turn_no_lesson() -> None:
    statuses = ((OK, TurnStatus.LIMIT), (OK, OK), (OK, TurnStatus.MALFORMED))
    batch = episodes(
        [0, 1, 0], [("a", "b")] * 3, turn_statuses=statuses, num_calls=torch.tensor([[1, 1], [1, 0], [1, 0]])
    )
    nan = [[value != value for value in row] for row in advantages("mini_o3", batch)]
    assert nan == [[True, True], [False, False], [False, False]]
    nan = [[value != value for value in row] for row in advantages("malformed_turn_filter", batch)]
    assert nan == [[False, False], [False, False], [False, True]]
    nan = [row[0] != row[0] for row in advantages("simpletir", batch)]
    assert nan == [False, False, True], "a call at the limit is a call; an answer that cannot be read is none"


def test_optimal_tool_calls_never_make_a_failure_better_than_a_success() -> None:
    calls = torch.tensor([[1, 0], [2, 2], [0, 0], [9, 9]])
    batch = episodes([1, 1, 0, 0], [("a", "b")] * 4, num_calls=calls)
    shaped = load_recipe("otc_po").rewards[0](batch).tolist()
    assert shaped[0] == 1 and 0 < shaped[1] < 1 and shaped[2:] == [0, 0]


def test_tokens_of_a_turn_that_is_not_there_have_the_last_one() -> None:
    batch = episodes([1, 0], [("a", "b"), ("a", "b")], turn_ids=torch.tensor([[0, 900], [-5, 1]]))
    assert on_turn_tokens(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), batch).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("name", ["grpo", "gspo", *TURN_RECIPES])
def test_no_recipe_learns_from_an_observation(name: str) -> None:
    outcomes = [
        make_outcome(float(i % 2), observations=("12", "345", ""), state_keys=("a", "b", "c")) for i in range(4)
    ]
    scored = make_scored_episodes(*outcomes)
    drawn = DrawnGroup(scored=scored, age_steps=0, use=1)
    batch = as_scored(make_batch(Draw(step=1, groups=(drawn,), num_zero_variance=0), ToyTokenizer()))
    recipe = load_recipe(name)
    seen = ~batch.mask
    assert int(seen.sum()) == 4 * 5
    ready = with_advantages(recipe, batch, "all")
    found = coefficients(recipe, ready, batch.behavior_logprobs, torch.zeros_like(batch.behavior_logprobs))
    assert not bool(found.logprobs[seen].any())
    assert bool(found.logprobs.isfinite().all())


def test_a_draw_of_single_answers_alone_suits_every_recipe_over_turns() -> None:
    batch = as_scored(toy_batch([1.0, 0.0, 1.0]))
    for name in TURN_RECIPES:
        recipe = load_recipe(name)
        ready = with_advantages(recipe, batch, "all")
        found = coefficients(recipe, ready, batch.behavior_logprobs, torch.zeros_like(batch.behavior_logprobs))
        assert bool(found.logprobs.isfinite().all()), name


def test_an_environment_may_only_name_signals_that_there_are() -> None:
    def named(*signals: str) -> Environment:
        return cast(Environment, SimpleNamespace(name="maze", signals=signals))

    assert signals_of(named("state_keys")) == {"state_keys"}
    assert signals_of(cast(Environment, SimpleNamespace(name="maze"))) == frozenset()
    with pytest.raises(ConfigError, match="maze: signals smell; known: turn_rewards, state_keys"):
        signals_of(named("smell"))


def test_steps_in_a_real_grid_are_credited_by_what_they_were_worth_from_their_cell() -> None:
    """Random walks, replayed: a step towards the goal counts more than one away from the same cell."""
    config = EnvironmentConfig(name="grid", kind="grid_world", params={"style": "char", "walls": 0.0})
    environment, tokenizer, dice = build_environment(config), CharTokenizer(), random.Random(3)
    tries = [tuple(dice.choice("urdl") for _ in range(environment.max_turns)) for _ in range(16)]
    outcomes = tuple(replay(environment, 5, each) for each in tries)
    walks = [each[: len(outcome.transitions)] for each, outcome in zip(tries, outcomes, strict=True)]
    identity = make_identity()
    sampling = Sampling(max_new_tokens=4)
    group = make_episode_group(environment, 5, walks, tokenizer, identity.node_id, sampling)
    rewards = np.array([each.reward for each in outcomes], np.float32)
    sealed = seal_group(group, identity)
    scored = to_scored_group(group, sealed, rewards, tokenizer, is_made_here=True, now_s=0.0, outcomes=outcomes)
    drawn = DrawnGroup(scored=scored, age_steps=0, use=1)
    batch = make_batch(Draw(step=1, groups=(drawn,), num_zero_variance=0), tokenizer)
    assert batch.num_turns is not None and batch.num_turns.tolist() == [len(walk) for walk in walks]
    assert (batch.turn_ids * batch.mask).max(dim=1).values.tolist() == [len(walk) - 1 for walk in walks]
    turns = turns_of(batch)
    cells = state_cells(batch, turns)
    with_outcome = turns.with_outcome(batch)
    credit = by_cell(discounted_returns(with_outcome, 0.5), cells, turns, group_centred)
    shared = sum(int((cells[turns.exists] == cell).sum()) > 1 for cell in cells[turns.exists].unique())
    assert shared >= 5, "walks cross"
    towards = turns.exists & (turns.rewards > 0)
    away = turns.exists & (turns.rewards < 0)
    assert float(credit[towards].mean()) > 0.02 > -0.02 > float(credit[away].mean())
    batch = as_scored(batch)
    for name in TURN_RECIPES:
        ready = with_advantages(load_recipe(name), batch, "all")
        assert bool(ready.advantages.isfinite().all()), name
