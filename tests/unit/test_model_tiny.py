"""The warm start of the tiny model: what its labels are, and that the shipped checkpoint is one that can improve."""

import random

import pytest

from swarm.config import ModelConfig
from swarm.environments.char_tasks import ALPHABET, KINDS
from swarm.environments.environment import is_held_out
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.network import load_model, tiny_network
from swarm.model.version_digest import published_state, weights_digest
from swarm.simulate.tiny import DISTORTIONS, accuracies, fine_tune, mislabel, training_pairs
from swarm.types import PolicyVersion


@pytest.mark.parametrize("answer", ["7", "aa", "dcba", "101", "0", "zzzzzzzz"])
def test_a_label_is_the_truth_as_often_as_asked_and_otherwise_never(answer: str) -> None:
    source = random.Random(0)
    labels = [mislabel(answer, 0.15, source) for _ in range(4000)]
    assert labels.count(answer) / 4000 == pytest.approx(0.15, abs=0.025)
    assert len(set(labels)) >= 4 and all(set(label) <= set(ALPHABET) for label in labels)
    assert answer not in {mislabel(answer, 0.0, source) for _ in range(200)}


def test_distortions_are_five_functions_of_the_answer() -> None:
    assert [distort("abc") for distort in DISTORTIONS] == ["bcd", "ab", "aabc", "bca", "ab#"]


def test_training_questions_are_never_held_out() -> None:
    source = random.Random(1)
    questions = [draw(source)[0] for draw in training_pairs() for _ in range(40)]
    assert len(questions) == 40 * len(KINDS)
    assert not any(is_held_out(question) for question in questions)


def test_fine_tuning_lowers_the_loss_and_one_seed_gives_one_checkpoint() -> None:
    losses: list[float] = []
    digests: list[bytes] = []
    pairs = training_pairs()
    for _ in range(2):
        network = tiny_network(0)
        fine_tune(
            network, pairs, [0.15] * len(pairs), num_steps=12, seed=3, report=lambda _step, loss: losses.append(loss)
        )
        digests.append(weights_digest(published_state(network)))
    assert losses[11] < losses[0] - 0.3
    assert losses[:12] == losses[12:] and digests[0] == digests[1]


def test_the_shipped_checkpoint_holds_skills_that_it_rarely_plays() -> None:
    model = load_model(ModelConfig(source="tiny", dtype="float32"))
    generator = TransformersGenerator(model.network, model.tokenizer, PolicyVersion(policy_id="a", step=0), 0)
    scores = accuracies(generator, num_problems=32, num_samples=4)
    greedy = sum(value for value, _ in scores.values()) / len(scores)
    sampled = sum(value for _, value in scores.values()) / len(scores)
    assert 0.2 < greedy < 0.45
    assert 0.03 < sampled < 0.12
