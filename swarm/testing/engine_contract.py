"""The contract of `swarm.interfaces.Generator`, as checks that every engine must pass.

Invariant: a check looks at what a caller sees, never at how an engine works.
Example: `@pytest.mark.parametrize("check", CONTRACT)` over a test that calls `check(bench)`.
"""

import threading
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from swarm.errors import ConfigError, WeightsRefused
from swarm.interfaces import Generator as Engine
from swarm.interfaces import Observation
from swarm.types import Canary, FinishReason, FloatArray, PolicyVersion, Rollout, Sampling, TokenTrace

_LONG: Final = 64  # tokens: long enough for an event during the call
_EACH: Final = 4  # samples


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    """An engine under test, with the inputs and tolerances of the checks."""

    make: Callable[[], Engine]  # a fresh one that holds `start`
    start: PolicyVersion
    prompts: Sequence[Sequence[int]]  # at least three, of different lengths, that do not end at once
    eos_ids: Collection[int]
    newer: object  # published tensors of clearly other weights
    canaries: Sequence[Canary]  # of `newer`, computed by another engine
    misfit: object  # tensors of another model
    on_token: Callable[[Engine, Callable[[], None]], AbstractContextManager[object]]  # at each token
    max_rows: int = 8  # of the engine
    tolerance_nats: float = 1e-4  # most that a log-prob differs with the company of its row, or from the publisher's
    is_reproducible: bool = True  # the same number gives the same samples, token by token
    takes_in_flight: bool = True  # False: a call of generate ends before weights are replaced

    @property
    def next(self) -> PolicyVersion:
        """Version of the weights `newer`: one step after `start`."""
        return replace(self.start, step=self.start.step + 1, digest=b"")


Check = Callable[[EngineBench], None]


def check_every_token_names_its_version(bench: EngineBench) -> None:
    """Checks that each trace has one span, from token 0, that names the loaded version, also after a load."""
    engine = bench.make()
    assert engine.version == bench.start
    before = _flat(engine.generate(bench.prompts, _EACH, _sampling()))
    assert {(span.start, span.version) for rollout in before for span in _trace(rollout).spans} == {(0, bench.start)}
    engine.load(bench.next, bench.newer)
    assert engine.version == bench.next
    after = _flat(engine.generate(bench.prompts, _EACH, _sampling()))
    assert {(span.start, span.version) for rollout in after for span in _trace(rollout).spans} == {(0, bench.next)}


def check_the_end_token_is_kept(bench: EngineBench) -> None:
    """Checks that a stopped rollout has one end token, its last, and any other has none and full length."""
    rollouts = _flat(bench.make().generate(bench.prompts, 16, _sampling(temperature=1.5, tokens=24)))
    for rollout in rollouts:
        ids = _trace(rollout).token_ids.tolist()
        ends = [place for place, token in enumerate(ids) if token in bench.eos_ids]
        length = len(ids) if rollout.finish is FinishReason.STOP else 24
        assert ends == ([length - 1] if rollout.finish is FinishReason.STOP else []) and len(ids) == length
        assert rollout.finish in (FinishReason.STOP, FinishReason.LENGTH)
        assert _trace(rollout).action_mask.all() and np.isnan(rollout.claimed_reward)
    assert any(rollout.finish is FinishReason.STOP for rollout in rollouts), "no prompt of the bench ever stops"


def check_logprobs_are_those_of_score(bench: EngineBench) -> None:
    """Checks that log-probs of tokens sampled at temperature 1 equal those of `score`, also after a load."""
    engine = bench.make()
    _scored_alike(bench, engine, engine.generate(bench.prompts, _EACH, _sampling()))
    engine.load(bench.next, bench.newer)
    _scored_alike(bench, engine, engine.generate(bench.prompts, _EACH, _sampling()))


def check_score_is_the_same_alone_and_in_a_batch(bench: EngineBench) -> None:
    """Checks that `score` gives NaN for the first token, and log-probs that do not depend on the batch."""
    engine = bench.make()
    sequences = [list(prompt) for prompt in bench.prompts] + [[bench.prompts[0][0]]]
    together = engine.score(sequences)
    for sequence, scores in zip(sequences, together, strict=True):
        assert scores.shape == (len(sequence),) and np.isnan(scores[0]) and (scores[1:] <= 0).all()
        _close(bench, engine.score([sequence])[0][1:], scores[1:])
    assert engine.score([]) == []


def check_a_rollout_is_the_same_alone_and_in_a_batch(bench: EngineBench) -> None:
    """Checks that a reproducible engine with numbers makes each group independently of the other prompts."""
    numbers = range(len(bench.prompts))
    together = bench.make().generate(bench.prompts, _EACH, _sampling(), numbers)
    assert [len(group) for group in together] == [_EACH] * len(bench.prompts)
    if bench.is_reproducible:
        for number, prompt in enumerate(bench.prompts):
            _same(bench, bench.make().generate([prompt], _EACH, _sampling(), [number])[0], together[number])


def check_numbers_make_samples_again(bench: EngineBench) -> None:
    """Checks that samples vary with the number and without one; a reproducible engine repeats those of a number."""
    engine, prompt = bench.make(), bench.prompts[:1]
    first = engine.generate(prompt, _EACH, _sampling(), [7])[0]
    other = engine.generate(prompt, _EACH, _sampling(), [8])[0]
    assert [_ids(rollout) for rollout in first] != [_ids(rollout) for rollout in other]
    if bench.is_reproducible:
        _same(bench, engine.generate(prompt, _EACH, _sampling(), [7])[0], first)
    again = [[_ids(rollout) for rollout in engine.generate(prompt, _EACH, _sampling())[0]] for _ in range(2)]
    assert again[0] != again[1]


def check_a_group_may_be_larger_than_the_batch(bench: EngineBench) -> None:
    """Checks that a call may ask for more samples than the engine has rows: all are returned, and they differ."""
    count, engine = 2 * bench.max_rows + 1, bench.make()
    groups = engine.generate(bench.prompts[:2], count, _sampling())
    assert [len(group) for group in groups] == [count, count]
    assert all(rollout.finish is not FinishReason.ABORTED for rollout in _flat(groups))
    assert len({tuple(_ids(rollout)) for rollout in groups[0]}) > 1
    _scored_alike(bench, engine, groups)


def check_an_episode_keeps_every_token(bench: EngineBench) -> None:
    """Checks that observations stand untrained after their actions, and that log-probs condition on both."""
    engine, asked = bench.make(), dict[int, list[list[int]]]()
    observations = [list(prompt) for prompt in bench.prompts[1:3]]

    def observe(place: int, action_ids: Sequence[int], is_ended: bool) -> "Future[Observation | None]":
        actions = asked.setdefault(place, [])
        actions.append([int(token) for token in action_ids])
        assert is_ended == (actions[-1][-1] in bench.eos_ids)
        answer = Future[Observation | None]()
        answer.set_result(Observation(observations[len(actions) - 1]) if len(actions) <= len(observations) else None)
        return answer

    rollouts = engine.generate(bench.prompts[:1], _EACH, _sampling(tokens=5), observe=observe)[0]
    assert sorted(asked) == [*range(_EACH)]
    for place, rollout in enumerate(rollouts):
        trace, actions = _trace(rollout), asked[place]
        first, second = observations
        row = [*actions[0], *first, *actions[1], *second, *actions[2]]
        turns = [0] * len(actions[0] + first) + [1] * len(actions[1] + second) + [2] * len(actions[2])
        assert trace.token_ids.tolist() == row and trace.turn_ids.tolist() == turns
        assert trace.token_ids[trace.action_mask].tolist() == [token for action in actions for token in action]
        assert len(rollout.actions) == 3 and np.isnan(_logprobs(trace)[~trace.action_mask]).all()
        score = engine.score([[*bench.prompts[0], *row]])[0][len(bench.prompts[0]) :]
        _close(bench, _logprobs(trace)[trace.action_mask], score[trace.action_mask])


def check_greedy_answers_do_not_vary(bench: EngineBench) -> None:
    """Checks that `greedy` returns one text per prompt, the same each time and, if reproducible, in any batch."""
    engine = bench.make()
    answers = engine.greedy(bench.prompts, 8)
    assert len(answers) == len(bench.prompts) and engine.greedy(bench.prompts, 8) == answers
    assert not bench.is_reproducible or engine.greedy(bench.prompts[:1], 8) == answers[:1]


def check_weights_are_taken_as_a_whole_or_not_at_all(bench: EngineBench) -> None:
    """Checks that misfit tensors or wrong canaries change nothing, and that right ones change the version."""
    engine = bench.make()
    sequences = [list(prompt) for prompt in bench.prompts]
    before = engine.score(sequences), engine.greedy(bench.prompts, 8)
    strange = [Canary(token_ids=np.array([1, 2**30], np.int32), logprobs=np.array([np.nan, -1.0], np.float32))]
    empty = [replace(canary, logprobs=np.full_like(canary.logprobs, np.nan)) for canary in bench.canaries]
    bad = [(bench.misfit, []), (None, []), *((bench.newer, canaries) for canaries in (_wrong(bench), strange, empty))]
    for weights, canaries in bad:
        try:
            engine.load(bench.next, weights, canaries=canaries)
        except (ConfigError, WeightsRefused):
            assert engine.version == bench.start
            for old, now in zip(before[0], engine.score(sequences), strict=True):
                _close(bench, now[1:], old[1:])
            assert engine.greedy(bench.prompts, 8) == before[1]
            continue
        raise AssertionError("weights that are wrong were taken")
    report = engine.load(bench.next, bench.newer, canaries=bench.canaries)
    assert 0 <= report.mismatch_nats <= bench.tolerance_nats and report.pause_s >= 0
    assert engine.version == bench.next
    for canary in bench.canaries:
        _close(bench, engine.score([canary.token_ids.tolist()])[0][1:], canary.logprobs[1:])
    changed = [np.abs(now - old)[1:] for old, now in zip(before[0], engine.score(sequences), strict=True)]
    assert np.concatenate(changed).max() > 4 * bench.tolerance_nats, "the bench's newer weights are hardly other ones"


def check_spans_tell_where_new_weights_began(bench: EngineBench) -> None:
    """Checks that after a load in flight the spans show which tokens are from the old and the new weights."""
    engine, old = bench.make(), bench.make()
    with _meanwhile(bench, engine, lambda: engine.load(bench.next, bench.newer, in_flight=True)):
        groups = engine.generate(bench.prompts, 2 * bench.max_rows, _sampling(tokens=_LONG))
    assert engine.version == bench.next
    seen: set[tuple[PolicyVersion, ...]] = set()
    for prompt, group in zip(bench.prompts, groups, strict=True):
        for rollout in group:
            trace = _trace(rollout)
            seen.add(tuple(span.version for span in trace.spans))
            num_old = next((span.start for span in trace.spans if span.version == bench.next), len(trace.token_ids))
            sequence = [*prompt, *_ids(rollout)]
            _close(bench, _logprobs(trace)[:num_old], old.score([sequence])[0][len(prompt) :][:num_old])
            if num_old == 0:
                _close(bench, _logprobs(trace), engine.score([sequence])[0][len(prompt) :])
    known = {(bench.start,), (bench.next,), (bench.start, bench.next)}
    assert seen <= known
    assert not bench.takes_in_flight or (bench.start, bench.next) in seen
    after = engine.generate(bench.prompts, _EACH, _sampling())
    assert {span.version for rollout in _flat(after) for span in _trace(rollout).spans} == {bench.next}
    _scored_alike(bench, engine, after)


def check_a_refusal_in_flight_disturbs_nothing(bench: EngineBench) -> None:
    """Checks that weights refused in flight leave version and tokens as if no load had been tried."""
    engine = bench.make()
    refused: list[Exception] = []

    def load() -> None:
        try:
            engine.load(bench.next, bench.newer, canaries=_wrong(bench), in_flight=True)
        except WeightsRefused as error:
            refused.append(error)

    numbers = range(len(bench.prompts))
    with _meanwhile(bench, engine, load):
        groups = engine.generate(bench.prompts, bench.max_rows, _sampling(tokens=_LONG), numbers)
    assert len(refused) == 1 and engine.version == bench.start
    assert {span.version for rollout in _flat(groups) for span in _trace(rollout).spans} == {bench.start}
    _scored_alike(bench, engine, groups)
    if bench.is_reproducible:
        undisturbed = bench.make().generate(bench.prompts, bench.max_rows, _sampling(tokens=_LONG), numbers)
        for group, same in zip(groups, undisturbed, strict=True):
            _same(bench, group, same)


def check_cancel_ends_a_call(bench: EngineBench) -> None:
    """Checks that cut rollouts are ABORTED with correct log-probs, and that the next call is complete."""
    engine = bench.make()
    with _meanwhile(bench, engine, engine.cancel):
        groups = engine.generate(bench.prompts, 2 * bench.max_rows, _sampling(tokens=_LONG))
    assert [len(group) for group in groups] == [2 * bench.max_rows] * len(bench.prompts)
    assert any(rollout.finish is FinishReason.ABORTED for rollout in _flat(groups))
    for rollout in _flat(groups):
        ids = _ids(rollout)
        assert (rollout.finish is FinishReason.STOP) == (bool(ids) and ids[-1] in bench.eos_ids)
        assert (rollout.finish is FinishReason.LENGTH) <= (len(ids) == _LONG)
    _scored_alike(bench, engine, groups)
    after = engine.generate(bench.prompts, 1, _sampling())
    assert all(rollout.finish is not FinishReason.ABORTED for rollout in _flat(after))


CONTRACT: Final[tuple[Check, ...]] = (
    check_every_token_names_its_version,
    check_the_end_token_is_kept,
    check_logprobs_are_those_of_score,
    check_score_is_the_same_alone_and_in_a_batch,
    check_a_rollout_is_the_same_alone_and_in_a_batch,
    check_numbers_make_samples_again,
    check_a_group_may_be_larger_than_the_batch,
    check_an_episode_keeps_every_token,
    check_greedy_answers_do_not_vary,
    check_weights_are_taken_as_a_whole_or_not_at_all,
    check_spans_tell_where_new_weights_began,
    check_a_refusal_in_flight_disturbs_nothing,
    check_cancel_ends_a_call,
)


@contextmanager
def _meanwhile(bench: EngineBench, engine: Engine, act: Callable[[], object]) -> Generator[None]:
    """Runs `act` in another thread after the third token of the block; raises the error of `act` at the end."""
    errors: list[BaseException] = []

    def acting() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread, num_tokens = threading.Thread(target=acting), 0

    def noticed() -> None:
        nonlocal num_tokens
        num_tokens += 1
        if num_tokens == 3:
            thread.start()

    with bench.on_token(engine, noticed):
        yield
    thread.join()
    if errors:
        raise errors[0]


def _scored_alike(bench: EngineBench, engine: Engine, groups: Sequence[Sequence[Rollout]]) -> None:
    for prompt, group in zip(bench.prompts, groups, strict=False):
        scores = engine.score([[*prompt, *_ids(rollout)] for rollout in group])
        for rollout, score in zip(group, scores, strict=True):
            _close(bench, _logprobs(_trace(rollout)), score[len(prompt) :])


def _same(bench: EngineBench, ours: Sequence[Rollout], theirs: Sequence[Rollout]) -> None:
    assert [_ids(rollout) for rollout in ours] == [_ids(rollout) for rollout in theirs]
    for one, two in zip(ours, theirs, strict=True):
        assert one.finish is two.finish
        _close(bench, _logprobs(_trace(one)), _logprobs(_trace(two)))


def _close(bench: EngineBench, ours: FloatArray, theirs: FloatArray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=bench.tolerance_nats)


def _wrong(bench: EngineBench) -> list[Canary]:
    return [replace(canary, logprobs=canary.logprobs - np.float32(3.0)) for canary in bench.canaries]


def _sampling(temperature: float = 1.0, tokens: int = 12) -> Sampling:
    return Sampling(temperature=temperature, max_new_tokens=tokens)


def _flat(groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


def _trace(rollout: Rollout) -> TokenTrace:
    assert rollout.trace is not None
    return rollout.trace


def _logprobs(trace: TokenTrace) -> FloatArray:
    assert trace.logprobs is not None
    return trace.logprobs


def _ids(rollout: Rollout) -> list[int]:
    return _trace(rollout).token_ids.tolist()
