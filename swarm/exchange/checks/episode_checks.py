"""Checks of episodes of several turns: their form, and every observation, reward and end against the replay here.

Invariant: every learned token that the model did not choose comes from this node's own replay and tokenizer; only
observations of nodes listed in `scored_from` are believed.

Shape letters: T response tokens, K turns.
"""

from dataclasses import dataclass
from itertools import pairwise, starmap
from typing import Final

import numpy as np

from swarm.episode import MAX_TURNS, EpisodeOutcome
from swarm.errors import ConfigError
from swarm.exchange.checks.admission_limits import Finding, first
from swarm.interfaces import Tokenizer, Verdict
from swarm.model.conversations import Conversations
from swarm.types import EpisodeLimits, FinishReason, RefusalReason, Rollout, RolloutGroup, TokenTrace

TURN_REWARD_TOLERANCE: Final = 1e-3  # it travels as float32
# Bound of a text before it is encoded here, `most_chars`. In 15 million tokens of code, prose, tables and markup by
# three tokenizers (SmolLM2, DeepSeek-V3, Claude 2) the longest 8 consecutive tokens have 303 characters, 64: 934,
# 256: 2,970 (white space in C++), 2,048: 14,540.
CHARS_PER_TOKEN: Final = 12
CHARS_OF_FEW: Final = 1024
# Honest samples often differ from the usual cut of their text (9 of 32 of SmolLM2 at temperature 1), by few tokens.
CUT_FACTOR: Final = 2
CUT_EXTRA: Final = 4


@dataclass(frozen=True, slots=True)
class TurnBounds:
    """Positions of a turn among the response tokens: action [start, end), then observation [end, next)."""

    start: int
    end: int
    next: int


def turns_of(trace: TokenTrace) -> list[TurnBounds] | None:
    """[K] turns; None if a turn is not an action and then an observation, or if an observation ends the trace."""
    starts = [0, *(np.flatnonzero(np.diff(trace.turn_ids)) + 1).tolist()]
    turns: list[TurnBounds] = []
    for start, after in pairwise([*starts, trace.token_ids.size]):
        num_chosen = int(np.count_nonzero(trace.action_mask[start:after]))
        if not num_chosen or not trace.action_mask[start : start + num_chosen].all():
            return None
        turns.append(TurnBounds(start, start + num_chosen, after))
    return turns if turns[-1].end == turns[-1].next else None


def check_episodes(group: RolloutGroup, tokenizer: Tokenizer, limits: EpisodeLimits) -> Finding:
    """Checks the form of episodes: everything that can be decided before a replay."""
    is_ours = group.tokenizer_digest == tokenizer.digest
    # of all rollouts, before a text of any is encoded
    finding = first(
        _check_structure(rollout, limits)
        or _check_num_claims(rollout)
        or (_check_num_chars(rollout, limits) if rollout.trace is None or not is_ours else None)
        for rollout in group.rollouts
    )
    finding = finding or first(
        _check_actions(rollout, rollout.trace, tokenizer, limits)
        if rollout.trace is not None and is_ours
        else _check_texts(rollout, tokenizer, limits)
        for rollout in group.rollouts
    )
    return finding or (check_cut(group, tokenizer) if is_ours else None)


def check_replay(group: RolloutGroup, verdict: Verdict, tokenizer: Tokenizer, limits: EpisodeLimits) -> Finding:
    """Checks every recorded episode against the replay of its actions on this node.

    A difference is the producer's fault (WRONG_EPISODE) only if both nodes have the same version of the environment.
    """
    is_ours = group.tokenizer_digest == tokenizer.digest
    is_same = group.verifier == verdict.verifier

    def check(rollout: Rollout, outcome: EpisodeOutcome) -> Finding:
        has_our_tokens = is_ours and rollout.trace is not None
        conversations = Conversations(tokenizer, group.env)
        detail = _difference(rollout, outcome, tokenizer if has_our_tokens else None, conversations, limits)
        if detail:
            return (RefusalReason.WRONG_EPISODE if is_same else RefusalReason.OTHER_ENVIRONMENT), detail
        finding = _check_claims(rollout, outcome) if is_same else None
        return finding or (
            None if has_our_tokens else _check_reencoded(rollout, outcome, tokenizer, conversations, limits)
        )

    try:
        return first(starmap(check, zip(group.rollouts, verdict.outcomes, strict=True)))
    except ConfigError as error:  # an observation has no tokens here
        return RefusalReason.UNUSABLE_TEXT, f"an observation cannot be encoded here: {type(error).__name__}"


def check_believed(group: RolloutGroup, verdict: Verdict, tokenizer: Tokenizer) -> Finding:
    """Checks episodes whose observations are believed: all tokens are ours, and turns are at most `max_turns`."""
    if group.tokenizer_digest != tokenizer.digest or any(rollout.trace is None for rollout in group.rollouts):
        return RefusalReason.UNUSABLE_TEXT, "observations that are believed come as tokens of ours"
    return check_num_turns(group, verdict.task.max_turns, verdict.verifier)


def check_num_turns(group: RolloutGroup, max_turns: int, verifier: str) -> Finding:
    """Checks that no episode has more than `max_turns` turns, the limit of this node's environment `verifier`."""
    most = max(len(rollout.actions) for rollout in group.rollouts)
    if most > max_turns:
        is_same = group.verifier == verifier
        reason = RefusalReason.WRONG_EPISODE if is_same else RefusalReason.OTHER_ENVIRONMENT
        return reason, f"{most} actions, of which the environment takes {max_turns}"
    return None


def check_cut(group: RolloutGroup, tokenizer: Tokenizer) -> Finding:
    """Checks that texts are cut into about as many tokens as usual: no peer can teach our policy to spell out words.

    The bound is on the whole group: the usual encoding of a single text may have far fewer tokens (64 spaces have 2).
    """
    masks = [rollout.trace.action_mask for rollout in group.rollouts if rollout.trace is not None]
    num_tokens = sum([int(np.count_nonzero(mask)) for mask in masks])
    texts = [text for rollout in group.rollouts if rollout.trace is not None for text in rollout.actions]
    num_usual = sum([len(tokenizer.encode_response(text)) for text in texts])
    if num_tokens > CUT_FACTOR * num_usual + CUT_EXTRA:
        return RefusalReason.UNUSABLE_TEXT, f"{num_tokens} tokens for texts that usually have {num_usual}"
    return None


def most_chars(num_tokens: int) -> int:
    """Bound on the characters of a text of `num_tokens` tokens of another tokenizer."""
    return CHARS_PER_TOKEN * num_tokens + CHARS_OF_FEW


# --- form ---------------------------------------------------------------------------------------


def _check_structure(rollout: Rollout, limits: EpisodeLimits) -> Finding:
    trace = rollout.trace
    if not 0 < len(rollout.actions) <= MAX_TURNS:
        return RefusalReason.MALFORMED, f"{len(rollout.actions)} actions, expected 1 to {MAX_TURNS}"
    if trace is None:
        return None
    turns = turns_of(trace) if trace.token_ids.size else None
    if turns is None or len(turns) != len(rollout.actions):
        return RefusalReason.BAD_TOKENS, f"{len(rollout.actions)} texts, and tokens of other turns"
    if trace.token_ids.size > limits.max_episode_tokens:
        return RefusalReason.BAD_TOKENS, f"{trace.token_ids.size} tokens exceed {limits.max_episode_tokens}"
    longest = max(turn.end - turn.start for turn in turns)
    if longest > limits.max_new_tokens:
        return RefusalReason.BAD_TOKENS, f"an action of {longest} tokens exceeds {limits.max_new_tokens}"
    for turn in turns[:-1]:
        if not limits.has_room(turn.end, turn.next - turn.end):
            return RefusalReason.BAD_TOKENS, "a turn after the last that fits"
    return None


def _check_num_claims(rollout: Rollout) -> Finding:
    num_claims, num_actions = len(rollout.claimed_turns), len(rollout.actions)
    if num_claims not in (0, num_actions):
        return RefusalReason.MALFORMED, f"claims for {num_claims} turns of {num_actions}"
    return None


def _check_actions(rollout: Rollout, trace: TokenTrace, tokenizer: Tokenizer, limits: EpisodeLimits) -> Finding:
    """Checks tokens of our vocabulary: each action decodes to its text, and the last one ends as `finish` states."""
    turns = turns_of(trace)
    assert turns is not None
    if trace.token_ids.size and int(trace.token_ids.view(np.uint32).max()) >= tokenizer.vocab_size:
        return RefusalReason.BAD_TOKENS, f"token id outside [0, {tokenizer.vocab_size})"
    for index, (turn, text) in enumerate(zip(turns, rollout.actions, strict=True)):
        ids: list[int] = trace.token_ids[turn.start : turn.end].tolist()
        if not tokenizer.eos_ids.isdisjoint(ids[:-1]):
            return RefusalReason.BAD_TOKENS, "tokens after an end of sequence"
        has_end = ids[-1] in tokenizer.eos_ids
        if not has_end and len(ids) < limits.max_new_tokens:
            return RefusalReason.BAD_TOKENS, f"cut off after {len(ids)} tokens of {limits.max_new_tokens}"
        if index == len(turns) - 1 and has_end is not (rollout.finish is FinishReason.STOP):
            return RefusalReason.BAD_TOKENS, "the last action does not end as its episode says"
        if tokenizer.decode(ids) != text:
            return RefusalReason.TEXT_MISMATCH, "the tokens do not decode to the text"
    return None


def _check_num_chars(rollout: Rollout, limits: EpisodeLimits) -> Finding:
    """Checks that texts are short enough to be encoded here, as texts of honest nodes are."""
    longest, most = max(map(len, rollout.actions)), most_chars(limits.max_new_tokens)
    if longest > most:
        return RefusalReason.UNUSABLE_TEXT, f"{longest} characters of an action exceed {most}"
    num_chars, most = sum(map(len, rollout.actions)), most_chars(limits.max_episode_tokens)
    if num_chars > most:
        return RefusalReason.UNUSABLE_TEXT, f"{num_chars} characters of an episode exceed {most}"
    return None


def _check_texts(rollout: Rollout, tokenizer: Tokenizer, limits: EpisodeLimits) -> Finding:
    """Checks that texts survive encoding with our vocabulary, and have no more tokens than our own actions may have."""
    num_tokens = 0
    for text in rollout.actions:
        ids = tokenizer.encode_response(text)
        num_tokens += len(ids)
        if num_tokens > limits.max_episode_tokens:
            return RefusalReason.UNUSABLE_TEXT, f"more than {limits.max_episode_tokens} tokens here"
        if tokenizer.decode(ids) != text:
            return RefusalReason.UNUSABLE_TEXT, "the text has characters that are lost here"
        if len(ids) > limits.max_new_tokens:
            return RefusalReason.UNUSABLE_TEXT, f"an action of {len(ids)} tokens here exceeds {limits.max_new_tokens}"
    return None


# --- against the replay ---------------------------------------------------------------------------


def _difference(
    rollout: Rollout,
    outcome: EpisodeOutcome,
    tokenizer: Tokenizer | None,
    conversations: Conversations,
    limits: EpisodeLimits,
) -> str:
    """The first difference from the replay, or ""; without a `tokenizer` only the number of actions is compared."""
    num_actions, num_taken = len(rollout.actions), len(outcome.transitions)
    if num_taken != num_actions:
        return f"{num_actions} actions, of which the environment takes {num_taken}"
    if tokenizer is None or rollout.trace is None:
        return ""
    trace, turns = rollout.trace, turns_of(rollout.trace)
    assert turns is not None
    for number, (turn, transition) in enumerate(zip(turns, outcome.transitions, strict=True), start=1):
        if transition.is_end:  # the last one: the environment takes no action after it
            return ""
        has_end = int(trace.token_ids[turn.end - 1]) in tokenizer.eos_ids
        expected = conversations.observe(transition, has_end).token_ids
        if number < num_actions and trace.token_ids[turn.end : turn.next].tolist() != list(expected):
            return f"the observation after action {number} is another one"
        if number == num_actions and limits.has_room(turn.end, len(expected)):
            return f"it ends after action {number}, though the environment goes on"
    return ""


def _check_reencoded(
    rollout: Rollout,
    outcome: EpisodeOutcome,
    tokenizer: Tokenizer,
    conversations: Conversations,
    limits: EpisodeLimits,
) -> Finding:
    """Checks that a re-encoded episode was ended by its environment, and has at most `max_episode_tokens` tokens."""
    if not outcome.is_ended:
        return RefusalReason.UNUSABLE_TEXT, "an episode that a limit in other tokens ended"
    num_tokens = 0
    for text, transition in zip(rollout.actions, outcome.transitions, strict=True):
        num_tokens += len(tokenizer.encode_response(text))
        num_tokens += 0 if transition.is_end else len(conversations.observe(transition, True).token_ids)
        if num_tokens > limits.max_episode_tokens:
            return RefusalReason.UNUSABLE_TEXT, f"more than {limits.max_episode_tokens} tokens here"
    return None


def _check_claims(rollout: Rollout, outcome: EpisodeOutcome) -> Finding:
    """Checks the statuses and rewards that the producer claims for turns, if any."""
    if not rollout.claimed_turns:
        return None
    for number, (claim, transition) in enumerate(zip(rollout.claimed_turns, outcome.transitions, strict=True), start=1):
        if claim.status is not transition.status:
            return RefusalReason.FALSE_REWARD, f"turn {number} is {transition.status}, not {claim.status}"
        error = abs(claim.reward - transition.reward)
        if not error <= TURN_REWARD_TOLERANCE:  # NaN, too
            return RefusalReason.FALSE_REWARD, f"claim of turn {number} off by {error:.4f}"
    return None
