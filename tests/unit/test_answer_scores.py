"""The policy's likelihood of the right answer before each turn, and its shift by the observation after one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.config import EnvironmentConfig, LearnerConfig
from swarm.environments.load import build_environment
from swarm.environments.look_up import LookUpEnvironment
from swarm.environments.replay import replay
from swarm.episode import Actions
from swarm.learn.learner import PolicyLearner
from swarm.learn.requested_scores import NOTHING, _begins, asked_batch, masked_batch
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer, text_ids
from swarm.objectives.batch import Batch
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.methods import load_recipe
from swarm.testing.builders import make_scored
from swarm.testing.episodes import make_episode_group
from swarm.testing.tiny_models import make_learner
from swarm.types import Draw, DrawnGroup, Sampling

OWN = "a" * 64
TOKENIZER = CharTokenizer()


def look_up() -> LookUpEnvironment:
    built = build_environment(EnvironmentConfig(name="look_up", kind="look_up", params={"style": "char"}))
    assert isinstance(built, LookUpEnvironment)
    return built


def draw_of(environment: LookUpEnvironment, episodes: list[Actions]) -> Draw:
    group = make_episode_group(environment, 0, episodes, TOKENIZER, OWN, Sampling(max_new_tokens=6))
    outcomes = tuple(replay(environment, 0, actions) for actions in episodes)
    scored = replace(make_scored(group, rewards=[outcome.reward for outcome in outcomes]), outcomes=outcomes)
    return Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)


def learner(network: Any, environment: LookUpEnvironment, recipe: str, folder: Path) -> PolicyLearner:
    given = {"network": network, "config": LearnerConfig(token_budget=300), "policy_id": OWN}
    return make_learner(folder, recipe, **given, answer_of=lambda _, task_id: environment.reference(task_id))


def expected(network: Any, environment: LookUpEnvironment, actions: Actions, turn: int) -> float:
    """One sequence, scored as a whole: prompt, what was said until the turn, the answer."""
    ids = TOKENIZER.encode_prompt(environment.task(0))
    for text, transition in zip(actions[:turn], replay(environment, 0, actions).transitions, strict=False):
        ids += TOKENIZER.encode_response(text) + TOKENIZER.encode_observation(transition.messages, True)
    answer = TOKENIZER.encode_response(environment.reference(0))[:-1]
    logprobs = network(input_ids=torch.tensor([ids + answer])).logits[0].detach().log_softmax(dim=-1)
    each = [float(logprobs[len(ids) - 1 + place, token]) for place, token in enumerate(answer)]
    return float(torch.tensor(each).mean().exp())


@pytest.mark.parametrize("is_short", [True, False])
def test_each_turn_has_the_probability_that_one_pass_over_its_conversation_gives(
    is_short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, network = look_up(), tiny_network(3)
    right = environment.demonstration(0)
    episodes: list[Actions] = [right, ("abc",), ("?zzz", *right), (right[0], "no")]
    if is_short:  # single answers alone
        episodes = [("abc",), ("abd",)]
    found: list[torch.Tensor] = []
    part = load_recipe("igpo").advantage

    def noted(_: Any, batch: Any) -> torch.Tensor:
        found.append(batch.answer_probs)
        return batch.rewards

    monkeypatch.setattr(type(part), "__call__", noted)
    learner(network, environment, "igpo", tmp_path).dry_run(draw_of(environment, episodes))
    probs = found[0]
    assert probs.shape == (len(episodes), max(map(len, episodes)))
    for row, actions in enumerate(episodes):
        for turn in range(probs.shape[1]):
            wanted = expected(network, environment, actions, turn) if turn < len(actions) else 0.0
            assert float(probs[row, turn]) == pytest.approx(wanted, abs=1e-5), (row, turn)


def test_a_group_of_equal_outcomes_teaches_by_information_and_not_by_outcomes(tmp_path: Path) -> None:
    environment = look_up()
    right = environment.demonstration(0)
    draw = draw_of(environment, [(*right[:2], "no"), ("?zzz", "?zzz", "no")])
    assert not draw.groups[0].scored.has_signal
    norms = [
        learner(tiny_network(3), environment, recipe, tmp_path / recipe).step(draw).grad_norm
        for recipe in ("igpo", "grpo")
    ]
    assert norms[0] > 1e-3 and norms[1] == 0


def test_a_turn_without_tokens_is_asked_where_the_next_one_begins_and_costs_no_row() -> None:
    """An action of no tokens here, or a turn that was cut off; 0s of a row's end are no turn."""
    assert _begins([0, 0, 1, 2, 2, 0, 0], 3) == [0, 2, 3]
    assert _begins([0, 0, 2, 2, 0], 3) == [0, 2, 2], "turn 1 has none"
    assert _begins([0, 1, 1, 0], 4) == [0, 1, 1, 1], "turns 2 and 3 were cut off"
    assert _begins([0, 0, 0], 1) == [0]


def test_a_batch_of_questions_holds_the_tokens_of_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of tokens are as wide as the longest question, and none of the step is copied for each turn."""
    environment = look_up()
    right = environment.demonstration(0)
    batch = make_batch(draw_of(environment, [right, (right[0], "no")]), TOKENIZER)
    widths: list[int] = []
    select = Batch.select

    def noted(self: Batch, rollouts: Any) -> Batch:
        widths.append(self.token_ids.shape[1])
        return select(self, rollouts)

    monkeypatch.setattr(Batch, "select", noted)
    asked = asked_batch(batch, [(0, 0), (0, 4), (1, 0)], [[5, 6]])
    masked = masked_batch(batch, [(0, 0), (1, 0)], [7])
    assert widths == [0, 0] and asked.token_ids.shape == (3, 6) and masked.token_ids.shape[0] == 2
    assert asked.mask.sum(dim=1).tolist() == [2, 2, 2] and asked.token_ids[1, 4:].tolist() == [5, 6]


def test_an_observation_counts_by_what_the_next_turn_gains_over_a_pass_in_which_it_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, network = look_up(), tiny_network(3)
    right = environment.demonstration(0)
    episodes: list[Actions] = [right, ("?zzz", *right), ("abc",)]
    found: list[torch.Tensor] = []
    part = load_recipe("infopo").advantage

    def noted(_: Any, batch: Any) -> torch.Tensor:
        found.append(batch.feedback_shifts)
        return batch.rewards

    monkeypatch.setattr(type(part), "__call__", noted)
    learner(network, environment, "infopo", tmp_path).dry_run(draw_of(environment, episodes))

    def mean(before: list[int], action: list[int]) -> float:
        logprobs = network(input_ids=torch.tensor([before + action])).logits[0].detach().log_softmax(dim=-1)
        return float(torch.stack([logprobs[len(before) - 1 + k, token] for k, token in enumerate(action)]).mean())

    nothing = text_ids(TOKENIZER, NOTHING)
    for row, actions in enumerate(episodes):
        ids = TOKENIZER.encode_prompt(environment.task(0))
        transitions = replay(environment, 0, actions).transitions
        for turn in range(found[0].shape[1]):
            wanted = 0.0
            if turn < len(actions) - 1:
                ids += TOKENIZER.encode_response(actions[turn])
                seen = TOKENIZER.encode_observation(transitions[turn].messages, True)
                blind = (nothing + [nothing[-1]] * len(seen))[: len(seen)]
                action = TOKENIZER.encode_response(actions[turn + 1])
                wanted = mean(ids + seen, action) - mean(ids + blind, action)
                ids += seen
            assert float(found[0][row, turn]) == pytest.approx(wanted, abs=1e-5), (row, turn)
    assert float(found[0].abs().max()) > 1e-3
