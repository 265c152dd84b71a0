"""Episodes that cannot go on: said in a sentence, and seldom."""

import logging
from concurrent.futures import Future

import pytest

from swarm.episode import Actions, EpisodeOutcome, Message, Transition
from swarm.generation import episode_player
from swarm.generation.episode_player import EpisodePlayer
from swarm.model.tokenizer import CharTokenizer
from swarm.types import EpisodeLimits, Task

LIMITS = EpisodeLimits(max_new_tokens=4, max_episode_tokens=100)


def answering(content: str) -> EpisodePlayer:
    def step(env: str, task_id: int, actions: Actions) -> "Future[EpisodeOutcome]":
        done: Future[EpisodeOutcome] = Future()
        message = Message(role="user", content=content)
        done.set_result(EpisodeOutcome(reward=0.0, transitions=(Transition(messages=(message,)),)))
        return done

    question = Message(role="user", content="a")
    task = Task(env=f"says {content}", task_id=7, messages=(question,), max_turns=2)
    return EpisodePlayer(CharTokenizer(), LIMITS, step, [task], num_samples=8)


def test_an_observation_that_the_model_cannot_read_is_a_sentence_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(episode_player.time, "monotonic", lambda: now_s[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):  # a batch has a player of its own
            player = answering("Hot")
            assert [player.observe(rollout, [2], True).result() for rollout in range(8)] == [None] * 8
            now_s[0] += 10.0
        (record,) = caplog.records
        assert answering("Cold").observe(0, [2], True).result() is None
        assert len(caplog.records) == 2, "another environment has a reason of its own"
        now_s[0] += 40.0
        answering("Hot").observe(0, [2], True)
        assert len(caplog.records) == 3
    assert record.exc_info is None and record.__dict__["environment"] == "says Hot"
    error = record.__dict__["error"]
    assert "cannot read character 'H'" in error and "abcdefghijklmnopqrstuvwxyz0123456789:=#>+-*? " in error
    assert answering("hot").observe(0, [2], True).result() is not None
