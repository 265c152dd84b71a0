"""The transformers engine on a tiny random network, against an independent full forward without cache."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from engines import sharp_network
from waits import HANG_S

from swarm.clock import ManualClock
from swarm.episode import Message
from swarm.errors import ConfigError, WeightsRefused
from swarm.generation import transformers_engine
from swarm.generation.produce import UNSCORED, evaluate, produce, try_tasks
from swarm.generation.sampling import truncate
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Generator, Observation
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import snapshot
from swarm.types import EpisodeLimits, FinishReason, PolicyVersion, Rollout, Sampling, Task

VERSION = PolicyVersion(policy_id="a", step=0)
TOKENIZER = CharTokenizer()
ENDLESS = CharTokenizer()
ENDLESS.eos_ids = frozenset()
PROMPTS = [[5, 6, 7], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [20, 21, 22, 23, 24, 25]]
WARM = Sampling(temperature=0.7, max_new_tokens=12)


def engine(seed: int = 0, **options: Any) -> TransformersGenerator:
    return TransformersGenerator(sharp_network(), TOKENIZER, VERSION, seed, **options)


def tokens_of(rollout: Rollout) -> list[int]:
    assert rollout.trace is not None
    return rollout.trace.token_ids.tolist()


def logprobs_of(rollout: Rollout) -> np.ndarray:
    assert rollout.trace is not None and rollout.trace.logprobs is not None
    return rollout.trace.logprobs


def full_forward(network: torch.nn.Module, prompt: list[int], response: list[int], temperature: float) -> np.ndarray:
    """Log-probs of a response from one forward of the whole row: no cache, no padding, no batch."""
    ids = torch.tensor([prompt + response])
    with torch.no_grad():
        logits = network(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1)[torch.arange(len(response)), torch.tensor(response)].numpy()


def test_logprobs_equal_an_uncached_forward_to_1e_4_nats() -> None:
    groups = engine().generate(PROMPTS, 4, WARM)
    network = sharp_network()
    lengths = set()
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert len(group) == 4
        for rollout in group:
            expected = full_forward(network, prompt, tokens_of(rollout), WARM.temperature)
            np.testing.assert_allclose(logprobs_of(rollout), expected, atol=1e-4)
            lengths.add(len(tokens_of(rollout)))
    assert len(lengths) > 1  # rows of different lengths were dropped on the way


def test_a_row_ends_at_the_last_position_of_the_model() -> None:
    """Beyond it are places that no model was made for, and GPT-2 and OPT have none."""
    generator, long = engine(), Sampling(temperature=9.0, max_new_tokens=9)
    generator._tokenizer = ENDLESS
    ((single,),) = generator.generate([[5] * 120], 1, long)
    assert (len(tokens_of(single)), single.finish) == (8, FinishReason.LENGTH)

    def observe(rollout: int, action_ids: Sequence[int], is_ended: bool) -> "Future[Observation | None]":
        answer: Future[Observation | None] = Future()
        answer.set_result(Observation([6] * 20, is_new[rollout]))
        return answer

    is_new = [0, 1]  # the observation is of the same conversation, or begins another
    ((full, split),) = generator.generate([[5] * 91], 2, long, observe=observe)
    assert len(tokens_of(full)) == 9, "91 + 9 + 20 + 9 are 129"
    assert len(split.actions) > 2 and len(tokens_of(split)) > 38
    with pytest.raises(ConfigError, match="a prompt has 128 tokens, and the model has 128 positions"):
        generator.generate([[5] * 128], 1, long)
    with pytest.raises(ConfigError, match="128 positions"):
        generator.greedy([[5] * 128], 1)


def test_a_rollout_is_the_same_alone_or_in_a_batch() -> None:
    together = engine().generate(PROMPTS, 4, WARM)
    alone = [engine().generate([prompt], 4, WARM)[0] for prompt in PROMPTS]
    chunked = engine(max_rows=4).generate(PROMPTS, 4, WARM)
    reversed_order = engine().generate(PROMPTS[::-1], 4, WARM)[::-1]
    for other in (alone, chunked, reversed_order):
        for group, same in zip(together, other, strict=True):
            assert [tokens_of(r) for r in group] == [tokens_of(r) for r in same]
            for one, two in zip(group, same, strict=True):
                np.testing.assert_allclose(logprobs_of(one), logprobs_of(two), atol=1e-4)


def test_samples_of_a_prompt_asked_again_differ_until_the_generator_is_rebuilt() -> None:
    generator = engine()
    first, second = generator.generate(PROMPTS[:1], 4, WARM), generator.generate(PROMPTS[:1], 4, WARM)
    assert [tokens_of(r) for r in first[0]] != [tokens_of(r) for r in second[0]]
    twins = engine().generate([PROMPTS[0], PROMPTS[0]], 4, WARM)
    assert [[tokens_of(r) for r in group] for group in twins] == [
        [tokens_of(r) for r in group] for group in (first[0], second[0])
    ]
    other_seed = engine(seed=1).generate(PROMPTS[:1], 4, WARM)
    assert [tokens_of(r) for r in first[0]] != [tokens_of(r) for r in other_seed[0]]


def test_a_number_fixes_the_samples_whatever_was_asked_before() -> None:
    generator = engine()
    generator.generate(PROMPTS, 4, WARM, [5, 6, 7, 8])
    again = generator.generate(PROMPTS[1:3], 4, WARM, [6, 7])
    fresh = engine().generate(PROMPTS, 4, WARM, [5, 6, 7, 8])
    for group, same in zip(again, fresh[1:3], strict=True):
        assert [tokens_of(r) for r in group] == [tokens_of(r) for r in same]
    other = engine().generate(PROMPTS[1:2], 4, WARM, [9])
    assert [tokens_of(r) for r in other[0]] != [tokens_of(r) for r in fresh[1]]


def test_greedy_equals_generate_of_transformers() -> None:
    network: Any = sharp_network()
    expected: list[str] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            whole = network.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10)
        expected.append(TOKENIZER.decode(whole[0, len(prompt) :].tolist()))
    assert engine().greedy(PROMPTS, 10) == [(text,) for text in expected]
    assert len(set(expected)) == len(PROMPTS)


def test_sampled_frequencies_are_the_probabilities() -> None:
    groups = engine(max_rows=4096).generate([PROMPTS[0]], 4096, Sampling(max_new_tokens=1))
    counts = np.bincount([tokens_of(r)[0] for r in groups[0]], minlength=TOKENIZER.vocab_size) / 4096
    with torch.no_grad():
        logits = sharp_network()(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1]
    expected = torch.softmax(logits.float(), -1).numpy()
    # 5 standard errors of a share with 4096 draws
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4096) + 1e-4).all()


def test_eos_is_kept_and_finish_says_why_a_rollout_ended() -> None:
    groups = engine().generate(PROMPTS, 16, Sampling(temperature=2.0, max_new_tokens=20))
    finishes = set()
    for rollout in (rollout for group in groups for rollout in group):
        ids = tokens_of(rollout)
        finishes.add(rollout.finish)
        assert rollout.text == TOKENIZER.decode(ids)
        assert (ids[-1] == TOKENIZER.eos_id) == (rollout.finish is FinishReason.STOP)
        assert TOKENIZER.eos_id not in ids[:-1]
        assert rollout.finish is FinishReason.STOP or len(ids) == 20
        assert rollout.trace is not None and rollout.trace.action_mask.all()
        assert rollout.trace.spans[0].version == VERSION and np.isnan(rollout.claimed_reward)
    assert finishes == {FinishReason.STOP, FinishReason.LENGTH}


def test_truncated_sampling_keeps_the_most_likely_tokens_only() -> None:
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    assert truncate(probabilities, Sampling(top_k=2)).nonzero()[:, 1].tolist() == [1, 3]
    assert truncate(probabilities, Sampling(top_p=0.65)).nonzero()[:, 1].tolist() == [1, 3]
    assert truncate(probabilities, Sampling(top_p=0.75)).nonzero()[:, 1].tolist() == [1, 2, 3]
    assert truncate(probabilities, Sampling(top_p=0.01)).nonzero()[:, 1].tolist() == [1]
    only = engine().generate(PROMPTS, 2, Sampling(top_k=1, max_new_tokens=10))
    assert [group[0].actions for group in only] == engine().greedy(PROMPTS, 10)


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(repetition_penalty=1.1)])
def test_sampling_it_cannot_do_is_refused(sampling: Sampling) -> None:
    with pytest.raises(ConfigError, match="sampling"):
        engine().generate(PROMPTS, 1, sampling)


def test_loading_swaps_version_and_weights_and_a_misfit_changes_neither() -> None:
    generator: Generator = engine()
    newer = PolicyVersion(policy_id="a", step=1)
    other = sharp_network(seed=7)
    before = generator.greedy(PROMPTS, 8)
    with pytest.raises(ConfigError):
        generator.load(newer, {"model.norm.weight": torch.zeros(96)})
    with pytest.raises(ConfigError):
        generator.load(newer, None)
    assert generator.version == VERSION and generator.greedy(PROMPTS, 8) == before
    generator.load(newer, snapshot(other))
    group = generator.generate(PROMPTS[:1], 1, WARM)[0]
    assert group[0].trace is not None and group[0].trace.spans[0].version == newer
    expected = full_forward(other, PROMPTS[0], tokens_of(group[0]), WARM.temperature)
    np.testing.assert_allclose(logprobs_of(group[0]), expected, atol=1e-4)


@pytest.mark.parametrize("step", ["snapshot", "load_published", "check_canaries"])
def test_a_load_that_fails_half_way_leaves_the_old_weights(
    step: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    generator = engine()
    before, newer = generator.greedy(PROMPTS, 8), PolicyVersion(policy_id="a", step=1)
    run, weights = getattr(transformers_engine, step), snapshot(sharp_network(seed=7))

    def fail_once(*arguments: object) -> None:
        monkeypatch.setattr(transformers_engine, step, run)
        run(*arguments)
        raise torch.OutOfMemoryError("tried to allocate 15 GiB")

    monkeypatch.setattr(transformers_engine, step, fail_once)
    with pytest.raises(WeightsRefused, match="step 1: OutOfMemoryError: tried to allocate 15 GiB"):
        generator.load(newer, weights)
    assert [record.exc_info is not None for record in caplog.records] == [True], "the traceback is told"
    assert generator.version == VERSION and generator.greedy(PROMPTS, 8) == before
    generator.load(newer, weights)
    assert generator.version == newer and generator.greedy(PROMPTS, 8) != before


def test_cancel_ends_a_call_and_marks_the_unfinished_aborted() -> None:
    network = sharp_network()
    generator = TransformersGenerator(network, TOKENIZER, VERSION, 0)
    num_forwards = 0

    def cancel_at_the_fourth(*_: object) -> None:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 4:
            canceller = threading.Thread(target=generator.cancel)
            canceller.start()
            canceller.join()

    handle = network.register_forward_pre_hook(cancel_at_the_fourth)
    groups = generator.generate(PROMPTS, 4, Sampling(max_new_tokens=100))
    handle.remove()
    rollouts = [rollout for group in groups for rollout in group]
    assert num_forwards == 4
    assert {r.finish for r in rollouts} <= {FinishReason.ABORTED, FinishReason.STOP}
    assert any(r.finish is FinishReason.ABORTED for r in rollouts)
    assert max(len(tokens_of(r)) for r in rollouts) == 4  # the token of the forward in progress is still made
    after = generator.generate(PROMPTS, 1, WARM)
    assert all(r.finish is not FinishReason.ABORTED for group in after for r in group)


def test_each_prompt_is_prefilled_once() -> None:
    network = sharp_network()
    shapes: list[tuple[int, ...]] = []

    def note(_module: object, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    network.register_forward_pre_hook(note, with_kwargs=True)
    long = Sampling(temperature=2.0, max_new_tokens=60)
    TransformersGenerator(network, TOKENIZER, VERSION, 0).generate(PROMPTS, 8, long)
    assert shapes[0] == (4, 9)
    assert all(width == 1 and num_rows <= 32 for num_rows, width in shapes[1:])
    assert shapes[-1][0] < 32  # finished rows cost nothing


def test_produced_groups_name_prompt_tokenizer_and_producer() -> None:
    tasks = [
        Task(env="rev", task_id=number, messages=(Message(role="user", content=question),))
        for number, question in enumerate(("rev:ab=", "rev:abcde="))
    ]
    generator = engine()
    clock = ManualClock(start_s=50.0)
    groups = produce(generator, TOKENIZER, tasks, 3, WARM, run_id="r", producer="n", clock=clock)
    assert [group.task_id for group in groups] == [0, 1]
    for task, group in zip(tasks, groups, strict=True):
        assert group.prompt_ids.tolist() == TOKENIZER.encode_prompt(task) and group.prompt_ids.dtype == np.int32
        assert (group.env, group.run_id, group.producer, group.policy_id) == ("rev", "r", "n", "a")
        assert group.tokenizer_digest == TOKENIZER.digest and group.verifier == UNSCORED and group.created_at_s == 50.0
        assert len(group.rollouts) == 3
    limits = EpisodeLimits(max_new_tokens=5)
    greedy = generator.greedy([TOKENIZER.encode_prompt(t) for t in tasks], 5)
    assert evaluate(generator, TOKENIZER, tasks, limits) == greedy
    assert try_tasks(generator, TOKENIZER, tasks, limits) == [[actions] for actions in greedy]
    sampled = try_tasks(generator, TOKENIZER, tasks, limits, num_tries=3)
    assert [len(tries) for tries in sampled] == [3, 3] and len({tuple(tries) for tries in sampled[0]}) > 1
    assert try_tasks(generator, TOKENIZER, tasks, limits, num_tries=3) == sampled, "the same draws at each evaluation"


def test_closing_ends_a_call_in_the_middle_of_an_episode_without_end() -> None:
    """Its environment always answers, and there is room for hours: only a close ends it."""
    made, has_played = engine(), threading.Event()

    def observe(rollout: int, action_ids: Sequence[int], is_ended: bool) -> "Future[Observation | None]":
        has_played.set()
        answer: Future[Observation | None] = Future()
        answer.set_result(Observation(token_ids=[5]))
        return answer

    playing = threading.Thread(target=lambda: made.generate(PROMPTS[:1], 1, WARM, observe=observe), daemon=True)
    playing.start()
    assert has_played.wait(HANG_S)
    made.close()
    playing.join(HANG_S)
    assert not playing.is_alive()
