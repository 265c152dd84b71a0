"""Episodes in the engine: parked rows give what a whole prefill gives, whoever runs beside them.

Observations come from a rule over the newest action, answered at once, later, or out of order.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count

import numpy as np
import pytest
import torch
from engines import sharp_network

from swarm.generation import continuous_batching
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.generation.turn_by_turn import play_episodes
from swarm.interfaces import Observation
from swarm.model.conversations import conversation_ids
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import snapshot
from swarm.types import FinishReason, PolicyVersion, Rollout, Sampling, TokenTrace
from tests.worlds.mixed_cache import scored_with_one_cache

START = PolicyVersion(policy_id="a", step=0)
NEXT = PolicyVersion(policy_id="a", step=1)
TOKENIZER = CharTokenizer()
PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13], [20]]
SAMPLING = Sampling(temperature=1.3, max_new_tokens=6)
NUM_TURNS = 4
ONE, SUMMED_UP, TWO_ROLES = (0, 0, 0, 0), (0, 1, 2, 3), (0, 1, 0, 1)  # conversation of each turn


class Rule:
    """Answers an action with a few tokens that follow from it, for as many turns as follow from its rollout."""

    def __init__(
        self,
        answer: Callable[[Callable[[], None]], None] = lambda act: act(),
        conversations: Sequence[int] = ONE,
    ) -> None:
        self.answer = answer  # runs what fills a future, now or later
        self.conversations = conversations  # of each action
        self.num_turns: dict[int, int] = {}
        self.asked: list[tuple[int, tuple[int, ...], bool]] = []

    def observe(self, rollout: int, action_ids: Sequence[int], is_ended: bool) -> "Future[Observation | None]":
        turn = self.num_turns[rollout] = self.num_turns.get(rollout, 0) + 1
        self.asked.append((rollout, tuple(action_ids), is_ended))
        future: Future[Observation | None] = Future()
        is_over = turn > rollout % NUM_TURNS
        told = [2 + (sum(action_ids) + k) % 40 for k in range(1 + sum(action_ids) % 5)]
        self.answer(
            lambda: future.set_result(None if is_over else Observation(told, self.conversations[turn % NUM_TURNS]))
        )
        return future


def engine(max_rows: int = 64, network: torch.nn.Module | None = None) -> TransformersGenerator:
    return TransformersGenerator(network or sharp_network(), TOKENIZER, START, 3, max_rows=max_rows)


def play(rule: Rule, *, max_rows: int = 64, num_samples: int = 3, made_by: TransformersGenerator | None = None):
    generator = made_by or engine(max_rows)
    groups = generator.generate(PROMPTS, num_samples, SAMPLING, list(range(len(PROMPTS))), rule.observe)
    return [rollout for group in groups for rollout in group]


def trace_of(rollout: Rollout) -> TokenTrace:
    assert rollout.trace is not None and rollout.trace.logprobs is not None
    return rollout.trace


def assert_same(ours: Sequence[Rollout], theirs: Sequence[Rollout]) -> None:
    for one, two in zip(ours, theirs, strict=True):
        assert trace_of(one).token_ids.tolist() == trace_of(two).token_ids.tolist()
        assert (one.actions, one.finish) == (two.actions, two.finish)
        np.testing.assert_array_equal(trace_of(one).action_mask, trace_of(two).action_mask)
        np.testing.assert_array_equal(trace_of(one).turn_ids, trace_of(two).turn_ids)
        ours_logprobs, their_logprobs = trace_of(one).logprobs, trace_of(two).logprobs
        assert ours_logprobs is not None and their_logprobs is not None
        np.testing.assert_allclose(ours_logprobs, their_logprobs, atol=1e-4)


def test_an_episode_is_actions_and_what_was_observed_between_them() -> None:
    rule = Rule()
    rollouts = play(rule)
    for index, rollout in enumerate(rollouts):
        trace = trace_of(rollout)
        assert len(rollout.actions) == 1 + index % NUM_TURNS and rollout.finish is not FinishReason.ABORTED
        asked = [action for number, action, _ in rule.asked if number == index]
        bounds = np.flatnonzero(np.diff(np.concatenate([[False], trace.action_mask, [False]]))).reshape(-1, 2)
        assert [tuple(trace.token_ids[a:b].tolist()) for a, b in bounds] == asked
        for turn, ((start, end), action) in enumerate(zip(bounds, asked, strict=True)):
            assert (trace.turn_ids[start:end] == turn).all() and rollout.actions[turn] == TOKENIZER.decode(action)
            is_ended = action[-1] in TOKENIZER.eos_ids
            assert 1 <= len(action) <= 6 and (is_ended or len(action) == 6)
            assert (index, action, is_ended) in rule.asked
            if turn < len(asked) - 1:
                told = trace.token_ids[end : bounds[turn + 1][0]].tolist()
                assert told == [2 + (sum(action) + k) % 40 for k in range(1 + sum(action) % 5)]
                assert (trace.turn_ids[end : bounds[turn + 1][0]] == turn).all()
        assert trace.logprobs is not None and np.isnan(trace.logprobs[~trace.action_mask]).all()


@pytest.mark.parametrize("of_turns", [ONE, SUMMED_UP, TWO_ROLES])
def test_logprobs_of_actions_are_those_of_their_whole_conversation(of_turns: Sequence[int]) -> None:
    network = sharp_network()
    scorer = TransformersGenerator(network, TOKENIZER, START, 0)
    temperature_1 = Sampling(temperature=1.0, max_new_tokens=6)
    observe = Rule(conversations=of_turns).observe
    groups = engine(network=network).generate(PROMPTS, 4, temperature_1, [0, 1, 2], observe)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for rollout in group:
            trace = trace_of(rollout)
            in_conversation = conversation_ids(of_turns, trace.turn_ids, trace.action_mask)
            for conversation in set(in_conversation.tolist()):
                own = in_conversation == conversation
                opening = () if conversation else prompt
                scores = scorer.score([[*opening, *trace.token_ids[own].tolist()]])[0][len(opening) :]
                assert trace.logprobs is not None
                ours, mask = trace.logprobs[own], trace.action_mask[own]
                np.testing.assert_allclose(ours[mask], scores[mask], atol=1e-4)


@pytest.mark.parametrize("is_deterministic", [True, False], ids=["deterministic", "whoever_has_answered_goes_on"])
def test_late_answers_change_no_bit_where_that_is_asked_for(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens alone decide which rows run together; a matrix of another height has other low bits."""
    waiting = deque[tuple[int, Callable[[], None]]]()  # looks at which an answer comes
    num_looks, num_asked = count(), count()
    is_stalled = continuous_batching.Decoding.is_stalled.fget
    assert is_stalled is not None

    def look(decoding: continuous_batching.Decoding) -> bool:
        now = next(num_looks)
        while waiting and (waiting[0][0] <= now or is_stalled(decoding)):
            waiting.popleft()[1]()
        return is_stalled(decoding)

    def bits(answer: Callable[[Callable[[], None]], None]) -> list[bytes]:
        generator = TransformersGenerator(sharp_network(), TOKENIZER, START, 3, is_deterministic=is_deterministic)
        logprobs = [trace_of(rollout).logprobs for rollout in play(Rule(answer), num_samples=8, made_by=generator)]
        return [each.tobytes() for each in logprobs if each is not None]

    at_once = bits(lambda act: act())
    monkeypatch.setattr(continuous_batching.Decoding, "is_stalled", property(look))
    late = bits(lambda act: waiting.append((2 * next(num_asked), act)))
    assert (at_once == late) is is_deterministic


@pytest.mark.parametrize("of_turns", [ONE, TWO_ROLES])
@pytest.mark.parametrize("max_rows", [2, 5])
def test_neither_places_nor_late_answers_change_an_episode(max_rows: int, of_turns: Sequence[int]) -> None:
    expected = play(Rule(conversations=of_turns))
    later: list[Callable[[], None]] = []
    lock = threading.Lock()

    def hold(act: Callable[[], None]) -> None:
        with lock:
            later.append(act)
            due = later[::-1] if len(later) >= 4 else []
            if due:
                later.clear()
        for each in due:
            each()

    stop = threading.Event()

    def release() -> None:
        while not stop.wait(0.01):
            with lock:
                due, later[:] = later[:], []
            for each in due:
                each()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        assert_same(play(Rule(hold, of_turns), max_rows=max_rows), expected)
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("of_turns", [ONE, TWO_ROLES])
def test_an_episode_whose_cache_was_dropped_goes_on_the_same(
    monkeypatch: pytest.MonkeyPatch, of_turns: Sequence[int]
) -> None:
    expected = play(Rule(conversations=of_turns))
    widths: list[int] = []
    network = sharp_network()

    def note(_module: object, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    network.register_forward_pre_hook(note, with_kwargs=True)
    play(Rule(conversations=of_turns), made_by=engine(network=network))
    kept = sum(widths)
    widths.clear()
    monkeypatch.setattr(
        continuous_batching.Decoding.__init__,
        "__kwdefaults__",
        {
            "observe": None,
            "max_parked_bytes": 0,
        },
    )
    assert_same(play(Rule(conversations=of_turns), made_by=engine(network=network)), expected)
    assert sum(widths) > kept, "it was computed again"


def test_new_weights_between_two_turns_make_the_whole_next_turn() -> None:
    network, newer = sharp_network(), snapshot(sharp_network(1))
    generator = engine(network=network)
    loaded = threading.Event()

    def load_first(act: Callable[[], None]) -> None:
        if not loaded.is_set():
            loaded.set()
            thread = threading.Thread(target=lambda: generator.load(NEXT, newer, in_flight=True))
            thread.start()
            threading.Thread(target=lambda: (thread.join(), act())).start()
        else:
            act()

    at_1 = Sampling(temperature=1.0, max_new_tokens=6)
    (rollout,) = generator.generate([PROMPTS[1]], 1, at_1, [0], _second_of(Rule(load_first)))[0]
    trace = trace_of(rollout)
    spans = {span.version.step: span.start for span in trace.spans}
    second = int(np.flatnonzero(trace.turn_ids == 1)[0])
    assert spans == {0: 0, 1: second}
    scores = TransformersGenerator(sharp_network(1), TOKENIZER, NEXT, 0).score(
        [[*PROMPTS[1], *trace.token_ids.tolist()]]
    )[0]
    assert trace.logprobs is not None
    # Nothing of the old weights is left in the cache: it was computed again.
    np.testing.assert_allclose(trace.logprobs[second:], scores[len(PROMPTS[1]) :][second:], atol=1e-4)


def test_new_weights_inside_a_turn_mix_only_until_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the turn's end tokens follow from a cache that both made; from the next turn on from the new ones alone."""
    network, newer = sharp_network(), sharp_network(1)
    generator = engine(network=network)
    steps = iter(range(100))

    def load_before_the_third_step(decoding: continuous_batching.Decoding) -> bool:
        if next(steps) == 2:
            generator.load(NEXT, snapshot(newer), in_flight=True)
        return goes_on(decoding)

    goes_on = generator._goes_on
    monkeypatch.setattr(generator, "_goes_on", load_before_the_third_step)
    at_1 = Sampling(temperature=1.0, max_new_tokens=6)
    rule = Rule()
    (rollout,) = generator.generate(
        [PROMPTS[1]], 1, at_1, [1], lambda _, ids, is_ended: rule.observe(2, ids, is_ended)
    )[0]
    trace = trace_of(rollout)
    changed, second = trace.spans[1].start, int(np.flatnonzero(trace.turn_ids == 1)[0])
    first_end = int(np.flatnonzero(~trace.action_mask)[0])
    assert 0 < changed < first_end and len(rollout.actions) == 3
    ids, start = [*PROMPTS[1], *trace.token_ids.tolist()], len(PROMPTS[1])
    mixed = scored_with_one_cache([sharp_network(), newer], ids, [start + changed - 1])[start:]
    whole = TransformersGenerator(newer, TOKENIZER, NEXT, 0).score([ids])[0][start:]
    ours = trace.logprobs
    assert ours is not None
    np.testing.assert_allclose(ours[:first_end], mixed[:first_end], atol=1e-4)
    later = trace.action_mask & (np.arange(ours.size) >= second)
    np.testing.assert_allclose(ours[later], whole[later], atol=1e-4)
    distance = np.abs(mixed[changed:first_end] - whole[changed:first_end])
    print(f"between the change and the end of its turn: up to {distance.max():.3f} nats from full scoring")
    assert distance.max() > 1e-2, "else nothing was mixed"


def _second_of(rule: Rule) -> Callable[[int, Sequence[int], bool], "Future[Observation | None]"]:
    """The rule as rollout 1 sees it, which has two turns."""
    return lambda rollout, ids, is_ended: rule.observe(rollout + 1, ids, is_ended)


def test_a_cancelled_call_does_not_wait_for_environments() -> None:
    generator = engine()
    never = Rule(lambda act: generator.cancel())
    rollouts = play(never, made_by=generator)
    assert {rollout.finish for rollout in rollouts} == {FinishReason.ABORTED}


def test_turn_by_turn_engines_make_the_same_kind_of_episode() -> None:
    rule, generator, asked = Rule(conversations=TWO_ROLES), engine(), list[Sequence[int]]()

    def make(prompts: Sequence[Sequence[int]], num_samples: int, numbers: Sequence[int] | None) -> list[Rollout]:
        asked.extend(prompts)
        return [rollout for group in generator.generate(prompts, num_samples, SAMPLING, numbers) for rollout in group]

    for index, rollout in enumerate(play_episodes(make, PROMPTS, 4, [0, 1, 2], rule.observe)):
        trace = trace_of(rollout)
        assert len(rollout.actions) == 1 + index % NUM_TURNS == trace.turn_ids[-1] + 1
        assert trace.logprobs is not None and (np.isnan(trace.logprobs) == ~trace.action_mask).all()
        assert trace.token_ids.size == trace.action_mask.size and [span.start for span in trace.spans] == [0]
        in_conversation = conversation_ids(TWO_ROLES, trace.turn_ids, trace.action_mask)
        for turn, conversation in enumerate(TWO_ROLES[: len(rollout.actions)]):
            start = int(np.flatnonzero((trace.turn_ids == turn) & trace.action_mask)[0])
            before = trace.token_ids[:start][in_conversation[:start] == conversation].tolist()
            assert [*(() if conversation else PROMPTS[index // 4]), *before] in asked


def test_greedy_episodes_are_the_actions_of_the_environment() -> None:
    rule = Rule()
    actions = engine().greedy(PROMPTS, 6, rule.observe)
    assert [len(each) for each in actions] == [1, 2, 3]
    assert [each[0] for each in actions] == [each[0] for each in engine().greedy(PROMPTS, 6)]
