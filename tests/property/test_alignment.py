"""Two tokenisations of one text: segments cover it, end where both end, and sums over them lose nothing."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.model.token_alignment import UNALIGNED, align, aligned_logprobs, token_ends
from swarm.testing.builders import ToyTokenizer, make_group
from swarm.types import FinishReason, Rollout, Sampling, TokenTrace

ALPHABET = "ab é\u4e2d\U0001f600"


class Greedy:
    """A byte-level tokenizer of a random vocabulary: longest match, so that tokens may end inside a character."""

    def __init__(self, vocabulary: set[bytes]) -> None:
        self.pieces = sorted(
            {*vocabulary, *(bytes([byte]) for byte in range(256))}, key=lambda piece: (-len(piece), piece)
        )

    def pieces_of(self, text: str) -> list[bytes]:
        data, found = text.encode(), list[bytes]()
        while data:
            piece = next(piece for piece in self.pieces if data.startswith(piece))
            found.append(piece)
            data = data[len(piece) :]
        return found

    def byte_lengths(self, text: str) -> list[int]:
        return [*map(len, self.pieces_of(text)), 0]


texts = st.text(ALPHABET, max_size=30)
vocabularies = st.sets(st.text(ALPHABET, min_size=1, max_size=4).map(str.encode), max_size=20)
tokenizers = vocabularies.map(Greedy)


@given(texts, tokenizers, tokenizers, st.booleans())
def test_segments_cover_the_text_and_end_where_both_sides_end(
    text: str, ours: Greedy, theirs: Greedy, is_ended: bool
) -> None:
    data = text.encode()
    sent = theirs.byte_lengths(text) if is_ended else theirs.byte_lengths(text)[:-1]
    if not sent:
        return  # nothing was sampled
    found = align(token_ends(ours.byte_lengths(text), True), token_ends(sent, is_ended), len(data))
    ends = found.ends.tolist()
    assert ends == sorted(set(ends))
    assert is_ended == (len(data) + 1 in ends)
    for lengths, segments in ((ours.byte_lengths(text), found.ours), (sent, found.theirs)):
        pieces = dict.fromkeys(range(len(ends)), 0)
        for length, segment in zip(lengths, segments.tolist(), strict=True):
            if segment == UNALIGNED:
                assert length == 0 and not is_ended
            else:
                pieces[segment] += length
        covered = np.cumsum([pieces[segment] for segment in range(len(ends))]).tolist()
        assert covered == [min(end, len(data)) for end in ends]
        aligned = segments[segments != UNALIGNED]
        assert (np.diff(aligned) >= 0).all() and set(aligned.tolist()) == set(range(len(ends)))


@given(texts, tokenizers, tokenizers)
def test_no_finer_segments_exist(text: str, ours: Greedy, theirs: Greedy) -> None:
    def inner(lengths: list[int]) -> set[int]:
        return set(np.cumsum(lengths).tolist())

    found = align(
        token_ends(ours.byte_lengths(text), True), token_ends(theirs.byte_lengths(text), True), len(text.encode())
    )
    common = (inner(ours.byte_lengths(text)) & inner(theirs.byte_lengths(text))) - {0}
    assert {end for end in found.ends.tolist() if end <= len(text.encode())} == common


@given(texts, tokenizers, tokenizers, st.integers(0, 2**32 - 1))
def test_sums_over_segments_are_the_sum_of_the_whole(text: str, ours: Greedy, theirs: Greedy, seed: int) -> None:
    lengths = theirs.byte_lengths(text)
    found = align(token_ends(ours.byte_lengths(text), True), token_ends(lengths, True), len(text.encode()))
    logprobs = -np.random.default_rng(seed).random(len(lengths)).astype(np.float32)
    sums = found.sums_of_theirs(logprobs)
    assert sums.sum() == pytest.approx(float(logprobs.sum(dtype=np.float64)))
    placed = found.at_our_first_tokens(sums)
    assert placed.sum(dtype=np.float64) == pytest.approx(sums.sum(), rel=1e-5)
    assert np.count_nonzero(placed) <= found.ends.size


@given(texts, tokenizers)
def test_equal_tokenizers_are_aligned_token_by_token(text: str, tokenizer: Greedy) -> None:
    lengths = tokenizer.byte_lengths(text)
    found = align(token_ends(lengths, True), token_ends(lengths, True), len(text.encode()))
    assert found.ours.tolist() == found.theirs.tolist() == list(range(len(lengths)))
    logprobs = -np.arange(1, len(lengths) + 1, dtype=np.float32)
    assert found.at_our_first_tokens(found.sums_of_theirs(logprobs)).tolist() == logprobs.tolist()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_tokens_of_another_text_are_never_aligned(ours: list[int], theirs: list[int]) -> None:
    if sum(theirs) - sum(ours) not in (0, 1):  # one more is an end token
        with pytest.raises(ValueError, match="do not cover"):
            align(token_ends(ours, False), token_ends(theirs, False), sum(ours))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 20), st.booleans())
def test_whatever_lengths_a_sender_makes_up_its_mass_is_only_moved(cuts: list[int], seed: int, is_ended: bool) -> None:
    text = "x" * sum(cuts)
    rng = random.Random(seed)
    logprobs = np.array([-rng.random() for _ in cuts], np.float32)
    rollout = sent(text, cuts, logprobs, FinishReason.STOP if is_ended else FinishReason.LENGTH)
    found = aligned_logprobs(rollout, ToyTokenizer())
    assert found is not None
    segments, placed = found
    assert segments.shape == placed.shape == (len(text) + 1,)
    if text or (is_ended and not cuts[-1]):  # else the response was cut off before it said anything
        assert placed.sum() == pytest.approx(float(logprobs.sum()), rel=1e-4, abs=1e-5)


def sent(text: str, byte_lengths: list[int], logprobs: np.ndarray, finish: FinishReason) -> Rollout:
    rollout = make_group().rollouts[0]
    assert rollout.trace is not None
    trace = TokenTrace(
        token_ids=np.zeros(len(byte_lengths), np.int32),
        action_mask=np.ones(len(byte_lengths), bool),
        logprobs=logprobs,
        turn_ids=np.zeros(len(byte_lengths), np.int16),
        spans=rollout.trace.spans,
        byte_lengths=np.array(byte_lengths, np.int32),
    )
    return Rollout(actions=(text,), trace=trace, sampling=Sampling(), finish=finish, claimed_reward=0.0)
