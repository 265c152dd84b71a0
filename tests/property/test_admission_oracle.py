"""Admission against an oracle: whatever it lets in costs no more than an honest answer, and hides nothing from it."""

import os
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.exchange import admission_checks
from swarm.exchange.admission_checks import AdmissionLimits, check_form
from swarm.identity import Identity
from swarm.testing.builders import ToyTokenizer, make_group, make_identity
from swarm.types import FinishReason, PolicyVersion, RefusalReason, Rollout, RolloutGroup, TokenTrace, VersionSpan
from swarm.wire.envelopes import open_group, seal_group

EVE = make_identity(5)
LIMITS = AdmissionLimits(group_size=2, max_new_tokens=8)
OURS, THEIRS = ToyTokenizer(), ToyTokenizer("theirs")
NUM_GROUPS = int(os.environ.get("SWARM_ORACLE_GROUPS", "10000"))  # a million by hand
OF_OURS, OF_THEIRS = (make_group(EVE.node_id, tokenizer=tokenizer) for tokenizer in (OURS, THEIRS))
HONEST = OF_OURS.rollouts[0]
LETTERS = OURS.encode_response("7 a\n")[:-1]
MARKERS = [0, OURS.BOS_ID, OURS.EOS_ID]


def any_rollout(rng: random.Random) -> Rollout:
    """Anything that the wire can carry, most of it nearly honest."""
    count = rng.randint(1, 9) if rng.random() < 0.8 else rng.randint(10, 400)
    ids = rng.choices([*LETTERS, *LETTERS, *MARKERS], k=count)
    if rng.random() < 0.7:
        ids = [index for index in ids[:-1] if index not in MARKERS] + [rng.choice([LETTERS[0], OURS.EOS_ID])]
    mask, turns = np.ones(len(ids), np.bool_), np.zeros(len(ids), np.int16)
    if rng.random() < 0.2:
        mask[: rng.randint(0, len(ids))] = False
    if rng.random() < 0.2:
        turns[rng.randint(0, len(ids)) :] = 1
    shown = [index for index, is_trained in zip(ids, mask, strict=True) if is_trained]
    text = rng.choice([ids, ids, shown, [index for index in shown if index not in MARKERS]])
    trace = TokenTrace(
        token_ids=np.array(ids, np.int32),
        action_mask=mask,
        logprobs=None,
        turn_ids=turns,
        spans=(VersionSpan(start=0, version=PolicyVersion(policy_id=EVE.node_id, step=0)),),
    )
    finish = FinishReason.STOP if ids[-1] == OURS.EOS_ID or rng.random() < 0.3 else FinishReason.LENGTH
    return replace(HONEST, text=OURS.decode(text), trace=None if rng.random() < 0.05 else trace, finish=finish)


def any_group(rng: random.Random) -> RolloutGroup:
    """Two rollouts, which say that they are of our tokenizer or of another."""
    group = OF_OURS if rng.random() < 0.8 else OF_THEIRS
    return replace(group, rollouts=(any_rollout(rng), any_rollout(rng)))


def travelled(group: RolloutGroup, identity: Identity = EVE) -> RolloutGroup | None:
    """The group as a consumer opens it, None where its structure is refused."""
    opened = open_group(seal_group(group, identity), LIMITS.max_group_bytes)
    return opened if isinstance(opened, RolloutGroup) else None


@pytest.mark.timeout(120)
def test_what_is_admitted_is_no_longer_than_an_honest_answer_and_shows_every_token() -> None:
    num_admitted = 0
    for seed in range(NUM_GROUPS):
        opened = travelled(any_group(random.Random(seed)))
        if opened is None or check_form(opened, OURS, LIMITS) is not None:
            continue
        num_admitted += 1
        _check_admitted(opened)
    assert num_admitted > NUM_GROUPS / 20, "a fuzz whose groups are all refused shows nothing"


def cost(opened: RolloutGroup) -> int:
    """Squared tokens of the rows that the learner makes of the answers."""
    is_ours = opened.tokenizer_digest == OURS.digest
    return sum(
        (rollout.trace.token_ids.size if is_ours and rollout.trace else len(OURS.encode_response(rollout.text))) ** 2
        for rollout in opened.rollouts
    )


def of_texts(*texts: str) -> RolloutGroup:
    """A group of a node with another tokenizer, to which each text is a few tokens."""
    trace = replace(HONEST, text="").trace
    assert trace is not None
    return replace(OF_THEIRS, rollouts=tuple(replace(HONEST, text=text, trace=trace) for text in texts))


def test_one_long_text_among_short_ones_is_admitted_and_a_group_of_them_is_not() -> None:
    assert check_form(of_texts("7" * 20, "7"), OURS, LIMITS) is None
    finding = check_form(of_texts("7" * 60, "7" * 60), OURS, LIMITS)
    assert finding is not None and finding[0] is RefusalReason.UNUSABLE_TEXT


def test_mutation_without_the_bound_of_a_group_it_costs_sixteen_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_checks, "_CUT_FACTOR", admission_checks.PER_FOREIGN_TOKEN)
    group = of_texts("7" * 60, "7" * 60)
    assert check_form(group, OURS, LIMITS) is None
    assert cost(group) > 14 * 2 * (2 * LIMITS.max_new_tokens) ** 2


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
    pytest.param(unended(OF_OURS, FinishReason.STOP), "_check_end", id="ended"),
    pytest.param(unended(OF_OURS, FinishReason.LENGTH), "_check_cut_off", id="cut off"),
    pytest.param(unended(OF_OURS, FinishReason.LENGTH, has_trace=False), "_check_cut_off", id="text that was cut off"),
]


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: nobody looks at the end"])
@pytest.mark.parametrize(("group", "check"), UNENDED)
def test_right_answers_that_teach_never_to_end_are_refused(
    group: RolloutGroup, check: str, is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        monkeypatch.setattr(admission_checks, check, lambda *_: None)
    finding = check_form(group, OURS, LIMITS)
    assert (finding is not None and finding[0] is RefusalReason.BAD_TOKENS) is is_defended


def _check_admitted(opened: RolloutGroup) -> None:
    assert cost(opened) <= len(opened.rollouts) * (2 * LIMITS.max_new_tokens) ** 2
    for rollout in opened.rollouts:
        is_ended = rollout.finish is FinishReason.STOP
        if rollout.trace is None or opened.tokenizer_digest != OURS.digest:
            assert is_ended or len(rollout.text) >= LIMITS.max_new_tokens or rollout.trace is not None
            row = OURS.encode_response(rollout.text)  # what the learner makes of it
            assert len(row) <= (2 if opened.tokenizer_digest == OURS.digest else 8) * LIMITS.max_new_tokens
            assert OURS.decode(row) == rollout.text
            continue
        ids = rollout.trace.token_ids.tolist()
        assert len(ids) <= LIMITS.max_new_tokens
        assert rollout.trace.action_mask.all() and not rollout.trace.turn_ids.any()
        num_shown = len(ids) - (ids[-1] in OURS.eos_ids)
        assert ids[-1] in OURS.eos_ids if is_ended else len(ids) == LIMITS.max_new_tokens, "as a sampler ends it"
        assert len(rollout.text) == num_shown, "one character a token: a hidden one would be missing"


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
    rollout = replace(HONEST, text=OURS.decode(ids), trace=trace, finish=finish)
    opened = travelled(replace(OF_OURS, rollouts=(rollout, rollout)))
    assert opened is not None and check_form(opened, OURS, LIMITS) is None
