"""Admission against an oracle: whatever it lets in costs no more than an honest answer, and hides nothing from it."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hostile_groups import BLOCK, Findings, play_block
from swarm.exchange.checks.admission_checks import check_form
from swarm.exchange.checks.admission_limits import AdmissionLimits
from swarm.identity import Identity
from swarm.interfaces import Tokenizer
from swarm.model.tokenizer import HfTokenizer
from swarm.testing.builders import ToyTokenizer, make_group, make_identity
from swarm.types import FinishReason, RefusalReason, Rollout, RolloutGroup
from swarm.wire.envelopes import open_group, seal_group
from tests.attacks.hostile_groups import Kind, Vocabulary

EVE = make_identity(5)
LIMITS = AdmissionLimits(group_size=2, max_new_tokens=8)
OURS, THEIRS = ToyTokenizer(), ToyTokenizer("theirs")
NUM_GROUPS = int(
    os.environ.get("SWARM_ORACLE_GROUPS", "2000")
)  # make nightly: 10,000; benchmarks.hostile_groups: a million
OF_OURS, OF_THEIRS = (make_group(EVE.node_id, tokenizer=tokenizer) for tokenizer in (OURS, THEIRS))
HONEST = OF_OURS.rollouts[0]
LETTERS = OURS.encode_response("7 a\n")[:-1]


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer with markers, ids without text, and merges of equal letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("merging")
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for letter in "abcdefghijklmnopqrstuvwxyz":
        for size in (1, 2, 4):
            vocab[letter * 2 * size] = len(vocab)
            merges.append((letter * size, letter * size))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(vocab) + 20}))
    return HfTokenizer(folder)


def played(tokenizer: Tokenizer, blocks: range) -> Findings:
    """Blocks of hostile groups through admission, until the oracle finds a fault, and the steps of what it let in."""
    vocabulary, findings = Vocabulary.of(tokenizer), Findings()
    for number in blocks:
        findings.add(play_block(number, vocabulary))
        if findings.wrong:
            break
    return findings


def check(findings: Findings) -> None:
    """The figures that hold for any number of groups."""
    assert not findings.wrong, findings.wrong[:3]
    assert max(findings.longest.values()) <= 8 and set(findings.longest) == set(Kind)
    assert findings.worst_of_tokens <= 1.0, "no step costs more than the costliest honest one of as many groups"
    assert findings.worst_of_texts <= 1.0
    assert min(findings.admitted.values()) > findings.groups / 50, "groups that are all refused show nothing"
    assert len(findings.admitted) == 3 and findings.steps > findings.groups / 50


def test_what_is_admitted_is_no_longer_and_no_costlier_than_honest_groups_and_shows_every_token() -> None:
    check(played(OURS, range(NUM_GROUPS // BLOCK)))


def test_the_same_with_tokens_that_merge_share_characters_and_have_no_text(merging: Tokenizer) -> None:
    check(played(merging, range(1, 2)))


def travelled(group: RolloutGroup, identity: Identity = EVE) -> RolloutGroup | None:
    """The group as a consumer opens it, None where its structure is refused."""
    opened = open_group(seal_group(group, identity), LIMITS.max_group_bytes)
    return opened if isinstance(opened, RolloutGroup) else None


def unended(group: RolloutGroup, finish: FinishReason, has_trace: bool = True) -> RolloutGroup:
    """The group with answers that lack their last token, the end."""

    def without_end(rollout: Rollout) -> Rollout:
        trace = rollout.trace
        assert trace is not None
        cut = replace(
            trace,
            token_ids=trace.token_ids[:-1],
            action_mask=trace.action_mask[:-1],
            logprobs=None,
            turn_ids=trace.turn_ids[:-1],
        )
        return replace(rollout, trace=cut if has_trace else None, finish=finish)

    return replace(group, rollouts=tuple(map(without_end, group.rollouts[:2])))


UNENDED = [
    pytest.param(unended(OF_OURS, FinishReason.STOP), id="ended"),
    pytest.param(unended(OF_OURS, FinishReason.LENGTH), id="cut off"),
    pytest.param(unended(OF_OURS, FinishReason.LENGTH, has_trace=False), id="text that was cut off"),
]


@pytest.mark.parametrize("group", UNENDED)
def test_right_answers_that_teach_never_to_end_are_refused(group: RolloutGroup) -> None:
    finding = check_form(group, OURS, LIMITS)
    assert finding is not None and finding[0] is RefusalReason.BAD_TOKENS


@given(st.lists(st.sampled_from(LETTERS), min_size=8, max_size=8), st.integers(0, 8))
def test_an_honest_answer_is_never_refused(letters: list[int], num_letters: int) -> None:
    is_ended = num_letters < 8
    ids = [*letters[:num_letters], OURS.EOS_ID] if is_ended else letters
    assert HONEST.trace is not None
    trace = replace(
        HONEST.trace,
        token_ids=np.array(ids, np.int32),
        action_mask=np.ones(len(ids), np.bool_),
        logprobs=np.full(len(ids), -0.5, np.float32),
        turn_ids=np.zeros(len(ids), np.int16),
    )
    finish = FinishReason.STOP if is_ended else FinishReason.LENGTH
    rollout = replace(HONEST, actions=(OURS.decode(ids),), trace=trace, finish=finish)
    opened = travelled(replace(OF_OURS, rollouts=(rollout, rollout)))
    assert opened is not None and check_form(opened, OURS, LIMITS) is None
