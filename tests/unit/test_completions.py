"""Completions of the transformers engine: requests that join and leave one batch, each as if it were alone."""

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engines import sharp_network
from waits import HANG_S

from swarm.errors import Unavailable
from swarm.generation import continuous_batching
from swarm.generation.continuous_batching import Decoding
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Completion, CompletionRequest
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import snapshot
from swarm.types import FinishReason, PolicyVersion, Sampling

VERSION, NEXT = PolicyVersion(policy_id="a", step=0), PolicyVersion(policy_id="a", step=1)
TOKENIZER = CharTokenizer()
KINDS = [
    Sampling(temperature=1.0, max_new_tokens=9),
    Sampling(temperature=0.5, max_new_tokens=14),
    Sampling(temperature=0.0, max_new_tokens=6),
    Sampling(temperature=1.0, top_k=3, max_new_tokens=11),
    Sampling(temperature=1.3, top_p=0.6, max_new_tokens=4),
]


def engine(**options: Any) -> TransformersGenerator:
    return TransformersGenerator(sharp_network(0), TOKENIZER, VERSION, 0, **options)


def requests() -> list[CompletionRequest]:
    """Of every kind of sampling and several lengths of prompt."""
    return [
        CompletionRequest(
            prompt_ids=[5 + (i + k) % 20 for k in range(1 + 3 * i % 7)], sampling=KINDS[i % len(KINDS)], seed=i
        )
        for i in range(15)
    ]


def alone(request: CompletionRequest) -> Completion:
    own = engine()
    try:
        return own.complete(request).result()
    finally:
        own.close()


def test_a_completion_depends_on_nothing_but_its_request() -> None:
    own = engine(max_rows=4)
    made = [call.result() for call in [own.complete(request) for request in requests()]]
    own.close()
    assert len({len(each.token_ids) for each in made}) > 3
    for request, completion in zip(requests(), made, strict=True):
        by_itself = alone(request)
        assert list(completion.token_ids) == list(by_itself.token_ids)
        assert completion.finish is by_itself.finish
        assert completion.logprobs is not None and by_itself.logprobs is not None
        np.testing.assert_allclose(completion.logprobs, by_itself.logprobs, atol=1e-5)
        assert [span.version for span in completion.spans] == [VERSION]


def test_log_probs_are_those_of_a_full_forward_at_the_temperature_before_truncation() -> None:
    network = sharp_network(0)
    for request in requests():
        completion = alone(request)
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = network(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()
        at = torch.log_softmax(logits / (request.sampling.temperature or 1.0), -1)
        expected = at[torch.arange(len(completion.token_ids)), torch.tensor(list(completion.token_ids))]
        np.testing.assert_allclose(completion.logprobs or [], expected.numpy(), atol=1e-4)
        if request.sampling.temperature == 0:
            assert list(completion.token_ids) == logits.argmax(-1).tolist()


def test_the_likeliest_tokens_come_with_each_where_they_are_asked_for() -> None:
    request = CompletionRequest(prompt_ids=[5, 6], sampling=Sampling(max_new_tokens=8), seed=3, num_top=4)
    completion = alone(request)
    assert len(completion.top) == len(completion.token_ids)
    for token, logprob, top in zip(completion.token_ids, completion.logprobs or [], completion.top, strict=True):
        values = [value for _, value in top]
        assert len(top) == 4 and values == sorted(values, reverse=True) and values[0] >= logprob
        assert dict(top).get(token, logprob) == pytest.approx(logprob)
    assert alone(CompletionRequest(prompt_ids=[5, 6], sampling=Sampling(max_new_tokens=8), seed=3)).top == ()


class Holding:
    """Holds the batch before a step until it is let go, so that what happens meanwhile is decided by the test."""

    def __init__(self, own: TransformersGenerator) -> None:
        self.steps = 0
        self.rows: list[int] = []  # that ran in each step
        self._go = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        step = own._completions.step

        def held(decoding: Decoding) -> None:
            self._stands.release()
            self._go.acquire()
            step(decoding)
            self.steps += 1
            self.rows.append(len(decoding._running))

        own._completions.step = held

    def let_go(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.let_stand()
            self._go.release()

    def let_stand(self) -> None:
        """Waits until the next step is about to be made."""
        assert self._stands.acquire(timeout=HANG_S)

    def let_all_go(self) -> None:
        self._go.release(10_000)


LONG = Sampling(temperature=0.0, max_new_tokens=40)


def never_ending(own: TransformersGenerator) -> None:
    """No token ends an answer of it."""
    own._tokenizer = TOKENIZER_WITHOUT_END


TOKENIZER_WITHOUT_END = CharTokenizer()
TOKENIZER_WITHOUT_END.eos_ids = frozenset()


def test_a_request_joins_in_the_middle_of_another_and_leaves_before_it() -> None:
    own = engine()
    never_ending(own)
    hold = Holding(own)
    first = own.complete(CompletionRequest(prompt_ids=[5], sampling=LONG, seed=0))
    hold.let_go(3)
    second = own.complete(
        CompletionRequest(prompt_ids=[6, 7], sampling=Sampling(temperature=0.0, max_new_tokens=4), seed=0)
    )
    hold.let_all_go()
    assert len(second.result().token_ids) == 4 and len(first.result().token_ids) == 40
    own.close()
    assert hold.rows.count(2) == 2
    assert hold.steps <= 41  # the second one took no step of its own


def test_a_cancelled_request_makes_room_and_the_others_go_on_as_they_were() -> None:
    expected = {}
    for prompt in ([5, 6], [7, 8, 9]):
        own = engine()
        never_ending(own)
        expected[tuple(prompt)] = own.complete(CompletionRequest(prompt_ids=prompt, sampling=LONG, seed=0)).result()
        own.close()
    own = engine(max_rows=2)
    never_ending(own)
    hold = Holding(own)
    gone = own.complete(CompletionRequest(prompt_ids=[10, 11, 12, 13], sampling=LONG, seed=0))
    calls = [own.complete(CompletionRequest(prompt_ids=list(ids), sampling=LONG, seed=0)) for ids in expected]
    hold.let_go(2)
    assert gone.cancel()
    hold.let_all_go()
    for call, one in zip(calls, expected.values(), strict=True):
        assert call.result().token_ids == one.token_ids
    with pytest.raises(CancelledError):
        gone.result()
    own.close()
    assert hold.steps < 60  # 40 and the few before: it did not run to its end


def test_what_does_not_fit_into_the_cache_waits_in_its_turn_and_a_single_row_always_fits() -> None:
    own = engine()
    never_ending(own)
    own._completions.max_entries = 100  # two of 1 + 40 fit
    hold = Holding(own)
    sizes = [40, 40, 4, 120]
    calls = [
        own.complete(CompletionRequest(prompt_ids=[5], sampling=Sampling(temperature=0.0, max_new_tokens=size), seed=0))
        for size in sizes
    ]
    gone = own.complete(CompletionRequest(prompt_ids=[5], sampling=LONG, seed=0))
    hold.let_stand()
    assert gone.cancel()  # while it waits
    hold.let_all_go()
    assert [len(call.result().token_ids) for call in calls] == sizes
    own.close()
    assert max(hold.rows) == 2
    first = next(at for at, rows in enumerate(hold.rows) if rows == 1)
    assert first >= 38  # the short one came behind those before it, though it would have fitted beside one


def test_several_answers_to_one_prompt_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    prefill = continuous_batching.prefill

    def counted(network: torch.nn.Module, prompts: Sequence[Sequence[int]]) -> Any:
        read.append(len(prompts))
        return prefill(network, prompts)

    monkeypatch.setattr(continuous_batching, "prefill", counted)
    own = engine(max_rows=2)
    hold = Holding(own)
    prompt, sampling = [5, 6, 7], Sampling(max_new_tokens=6)
    alike = [CompletionRequest(prompt_ids=prompt, sampling=sampling, seed=seed) for seed in range(4)]
    other = CompletionRequest(prompt_ids=list(prompt), sampling=sampling, seed=0)  # of somebody else
    calls = [own.complete(request) for request in (*alike, other)]
    hold.let_all_go()
    made = [list(call.result().token_ids) for call in calls]
    own.close()
    assert read == [1, 1] and made[4] == made[0]
    assert made == [list(alone(request).token_ids) for request in (*alike, other)]


def test_callers_hear_every_token_once_and_in_order() -> None:
    heard: list[int] = []
    values: list[float] = []

    def hear(token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[object]) -> bool:
        heard.extend(token_ids)
        values.extend(logprobs)
        return True

    own = engine()
    completion = own.complete(CompletionRequest(prompt_ids=[5], sampling=KINDS[1], seed=1), hear).result()
    own.close()
    assert heard == list(completion.token_ids) and values == list(completion.logprobs or [])


def test_a_caller_may_end_it_and_so_may_tokens_of_the_request() -> None:
    own = engine()
    never_ending(own)
    request = CompletionRequest(prompt_ids=[5], sampling=LONG, seed=0)
    whole = own.complete(request).result()
    heard: list[int] = []

    def until_five(token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[object]) -> bool:
        heard.extend(token_ids)
        return len(heard) < 5

    ended = own.complete(request, until_five).result()
    assert ended.token_ids == whole.token_ids[:5] and ended.finish is FinishReason.STOP
    end = whole.token_ids[7]
    by_token = own.complete(replace(request, end_ids=frozenset({end}))).result()
    assert by_token.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    assert by_token.finish is FinishReason.STOP
    own.close()


def test_a_caller_that_fails_ends_its_own_completion_and_no_other() -> None:
    own = engine()
    never_ending(own)
    request = CompletionRequest(prompt_ids=[5], sampling=LONG, seed=0)

    def broken(token_ids: Sequence[int], logprobs: Sequence[float], top: Sequence[object]) -> bool:
        raise IndexError("no such token")

    failed, other = own.complete(request, broken), own.complete(request)
    with pytest.raises(Unavailable, match="IndexError: no such token"):
        failed.result()
    assert len(other.result().token_ids) == 40
    assert own.complete(request).result().token_ids == other.result().token_ids
    own.close()


def test_a_batch_that_others_join_for_ever_keeps_nothing_of_those_that_left() -> None:
    own = engine()
    decodings: list[Decoding] = []
    begin = own._completions.begin
    own._completions.begin = lambda: decodings.append(begin()) or decodings[0]
    for request in requests():
        own.complete(request).result()
    gone = own.complete(CompletionRequest(prompt_ids=[5], sampling=LONG, seed=0))
    gone.cancel()
    own.complete(requests()[0]).result()
    own.close()
    (decoding,) = decodings
    assert not decoding._weights and not decoding._kept and not own._completions._calls


def test_new_weights_in_the_middle_are_named_where_they_begin() -> None:
    own = engine()
    never_ending(own)
    hold = Holding(own)
    call = own.complete(CompletionRequest(prompt_ids=[5], sampling=LONG, seed=0))
    hold.let_go(5)
    hold.let_stand()
    own.load(NEXT, snapshot(sharp_network(1)))
    hold.let_all_go()
    completion = call.result()
    own.close()
    assert [span.version for span in completion.spans] == [VERSION, NEXT]
    assert completion.spans[1].start == 6  # the first step makes two


def test_completions_and_a_call_of_generate_share_the_engine() -> None:
    own, expected = engine(), engine().generate([[5, 6, 7]], 4, KINDS[0])
    calls = [own.complete(request) for request in requests()]
    made = own.generate([[5, 6, 7]], 4, KINDS[0])
    assert [rollout.actions for rollout in made[0]] == [rollout.actions for rollout in expected[0]]
    assert [list(call.result().token_ids) for call in calls] == [list(alone(r).token_ids) for r in requests()]
    own.close()


def test_an_engine_that_fails_tells_its_callers_and_serves_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    own = engine()
    step = Decoding.step

    def broken(decoding: Decoding, version: PolicyVersion) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Decoding, "step", broken)
    with pytest.raises(Unavailable, match="RuntimeError: out of memory"):
        own.complete(requests()[0]).result()
    monkeypatch.setattr(Decoding, "step", step)
    assert own.complete(requests()[0]).result().finish in (FinishReason.STOP, FinishReason.LENGTH)
    own.close()


def test_what_waits_when_an_engine_is_closed_ends_with_a_sentence() -> None:
    own = engine(max_rows=1)
    hold = Holding(own)
    calls = [own.complete(request) for request in requests()]
    closing = threading.Thread(target=own.close)
    closing.start()
    hold.let_all_go()
    closing.join(HANG_S)
    ended = [call.exception(10) for call in calls]
    assert any(isinstance(error, Unavailable) for error in ended)
    with pytest.raises(Unavailable, match="closed"):
        own.complete(requests()[0]).result()


def test_a_token_outside_the_vocabulary_is_refused_before_it_joins() -> None:
    own = engine()
    with pytest.raises(ValueError, match="99999 is outside the vocabulary"):
        own.complete(CompletionRequest(prompt_ids=[99_999], sampling=KINDS[0], seed=0))
    own.close()
