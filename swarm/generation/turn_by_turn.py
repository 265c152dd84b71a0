"""Episodes for engines that make one action per request: the prompt of each turn is the conversation so far.

Invariant: the ids of a conversation only grow: sampled tokens are never rendered again. An engine with a prefix cache
can therefore reuse the entries of a conversation.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace

import numpy as np

from swarm.interfaces import Observation, Observe, Prompts
from swarm.model.conversations import conversation_ids
from swarm.types import FinishReason, Rollout, TokenTrace

MakeActions = Callable[[Prompts, int, Sequence[int] | None], list[Rollout]]
"""(prompts, number of actions for each, number of each prompt for its seeds) -> actions, prompt by prompt."""


def play_episodes(
    make: MakeActions,
    prompts: Prompts,
    num_samples: int,
    numbers: Sequence[int] | None,
    observe: Observe | None,
) -> list[Rollout]:
    """Plays `num_samples` episodes of each prompt and returns them prompt by prompt (blocking).

    The unfinished rollouts take their next turn together, once all of their environments have answered.

    Args:
        make: asks the engine for actions.
        prompts: token ids of each prompt.
        num_samples: episodes of each prompt.
        numbers: number of each prompt in the training sequence; None: the engine counts the prompts itself.
        observe: the environments; None: an episode is one action.
    """
    made = make(prompts, num_samples, numbers)
    if observe is None:
        return made
    prompts = [prompt for prompt in prompts for _ in range(num_samples)]
    numbers = None if numbers is None else [number for number in numbers for _ in range(num_samples)]
    playing = list(range(len(made)))
    conversations = [[0] for _ in made]  # of each action, the next one included
    while playing:
        answers = {i: _asked(observe, i, made[i]) for i in playing if made[i].finish is not FinishReason.ABORTED}
        wait(answers.values())
        observations = {i: seen for i, answer in answers.items() if (seen := answer.result()) is not None}
        playing = list(observations)
        contexts = [_context(prompts[i], _trace(made[i]), conversations[i], observations[i]) for i in playing]
        turns = [len(made[i].actions) for i in playing]
        of_turns = None if numbers is None else [_number(numbers[i], i, k) for i, k in zip(playing, turns, strict=True)]
        actions = make(contexts, 1, of_turns) if playing else []
        for i, action in zip(playing, actions, strict=True):
            made[i] = _joined(made[i], observations[i].token_ids, action)
            conversations[i].append(observations[i].conversation)
    return made


def _context(prompt: Sequence[int], trace: TokenTrace, of_turns: Sequence[int], seen: Observation) -> list[int]:
    """Prompt of the next action: all tokens of the observation's conversation, the observation last."""
    is_in = conversation_ids(of_turns, trace.turn_ids, trace.action_mask) == seen.conversation
    opening = () if seen.conversation else prompt
    return [*opening, *trace.token_ids[is_in].tolist(), *seen.token_ids]


def _asked(observe: Observe, index: int, rollout: Rollout) -> "Future[Observation | None]":
    trace = _trace(rollout)
    newest = trace.turn_ids == len(rollout.actions) - 1
    return observe(index, trace.token_ids[newest].tolist(), rollout.finish is FinishReason.STOP)


def _joined(rollout: Rollout, observation: Sequence[int], action: Rollout) -> Rollout:
    """The rollout, extended by an observation, which belongs to the newest turn, and by the next action."""
    before, after = _trace(rollout), _trace(action)
    num_before, num_observed = before.token_ids.size, len(observation)
    logprobs = None
    if before.logprobs is not None and after.logprobs is not None:
        unknown = np.full(num_observed, np.nan, np.float32)
        logprobs = np.concatenate([before.logprobs, unknown, after.logprobs])
    spans = list(before.spans)
    for span in after.spans:
        if span.version != spans[-1].version:
            spans.append(replace(span, start=span.start + num_before + num_observed))
    turn = len(rollout.actions)
    trace = TokenTrace(
        token_ids=np.concatenate([before.token_ids, np.asarray(observation, np.int32), after.token_ids]),
        action_mask=np.concatenate([before.action_mask, np.zeros(num_observed, np.bool_), after.action_mask]),
        logprobs=logprobs,
        turn_ids=np.concatenate(
            [
                before.turn_ids,
                np.full(num_observed, turn - 1, np.int16),
                np.full(after.token_ids.size, turn, np.int16),
            ]
        ),
        spans=tuple(spans),
    )
    return replace(action, actions=(*rollout.actions, *action.actions), trace=trace)


def _trace(rollout: Rollout) -> TokenTrace:
    assert rollout.trace is not None, "engines say which tokens they made"
    return rollout.trace


def _number(number: int, rollout: int, turn: int) -> int:
    """Number of a turn for its seed; turns with equal conversations still get different samples."""
    return int.from_bytes(hashlib.sha256(struct.pack("<QQQ", number, rollout, turn)).digest()[:7], "little")
