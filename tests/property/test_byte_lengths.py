"""Bytes of tokens, of trained byte-level and word-piece-like tokenizers: the boundaries that are claimed are real."""

import json
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import mkdtemp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.model.token_alignment import cut_to_limit
from swarm.model.tokenizer import CharTokenizer, HfTokenizer
from swarm.types import FinishReason, Rollout, Sampling

CORPUS = [
    "the cat sat on the mat\n  and then  left",
    "caf\u00e9 \u4e2d\u6587 \U0001f600\U0001f601 12 123 1234",
    "x = f(a, b)\n\n\treturn x",
] * 4
texts = st.text(st.sampled_from("the catmn\n\t 12é中文\U0001f600=()\u0301"), max_size=24)


@cache
def trained(kind: str, size: int) -> HfTokenizer:
    """A tokenizer of `size` merges over the corpus, in a folder of its own."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    folder = Path(mkdtemp())
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)  # as GPT-2 and SmolLM2 have it
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = []
    unknown = [] if alphabet else ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    marks = ["<|im_start|>", "<|im_end|>", *unknown]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("x")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text("{}")
    return HfTokenizer(folder)


@pytest.mark.parametrize("size", [270, 420])
@given(texts)
def test_every_boundary_is_one_of_the_bytes_that_tokens_decode_to(size: int, text: str) -> None:
    tokenizer = trained("byte-level", size)
    ids, lengths = tokenizer.encode_response(text), tokenizer.byte_lengths(text)
    data = text.encode()
    assert len(lengths) == len(ids) and sum(lengths) == len(data) and lengths[-1] == 0 and min(lengths) >= 0
    ends = [0, *accumulate(lengths)]
    for place in range(len(ids)):
        if ends[place + 1] > ends[place]:  # a token that its predecessor did not pay for: its start is a boundary
            assert tokenizer.decode(ids[:place]).encode() == data[: ends[place]], (place, ends)


@given(texts)
def test_no_character_is_lost_by_a_tokenizer_that_marks_spaces(text: str) -> None:
    tokenizer = trained("metaspace", 420)
    lengths = tokenizer.byte_lengths(text)
    assert len(lengths) == len(tokenizer.encode_response(text)) and sum(lengths) == len(text.encode())


def test_a_character_of_several_tokens_counts_for_the_first() -> None:
    tokenizer = trained("byte-level", 270)
    lengths = tokenizer.byte_lengths("a\U0001f9ffb")
    assert lengths[:3] == [1, 4, 0] and lengths[-2:] == [1, 0] and sum(lengths) == 6
    assert CharTokenizer().byte_lengths("a\u00e9") == [1, 2, 0]


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "characters"])
@given(text=texts, is_ended=st.booleans(), limit=st.integers(1, 9))
def test_a_text_that_is_too_long_is_cut_to_a_beginning_that_fits_and_is_hardly_shorter_than_it_has_to_be(
    kind: str, text: str, is_ended: bool, limit: int
) -> None:
    tokenizer = CharTokenizer() if kind == "characters" else trained(kind, 300 if kind == "byte-level" else 700)
    finish = FinishReason.STOP if is_ended else FinishReason.LENGTH
    sampling = Sampling(max_new_tokens=limit)
    rollout = Rollout(actions=(text,), trace=None, sampling=sampling, finish=finish, claimed_reward=0.0)
    token_ids = tokenizer.encode_response(text)
    cut = cut_to_limit(rollout, tokenizer)
    assert (cut is rollout) is (len(token_ids) - (not is_ended) <= limit)
    if cut is rollout or tokenizer.decode(token_ids) != text:  # the second is refused before
        return
    assert cut.finish is FinishReason.LENGTH and text.startswith(cut.text)
    assert len(tokenizer.encode_response(cut.text)) - 1 <= limit
    longer = text[: len(cut.text) + 2]
    assert longer == text or len(tokenizer.encode_response(longer)) - 1 >= limit
