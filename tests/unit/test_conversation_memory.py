"""Served conversations go on with the tokens that were sampled."""

import pytest

from swarm.config import ModelConfig
from swarm.episode import Message
from swarm.interfaces import Tokenizer
from swarm.model.tokenizer import load_tokenizer, text_ids
from swarm.serving.conversation_memory import ConversationMemory


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(ModelConfig(source="smollm2"))


def said(*texts: str) -> list[Message]:
    """User and assistant in turn."""
    return [Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(texts)]


def other_cut(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text that are not its canonical ones: letter by letter."""
    ids = [token for letter in text for token in text_ids(tokenizer, letter)]
    assert tokenizer.decode(ids) == text and ids != text_ids(tokenizer, text)
    return ids


def test_a_conversation_goes_on_with_its_exact_tokens(smollm2: Tokenizer) -> None:
    memory = ConversationMemory(smollm2)
    prompt = memory.prompt(said("what is seven?"))
    answer = [*other_cut(smollm2, "a number"), max(smollm2.eos_ids)]
    memory.add(said("what is seven?"), "a number", [*prompt, *answer], is_ended=True)
    after = memory.prompt(said("what is seven?", "a number", "which one?"))
    assert after[: len(prompt) + len(answer)] == [*prompt, *answer]
    rendered = ConversationMemory(smollm2).prompt(said("what is seven?", "a number", "which one?"))
    assert after != rendered and smollm2.decode(after) == smollm2.decode(rendered)
    assert memory.num_continued == 1 and memory.num_rendered == 1


def test_an_answer_that_was_cut_off_gets_its_end_before_the_next_message(smollm2: Tokenizer) -> None:
    memory = ConversationMemory(smollm2)
    prompt = memory.prompt(said("count"))
    answer = text_ids(smollm2, "one two")
    memory.add(said("count"), "one two", [*prompt, *answer], is_ended=False)
    after = memory.prompt(said("count", "one two", "go on"))
    assert after == ConversationMemory(smollm2).prompt(said("count", "one two", "go on"))


@pytest.mark.parametrize(
    "changed",
    [
        said("what is eight?", "a number", "which one?"),
        said("what is seven?", "a numbeR", "which one?"),
        [Message(role="system", content="be short"), *said("what is seven?", "a number", "which one?")],
    ],
)
def test_a_conversation_that_differs_anywhere_is_rendered(smollm2: Tokenizer, changed: list[Message]) -> None:
    memory = ConversationMemory(smollm2)
    prompt = memory.prompt(said("what is seven?"))
    memory.add(said("what is seven?"), "a number", [*prompt, *other_cut(smollm2, "a number")], is_ended=False)
    assert memory.prompt(changed) == ConversationMemory(smollm2).prompt(changed)


def test_what_is_kept_is_bounded_and_the_newest_stays(smollm2: Tokenizer) -> None:
    memory = ConversationMemory(smollm2, max_tokens=100)
    for number in range(10):
        memory.add(said(f"question {number}"), "yes", [5] * 30, is_ended=True)
    assert len(memory._known) == 3
    assert memory.prompt(said("question 9", "yes", "why?"))[:30] == [5] * 30
    assert memory.prompt(said("question 0", "yes", "why?"))[:30] != [5] * 30
    memory.add(said("long"), "yes", [5] * 101, is_ended=True)
    assert not memory._known
