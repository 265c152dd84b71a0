"""At which temperature a server gives log-probs, found out from samples: scripted servers."""

import logging
from collections.abc import Callable, Sequence

import pytest

from swarm.generation.openai_dialects import RemoteCompletion, _checked, log_probs_are_scaled
from swarm.types import FinishReason, Sampling

PROMPTS = [[7], [8, 9], [10, 11, 12]]
ALWAYS = 100


class ScriptedServer:
    """Samples of given lengths, whose log-probs differ from the scores of the same tokens by given amounts."""

    model = "m"

    def __init__(self, length: Callable[[int], int], differences: Sequence[float]) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []  # prompt and seed
        self.tokens = 0
        self.lacks_on = ALWAYS  # the sample from which on there are no log-probs
        self._length = length
        self._differences = differences

    def complete(self, model: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> RemoteCompletion:
        assert sampling.temperature == 2.0
        length = min(self._length(len(self.asked)), sampling.max_new_tokens)
        self.asked.append((tuple(prompt), seed))
        logprobs = None if len(self.asked) > self.lacks_on else [-1.0] * length
        return RemoteCompletion(token_ids=[3] * length, logprobs=logprobs, finish=FinishReason.LENGTH)

    def score(self, model: str, sequence: Sequence[int]) -> list[float]:
        prompt, _ = self.asked[-1]
        assert tuple(sequence[: len(prompt)]) == prompt
        scores = [-99.0] * (len(prompt) - 1)  # of the prompt
        for _ in sequence[len(prompt) :]:
            scores.append(-1.0 - self._differences[self.tokens % len(self._differences)])
            self.tokens += 1
        return scores


def long(number: int) -> int:
    return 1000


def test_servers_that_scale_and_those_that_do_not_are_told_apart() -> None:
    assert log_probs_are_scaled(ScriptedServer(long, [0.4, 1.5, 0.1, 0.9]), "m", PROMPTS) is True
    assert log_probs_are_scaled(ScriptedServer(long, [0.03, 0.0, 0.29, 0.05]), "m", PROMPTS) is False


def test_several_prompts_and_seeds_are_heard_before_it_is_decided() -> None:
    server = ScriptedServer(long, [0.0])
    log_probs_are_scaled(server, "m", PROMPTS)
    prompts, seeds = zip(*server.asked, strict=True)
    assert set(prompts) == set(map(tuple, PROMPTS)) and len(set(seeds)) == len(seeds) and server.tokens >= 32


@pytest.mark.parametrize(("first", "others", "is_scaled"), [(9998.0, 0.05, False), (0.1, 0.6, True)])
def test_one_short_sample_decides_nothing(first: float, others: float, is_scaled: bool) -> None:
    server = ScriptedServer(lambda number: 1 if number == 0 else 1000, [first, *[others] * 200])
    assert log_probs_are_scaled(server, "m", PROMPTS) is is_scaled


@pytest.mark.parametrize("length", [0, 1])
def test_too_few_tokens_are_said_and_scale_nothing(length: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert log_probs_are_scaled(ScriptedServer(lambda number: length, [0.9]), "m", PROMPTS) is False
    assert "too few tokens" in caplog.text


def test_scores_that_are_no_numbers_scale_nothing() -> None:
    assert log_probs_are_scaled(ScriptedServer(long, [float("nan"), 0.1]), "m", PROMPTS) is False


@pytest.mark.parametrize("first", [0, 2])
def test_a_sample_without_log_probs_is_of_a_server_without(first: int) -> None:
    server = ScriptedServer(long, [0.9])
    server.lacks_on = first
    assert log_probs_are_scaled(server, "m", PROMPTS) is None


@pytest.mark.parametrize("most", [3, 4])
def test_what_a_server_cuts_off_before_the_limit_is_not_sent_to_others(
    most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A context that is too short for prompt and answer; admission of others takes a cut answer for whole ones only."""
    made = _checked([5, 6, 7], None, "length", [2], most)
    assert made.finish is (FinishReason.LENGTH if most == 3 else FinishReason.ABORTED)
    assert ("give it a longer context" in caplog.text) is (most == 4)
