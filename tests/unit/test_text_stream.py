"""Text of a completion while it is made: whole characters, and nothing of or behind a stop string."""

import random

import pytest

from swarm.config import ModelConfig
from swarm.interfaces import Tokenizer
from swarm.model.tokenizer import CharTokenizer, load_tokenizer, text_ids
from swarm.serving.text_stream import TextStream

CHARS = CharTokenizer()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(ModelConfig(source="smollm2"))


def pieces(tokenizer: Tokenizer, token_ids: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop)
    said = [stream.feed([token]) for token in token_ids]
    return [*said, stream.end()], stream


@pytest.mark.parametrize(
    "text",
    [
        "plain words, as ever.",
        "na\u00efve fa\u00e7ade \u2013 \u2713",
        "\u65e5\u672c\u8a9e",
        "\U0001f469\u200d\U0001f467 and \U0001f1e9\U0001f1ea",
        "  two  spaces\n\n\ttab",
    ],
)
def test_the_pieces_are_the_text_and_none_ends_inside_a_character(smollm2: Tokenizer, text: str) -> None:
    said, stream = pieces(smollm2, smollm2.encode_response(text))
    assert "".join(said) == text == stream.text
    assert not any("\ufffd" in piece for piece in said)


def test_random_tokens_give_the_text_that_decoding_all_of_them_gives(smollm2: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(smollm2.vocab_size) for _ in range(rng.randrange(1, 30))]
        said, _ = pieces(smollm2, ids)
        assert "".join(said).rstrip("\ufffd") == smollm2.decode(ids).rstrip("\ufffd")


def test_a_stop_string_ends_the_text_before_it_wherever_tokens_are_cut() -> None:
    for size in (1, 2, 3, 100):
        stream = TextStream(CHARS, ["dog", "end"])
        ids = text_ids(CHARS, "a do and a door to the dogs")
        said = "".join(stream.feed(ids[at : at + size]) for at in range(0, len(ids), size)) + stream.end()
        assert said == "a do and a door to the " == stream.text
        assert stream.stopped_by == "dog" and stream.num_tokens == len("a do and a door to the dog")


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_none() -> None:
    said, stream = pieces(CHARS, text_ids(CHARS, "a do it"), ("dog",))
    assert said[2] == "" and said[3] == "" and said[4] == "do "
    assert "".join(said) == "a do it" and not stream.is_stopped


def test_a_text_that_ends_in_the_beginning_of_a_stop_string_is_shown_whole() -> None:
    said, stream = pieces(CHARS, text_ids(CHARS, "a do"), ("dog",))
    assert "".join(said) == "a do" and not stream.is_stopped


def test_the_first_of_two_stop_strings_counts() -> None:
    _, stream = pieces(CHARS, text_ids(CHARS, "abcdef"), ("de", "bc"))
    assert stream.text == "a" and stream.stopped_by == "bc"


def test_bytes_that_become_no_character_do_not_hold_back_the_text_for_ever(smollm2: Tokenizer) -> None:
    lone = smollm2.encode_response("\u00e9")[0]  # of two bytes the first, again and again
    said, _ = pieces(smollm2, [lone] * 40 + smollm2.encode_response("then words"))
    assert any(said[:40]) and "".join(said).endswith("then words")
