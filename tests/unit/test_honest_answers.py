"""Samples of an honest engine are admitted by another node, however they end: a few of the benchmark's."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.honest_answers import World, environments_of
from swarm.config import ModelConfig
from swarm.exchange.checks import episode_checks
from swarm.model.network import load_model


def answers_of_the_tiny_model(tmp_path: Path) -> World:
    model = load_model(ModelConfig(source="tiny", dtype="float32"))
    world = World(model, environments_of("tiny", tmp_path), num_tokens=5)
    asyncio.run(world.play(range(12)))
    return world


def test_no_answer_of_the_tiny_model_is_refused(tmp_path: Path) -> None:
    counts = answers_of_the_tiny_model(tmp_path).counts
    assert not counts.refused and not counts.prefixes_refused
    assert counts.answers >= 160 and min(counts.ended, counts.cut_off) > 40 and counts.prefixes > 300


def test_a_check_that_refuses_honest_answers_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_checks, "CUT_FACTOR", 0)
    counts = answers_of_the_tiny_model(tmp_path).counts
    assert sum(counts.refused.values()) > 100
