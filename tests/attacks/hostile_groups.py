"""Groups of a hostile node that admission may let in, and an oracle of what it then has let in.

The groups are well formed and signed; most keep every rule but one, or go up to a bound and one beyond it. The oracle
shares no code with admission: it looks at the text, and at the rows of the learner, packed as a step packs them.

Invariant: what the oracle calls wrong is wrong for every tokenizer, and no honest group is.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np

from swarm.interfaces import Tokenizer
from swarm.learn.packing import pack
from swarm.objectives.draw_batch import make_batch
from swarm.testing.builders import TOY_ENV, TOY_RUN_ID, toy_task
from swarm.types import (
    Draw,
    DrawnGroup,
    FinishReason,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Sampling,
    ScoredGroup,
    TokenTrace,
    VersionSpan,
)

GROUP_SIZE: Final = 4
MAX_NEW_TOKENS: Final = 8
FOREIGN_DIGEST: Final = bytes(range(32))  # of a tokenizer that nobody here has
_CHARACTERS_PER_TOKEN: Final = 32  # of a text, at most
_TOKEN_BUDGET: Final = 512  # of a micro-batch: several for each step
_BREAK_EVEN: Final = 576.0  # of the tiny model
_CHARACTERS: Final = " \n\ta7.<|_\u00e9\u0416\u4e2d\u0939\u0301\u200b\ufffd\U0001f600"


class Kind(StrEnum):
    """The way in which the learner gets the rows of a group."""

    TOKENS = "tokens"  # of our tokenizer, as they came
    TEXT = "text"  # of our tokenizer without tokens: cut here
    FOREIGN = "foreign"  # of another tokenizer: cut here


def kind_of(group: RolloutGroup, tokenizer: Tokenizer) -> Kind:
    """The kind of a group that was admitted."""
    if group.tokenizer_digest != tokenizer.digest:
        return Kind.FOREIGN
    return Kind.TEXT if any(rollout.trace is None for rollout in group.rollouts) else Kind.TOKENS


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a tokenizer, by what they say alone."""

    tokenizer: Tokenizer
    plain: tuple[int, ...]  # text, all of which shows
    fragments: tuple[int, ...]  # no character alone: bytes of one, or no text at all
    ends: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, most: int = 4096) -> "Vocabulary":
        """Of every id where there are not more than `most`, else of so many, spread evenly."""
        ends = tuple(sorted(tokenizer.eos_ids))
        step = max(1, tokenizer.vocab_size // most)
        ids = [i for i in range(0, tokenizer.vocab_size, step) if i not in tokenizer.eos_ids]
        ids += range(min(64, tokenizer.vocab_size))  # markers are often first
        ids = sorted(set(ids) - set(ends))
        shows = {i: "\ufffd" not in tokenizer.decode([i]) and tokenizer.decode([i]) != "" for i in ids}
        return cls(
            tokenizer=tokenizer,
            plain=tuple(i for i in ids if shows[i]),
            fragments=tuple(i for i in ids if not shows[i]) or ends,
            ends=ends,
        )

    @cached_property
    def letters(self) -> tuple[int, ...]:
        """Ids of one plain character each: the most tokens for a text."""
        return tuple(i for i in self.plain if len(self.tokenizer.decode([i])) == 1)


def any_group(rng: random.Random, vocabulary: Vocabulary, producer: str, created_at_s: float) -> RolloutGroup:
    """A group for a run of GROUP_SIZE answers of MAX_NEW_TOKENS tokens; its rewards are those of `ScriptedVerifier`."""
    kind = rng.choices(list(Kind), (6, 2, 3))[0]
    task_id = rng.randrange(100_000, 1_000_000)
    size = GROUP_SIZE if rng.random() < 0.98 else rng.choice([1, 3, 5, 64])
    tricks = rng.choice([(), (), (), (rng.choice(_TRICKS),), tuple(rng.sample(_TRICKS, 2))])
    if kind is Kind.TOKENS:
        least = rng.choice([1, 1, MAX_NEW_TOKENS])
        rollouts = [_traced(rng, vocabulary, producer, task_id, tricks, least) for _ in range(size)]
    else:
        texts = _long_texts(rng, vocabulary, size) if rng.random() < 0.7 else _texts(rng, vocabulary, size)
        has_tokens = kind is Kind.FOREIGN and rng.random() < 0.8
        rollouts = [_of_text(rng, text, producer, task_id, has_tokens) for text in texts]
    if "mixed" in tricks:
        rollouts[0] = replace(rollouts[0], trace=None)
    prompt = vocabulary.tokenizer.encode_prompt(toy_task(TOY_ENV, task_id))
    if "prompt" in tricks:
        prompt = rng.choice([prompt * 300, [*prompt, prompt[-1]], prompt[:-1] or prompt * 2])
    return RolloutGroup(
        run_id=TOY_RUN_ID,
        producer=producer,
        policy_id=producer,
        env=TOY_ENV,
        task_id=task_id,
        tokenizer_digest=FOREIGN_DIGEST if kind is Kind.FOREIGN else vocabulary.tokenizer.digest,
        prompt_ids=np.array(prompt, np.int32),
        rollouts=tuple(rollouts),
        verifier="digits/1",
        created_at_s=created_at_s,
    )


_TRICKS: Final = (
    "long",  # more tokens than allowed
    "fragments",  # tokens that show nothing alone
    "ends",  # an end before the end
    "untrained",  # tokens that are not trained, of another question
    "turns",
    "spelled",  # in single letters, which usually merge
    "hidden",  # the text leaves something out
    "unended",  # what is said of the end is not so
    "mixed",
    "prompt",
    "logprobs",
    "sampling",
    "aborted",
)


def _traced(
    rng: random.Random, vocabulary: Vocabulary, producer: str, task_id: int, tricks: Sequence[str], least: int
) -> Rollout:
    most = MAX_NEW_TOKENS
    is_ended = rng.random() < 0.5
    count = max(least, rng.choice([most, most, most - 1, rng.randint(1, most)]))
    if not is_ended and "unended" not in tricks:
        count = most
    if "long" in tricks:
        count = rng.choice([most + 1, 2 * most, rng.randint(most + 1, 50 * most)])
    ids = rng.choices(vocabulary.plain, k=count)
    if "spelled" in tricks:
        ids = [vocabulary.letters[task_id % len(vocabulary.letters)]] * count
    if rng.random() < 0.1 and least == 1:
        ids, is_ended = vocabulary.tokenizer.encode_response(str(task_id % 10)), True
    if "fragments" in tricks:
        ids[rng.randrange(len(ids))] = rng.choice(vocabulary.fragments)
    if "ends" in tricks:
        ids[rng.randrange(len(ids))] = rng.choice(vocabulary.ends)
    if is_ended:
        ids[-1] = rng.choice(vocabulary.ends)
    if "unended" in tricks:
        is_ended = not is_ended
    mask, turns = np.ones(len(ids), np.bool_), np.zeros(len(ids), np.int16)
    if "untrained" in tricks:
        mask[: rng.randint(0, len(ids))] = False
    if "turns" in tricks:
        turns[rng.randint(0, len(ids)) :] = 1
    shown = [index for index, is_trained in zip(ids, mask, strict=True) if is_trained]
    text = vocabulary.tokenizer.decode(ids)
    if "hidden" in tricks:
        without = [index for index in shown if index in vocabulary.plain]
        text = rng.choice([vocabulary.tokenizer.decode(without), text.strip(), text[:-1], text.replace("\ufffd", "")])
    logprobs = None if rng.random() < 0.3 else np.full(len(ids), rng.choice([-1.0, 0.0, -99.0]), np.float32)
    if "logprobs" in tricks:
        logprobs = np.full(len(ids), rng.choice([np.nan, 1.0, -1e9, -np.inf]), np.float32)
    trace = _trace(producer, ids, mask, turns, logprobs)
    return _rollout(rng, text, trace, task_id, is_ended, tricks)


def _texts(rng: random.Random, vocabulary: Vocabulary, size: int) -> list[str]:
    """Any characters; many tokens each, unknown ones, and such as merge."""
    return ["".join(rng.choices(_CHARACTERS, k=rng.randint(0, 40))) for _ in range(size)]


def _long_texts(rng: random.Random, vocabulary: Vocabulary, size: int) -> list[str]:
    """Texts that would become rows at the bound of one, just beyond it and far beyond."""
    most = MAX_NEW_TOKENS
    lengths = rng.choice(
        [
            [2 * most] * size,
            [_CHARACTERS_PER_TOKEN * most] * size,
            [_CHARACTERS_PER_TOKEN * most + 2, *[1] * (size - 1)],
            [most + rng.randint(-2, 2) for _ in range(size)],
            [rng.randint(1, 8 * most) for _ in range(size)],
            [most] * size,
        ]
    )
    letters = [vocabulary.tokenizer.decode([index]) for index in rng.choices(vocabulary.letters, k=8)]
    return ["".join(rng.choices(letters, k=max(0, length - 1))) for length in lengths]


def _of_text(rng: random.Random, text: str, producer: str, task_id: int, has_tokens: bool) -> Rollout:
    trace, is_ended = None, rng.random() < 0.5 or (len(text) < MAX_NEW_TOKENS and rng.random() < 0.9)
    if has_tokens:
        count = rng.randint(1, MAX_NEW_TOKENS) if is_ended else MAX_NEW_TOKENS
        ids = rng.choices(range(2**31 - 1), k=count)
        logprobs = rng.choice([None, np.full(count, -1.0, np.float32)])
        trace = _trace(producer, ids, np.ones(count, np.bool_), np.zeros(count, np.int16), logprobs)
        if rng.random() < 0.3:
            size = len(text.encode())
            cuts = sorted(rng.choices(range(size + 1), k=count - 1))
            lengths = np.array([b - a for a, b in pairwise([0, *cuts, size])], np.int32)
            trace = replace(trace, byte_lengths=lengths)
    return _rollout(rng, text, trace, task_id, is_ended, ())


def _trace(
    producer: str, ids: Sequence[int], mask: np.ndarray, turns: np.ndarray, logprobs: np.ndarray | None
) -> TokenTrace:
    return TokenTrace(
        token_ids=np.array(ids, np.int32),
        action_mask=mask,
        logprobs=logprobs,
        turn_ids=turns,
        spans=(VersionSpan(start=0, version=PolicyVersion(policy_id=producer, step=0)),),
    )


def _rollout(
    rng: random.Random, text: str, trace: TokenTrace | None, task_id: int, is_ended: bool, tricks: Sequence[str]
) -> Rollout:
    finish = FinishReason.STOP if is_ended else FinishReason.LENGTH
    allowed = rng.choice([1, 10**6]) if "sampling" in tricks else MAX_NEW_TOKENS
    return Rollout(
        actions=(text,),
        trace=trace,
        sampling=Sampling(max_new_tokens=allowed),
        finish=FinishReason.ABORTED if "aborted" in tricks and rng.random() < 0.3 else finish,
        claimed_reward=float(text == str(task_id % 10)),
    )


# --- the oracle --------------------------------------------------------------------------------------


def wrong_about(scored: ScoredGroup, tokenizer: Tokenizer) -> str | None:
    """The fault of a group that was admitted; None where it has none."""
    kind = kind_of(scored.group, tokenizer)
    rows = rows_of(scored, tokenizer)
    if max(map(len, rows)) > MAX_NEW_TOKENS:
        return f"a row of {max(map(len, rows))} tokens, more than {MAX_NEW_TOKENS}"
    find = _wrong_about_tokens if kind is Kind.TOKENS else _wrong_about_text
    for rollout, row in zip(scored.group.rollouts, rows, strict=True):
        wrong = find(rollout, row, tokenizer)
        if wrong is not None:
            return wrong
    num_usual = sum(len(tokenizer.encode_response(rollout.text)) for rollout in scored.group.rollouts)
    if kind is Kind.TOKENS and sum(map(len, rows)) > 2 * num_usual + 4:
        return f"{sum(map(len, rows))} tokens for texts of {num_usual}"
    return None


def rows_of(scored: ScoredGroup, tokenizer: Tokenizer) -> list[list[int]]:
    """Tokens of the answers as the learner has them, trained or not."""
    batch = make_batch(_draw([scored]), tokenizer, task_of=toy_task)
    is_used = batch.mask | (batch.token_ids != 0)
    ends = [int(used.nonzero().max()) + 1 if used.any() else 0 for used in is_used]
    return [ids[:end].tolist() for ids, end in zip(batch.token_ids, ends, strict=True)]


def _wrong_about_text(rollout: Rollout, row: list[int], tokenizer: Tokenizer) -> str | None:
    """A text that is encoded here: the row says all of it, or its beginning where it has too many tokens."""
    said = tokenizer.decode(row)
    num_usual = len(tokenizer.encode_response(rollout.text)) - (rollout.finish is not FinishReason.STOP)
    if said != rollout.text and (num_usual <= MAX_NEW_TOKENS or not rollout.text.startswith(said)):
        return "the row says something else than the text"
    return None


def _wrong_about_tokens(rollout: Rollout, row: list[int], tokenizer: Tokenizer) -> str | None:
    if rollout.trace is None:
        return "some have tokens, and some have none"
    ids = rollout.trace.token_ids.tolist()
    if ids != row or not rollout.trace.action_mask.all() or rollout.trace.turn_ids.any():
        return "tokens that the model did not choose"
    shown = ids[:-1] if ids[-1] in tokenizer.eos_ids else ids
    if set(shown) & tokenizer.eos_ids:
        return "an end before the end"
    if rollout.finish is FinishReason.STOP and shown == ids:
        return "ended without an end"
    if rollout.finish is FinishReason.LENGTH and len(ids) < MAX_NEW_TOKENS:
        return "cut off before the most tokens that are allowed"
    return None if _is_shown(shown, rollout.text, tokenizer) else "tokens that the text does not show"


def _is_shown(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> bool:
    """True if each token adds to the text, so that none hides. Bytes of one broken character share one mark."""
    shown = ""
    for count in range(1, len(ids) + 1):
        before, shown = shown, tokenizer.decode(ids[:count])
        if shown == before and not shown.endswith("\ufffd"):
            return False
    return shown == text


def step_cost(groups: Sequence[ScoredGroup], tokenizer: Tokenizer) -> int:
    """Padded tokens of a step's rows squared, plus these tokens."""
    batch = make_batch(_draw(groups), tokenizer, task_of=toy_task)
    sizes = [rows.token_ids.shape for rows in pack(batch, _TOKEN_BUDGET, break_even=_BREAK_EVEN)]
    return sum(count * longest * longest + count * longest for count, longest in sizes)


def _draw(groups: Sequence[ScoredGroup]) -> Draw:
    drawn = tuple(DrawnGroup(scored=scored, age_steps=0, use=1) for scored in groups)
    return Draw(step=1, groups=drawn, num_zero_variance=0)
