"""Replay of episodes: pure in the actions, bounded in turns and text, the same one action at a time."""

import json
import math
from collections.abc import Mapping

import pytest

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.environments.replay import MAX_OBSERVATION_CHARS, MAX_REWARD, LiveEpisodes, answer_reward, replay
from swarm.episode import (
    Action,
    EpisodeOutcome,
    Message,
    Transition,
    TurnStatus,
    free_text_share,
    outcome_from_json,
    outcome_to_json,
)


class Guess:
    """Higher or lower until the number is found."""

    def __init__(self, right: int) -> None:
        self._right = right
        self._num_tries = 0

    def step(self, action: Action) -> Transition:
        self._num_tries += 1
        key = f"{self._right}/{self._num_tries}"
        if not action.text.isdigit():
            told = (Message(role="user", content="a number, please"),)
            return Transition(messages=told, status=TurnStatus.MALFORMED, reward=-0.1, state_key=key)
        guess = int(action.text)
        if guess == self._right:
            return Transition(is_end=True, rewards={"outcome": 1.0, "speed": 1.0 / self._num_tries}, state_key=key)
        word = "higher" if guess < self._right else "lower"
        return Transition(messages=(Message(role="user", content=word),), state_key=key)


class Guessing(NumberedEnvironment):
    max_turns = 4
    num_steps = 0

    def __init__(self) -> None:
        super().__init__(EnvironmentConfig(name="guess", kind="plugin", num_tasks=50), "guess/1")

    def build(self, task_id: int) -> Problem:
        return Problem(question="Guess my number.", reference=str(task_id), initial_state=str(task_id))

    def begin(self, problem: Problem) -> Guess:
        return Guess(int(problem.reference))


def test_an_episode_goes_on_until_its_environment_ends_it() -> None:
    outcome = replay(Guessing(), 7, ("3", "x", "7"))
    assert [each.messages and each.messages[0].content for each in outcome.transitions] == [
        "higher",
        "a number, please",
        (),
    ]
    assert outcome.is_ended and outcome.reward == 1.0 and outcome.rewards["speed"] == pytest.approx(1 / 3)
    assert [each.reward for each in outcome.transitions] == [0.0, -0.1, 0.0]


def test_actions_after_the_end_are_left_out_and_missing_ones_leave_it_open() -> None:
    assert len(replay(Guessing(), 7, ("7", "7", "1")).transitions) == 1
    unfinished = replay(Guessing(), 7, ("1",))
    assert not unfinished.is_ended and unfinished.reward == 0.0 and unfinished.rewards == {}
    assert replay(Guessing(), 7, ()) == EpisodeOutcome(reward=0.0, transitions=())


def test_the_last_turn_ends_every_episode() -> None:
    outcome = replay(Guessing(), 7, ("1", "2", "3", "4", "7"))
    assert outcome.is_ended and len(outcome.transitions) == 4
    last = outcome.transitions[-1]
    assert (last.status, last.messages, outcome.reward) == (TurnStatus.LIMIT, (), 0.0)


def test_playing_one_action_at_a_time_is_replaying_and_steps_each_action_once() -> None:
    environment, live = Guessing(), LiveEpisodes()
    stepped: list[str] = []
    begin = environment.begin

    class Counted(Guess):
        def step(self, action: Action) -> Transition:
            stepped.append(action.text)
            return super().step(action)

    environment.begin = lambda problem: Counted(int(problem.reference))  # type: ignore[method-assign]
    actions = ("1", "9", "7")
    played = [live.step(environment, 7, actions[:count]) for count in range(1, 4)]
    assert stepped == ["1", "9", "7"]
    environment.begin = begin  # type: ignore[method-assign]
    assert played[-1] == replay(environment, 7, actions)
    # Two episodes with the same actions share nothing: the second is replayed.
    assert live.step(environment, 7, ("1", "9")) == live.step(environment, 7, ("1", "9"))


def test_a_dropped_episode_is_replayed() -> None:
    environment, live = Guessing(), LiveEpisodes(max_episodes=1)
    for task_id in (7, 8):
        live.step(environment, task_id, ("1",))
    assert live.step(environment, 7, ("1", "7")) == replay(environment, 7, ("1", "7"))


class Wild(Guessing):
    """An environment of long observations that pays the reward it was made with."""

    def __init__(self, rewards: Mapping[str, float], reward: float = 0.0) -> None:
        super().__init__()
        self.rewards, self.reward = rewards, reward

    def begin(self, problem: Problem) -> Guess:
        rewards, reward = self.rewards, self.reward

        class Episode(Guess):
            def step(self, action: Action) -> Transition:
                told = (Message(role="tool", content="x" * 100_000),)
                return Transition(messages=told, reward=reward, rewards=rewards, state_key="k" * 1000)

        return Episode(1)


@pytest.mark.parametrize(("rewards", "expected"), [({"outcome": 7.0}, 1.0), ({"other": 1.0}, 0.0)])
def test_texts_and_rewards_of_an_environment_are_bounded(rewards: dict[str, float], expected: float) -> None:
    outcome = replay(Wild(rewards), 1, ("a", "b"))
    first = outcome.transitions[0]
    assert len(first.messages[0].content) == MAX_OBSERVATION_CHARS
    assert replay(Wild(rewards), 1, ("a",) * 4).reward == expected
    assert outcome_from_json(json.loads(json.dumps(outcome_to_json(outcome)))) == outcome


@pytest.mark.parametrize(
    ("wild", "reason"),
    [
        (Wild({"outcome": math.inf}), "the reward 'outcome' is inf, which is no finite number"),
        (Wild({"outcome": 1.0, "left": math.nan}), "the reward 'left' is nan"),
        (Wild({}, reward=math.nan), "the reward of a turn is nan"),
    ],
)
def test_a_reward_that_is_no_number_is_an_error_and_not_0_in_silence(wild: Wild, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replay(wild, 1, ("a",))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Transition(status="won"), "a transition has the status 'won'; known: ok, tool_error, malformed, limit"),  # type: ignore[arg-type]
        (None, "step returned None, which is no swarm.episode.Transition"),
    ],
)
def test_what_is_no_transition_is_an_error_that_says_what_may_be(answer: object, reason: str) -> None:
    environment = Guessing()
    episode = environment.begin(environment.problem(1))
    episode.step = lambda action: answer  # type: ignore[assignment]
    environment.begin = lambda problem: episode  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=reason):
        replay(environment, 1, ("a",))


def test_a_status_may_be_written_as_its_word() -> None:
    environment = Guessing()
    episode = environment.begin(environment.problem(1))
    episode.step = lambda action: Transition(status="malformed")  # type: ignore[arg-type]
    environment.begin = lambda problem: episode  # type: ignore[method-assign]
    assert replay(environment, 1, ("a",)).transitions[0].status is TurnStatus.MALFORMED


def test_a_reward_that_no_float32_can_square_is_cut() -> None:
    outcome = replay(Wild({"outcome": 1.0, "left": -1e300}), 1, ("a", "b"))
    assert outcome.transitions[0].rewards == {"outcome": 1.0, "left": -MAX_REWARD}


def test_an_outcome_survives_json_and_nothing_else_is_taken_for_one() -> None:
    outcome = replay(Guessing(), 7, ("3", "x", "7"))
    data = json.loads(json.dumps(outcome_to_json(outcome)))
    assert outcome_from_json(data) == outcome
    for wrong in (
        None,
        3,
        [],
        [0.5],
        [2.0, []],
        ["1", []],
        [10**400, []],
        [0.5, [[]]],
        [0.5, [[[], True, 0, {}, "no", ""]]],
    ):
        with pytest.raises(ValueError):
            outcome_from_json(wrong)


@pytest.mark.parametrize(("num_values", "expected"), [(10, (1, "buyer", 2)), (8, (1, "buyer", 0)), (6, (0, "", 0))])
def test_outcomes_of_another_release_are_read_with_what_both_know(
    num_values: int, expected: tuple[int, str, int]
) -> None:
    """A store outlives the release that wrote it, in both directions."""
    turn = Transition(is_end=True, state_key="k", conversation=1, role="buyer", num_calls=2)
    data = json.loads(json.dumps(outcome_to_json(EpisodeOutcome(reward=0.5, transitions=(turn,)))))
    data[1][0] = [*data[1][0], "of a newer release"][:num_values]
    (read,) = outcome_from_json(data).transitions
    assert (read.conversation, read.role, read.num_calls) == expected and read.state_key == "k"


def test_a_single_answer_is_an_episode_that_ends_after_one_action() -> None:
    from swarm.environments.load import build_environment

    environment = build_environment(EnvironmentConfig(name="rev", kind="char", dataset="reverse"))
    right = environment.reference(3)
    assert environment.max_turns == 1 and answer_reward(environment, 3, f" {right} ") == 1.0
    outcome = replay(environment, 3, (right, "more"))
    assert outcome.is_ended and len(outcome.transitions) == 1 and outcome.rewards == {"outcome": 1.0}


def test_what_is_held_out_follows_from_all_that_the_number_draws() -> None:
    environment = Guessing()
    held_out = [environment.task(task_id).is_held_out for task_id in range(50)]
    assert 0 < sum(held_out) < 50, "the question alone is the same for all"


@pytest.mark.parametrize(
    ("text", "status", "share"),
    [
        ("42", TurnStatus.OK, 0.0),
        ("", TurnStatus.OK, 0.0),
        ("abcd<tool_call>{}</tool_call>", TurnStatus.OK, 4 / 29),
        ("abcd<tool_call>{}</tool_call>xyz<tool_call>{}</tool_call>", TurnStatus.OK, 7 / 57),
        ("say\n```python\nx = 1\n```", TurnStatus.OK, 4 / 23),
        ("go home", TurnStatus.MALFORMED, 1.0),
    ],
)
def test_text_beside_what_is_read_is_shown_as_a_share(text: str, status: TurnStatus, share: float) -> None:
    assert free_text_share((text,), [Transition(status=status)]) == pytest.approx(share)


def test_ends_that_do_not_come_cost_a_search_no_more_than_the_text() -> None:
    assert free_text_share(("<tool_call>" * 200_000,)) == 1.0
    assert free_text_share(("abcd", "```" * 100_001), [Transition()]) == pytest.approx(3 / 300_007)
