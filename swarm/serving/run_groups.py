"""Runs of agents as rollout groups: the calls of a run become the turns of one episode, token by token.

A call that goes on where an earlier one ended is the next turn of its conversation; any other call (a sub-agent, a
retry, a compacted context) opens a conversation of its own. The group's prompt is the common beginning of the first
prompts of all runs; the rest of each first prompt stands before the run's first turn, as an observation.

Invariant: every trained token was sampled, and follows exactly the tokens that it was sampled from.
Shape letters: P prompt tokens, T tokens of an answer.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from swarm.config.node_config import AGENT_RUNS
from swarm.environments.tool_calls import parse_action
from swarm.episode import MAX_TURNS, OUTCOME, EpisodeOutcome, Transition, TurnStatus
from swarm.generation.rollouts import to_rollout
from swarm.interfaces import Tokenizer
from swarm.serving.answers import Answer
from swarm.types import FinishReason, FloatArray, IntArray, NodeId, Rollout, RolloutGroup, Sampling, VersionSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """One answer of the model to an agent, as it was sampled."""

    prompt_ids: IntArray  # [P]
    token_ids: IntArray  # [T], > 0
    logprobs: FloatArray | None  # [T] nats, at the sampling temperature
    spans: tuple[VersionSpan, ...]  # of the T tokens
    sampling: Sampling
    finish: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run of an agent: its calls in the order in which they ended, and its named rewards."""

    calls: tuple[RecordedCall, ...]  # 1 to MAX_TURNS
    rewards: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Turn:
    call: RecordedCall
    conversation: int
    observed: Sequence[int]  # tokens that come before the action, in its conversation


def run_worth(rewards: Mapping[str, float]) -> float:
    """Reward of a run from its named rewards, clipped to [0, 1]: `outcome`, or without that name the mean of all."""
    value = rewards.get(OUTCOME, sum(rewards.values()) / max(1, len(rewards)))
    return min(1.0, max(0.0, value))


def recorded_call(answer: Answer, sampling: Sampling) -> RecordedCall:
    """Converts an answer, drawn with `sampling`, to a `RecordedCall`."""
    made = answer.completion
    return RecordedCall(
        prompt_ids=np.asarray(answer.prompt_ids, np.int32),
        token_ids=np.asarray(made.token_ids, np.int32),
        logprobs=None if made.logprobs is None else np.asarray(made.logprobs, np.float32),
        spans=tuple(made.spans),
        sampling=sampling,
        finish=made.finish,
    )


def why_not_learned(calls: Sequence[RecordedCall], max_episode_tokens: int) -> str:
    """Reason why a run's calls cannot become an episode, with value and bound; "" if they can."""
    if not calls:
        return "no call was recorded"
    if len(calls) > MAX_TURNS:
        return f"{len(calls)} calls exceed {MAX_TURNS}"
    ways = {(each.sampling.temperature, each.sampling.top_p, each.sampling.top_k) for each in calls}
    if len(ways) > 1:
        return f"its calls have {len(ways)} ways of sampling (temperature, top_p, top_k); use one"
    if len({span.version.policy_id for each in calls for span in each.spans}) > 1:
        return "its calls were answered by two policies"
    num_tokens = sum(len(turn.observed) + turn.call.token_ids.size for turn in _turns(calls, calls[0].prompt_ids.size))
    if num_tokens > max_episode_tokens:
        return f"{num_tokens} tokens after the first prompt exceed generator.max_episode_tokens {max_episode_tokens}"
    return ""


def oldest_step(calls: Sequence[RecordedCall]) -> int:
    """Lowest step among the versions that made the tokens of these calls."""
    return min(span.version.step for each in calls for span in each.spans)


def group_of(
    runs: Sequence[RecordedRun],
    tokenizer: Tokenizer,
    *,
    task: str,
    run_id: str,
    producer: NodeId,
    created_at_s: float,
    compute_dtype: str,
    max_new_tokens: int,
) -> tuple[RolloutGroup, list[EpisodeOutcome]]:
    """Builds the group of one task's runs, and their outcomes; equal arguments give equal groups.

    Args:
        runs: at least one, of one policy; their first prompts have the first token in common.
        tokenizer: tokenizer of the policy.
        task: name of the task.
        run_id: id of the swarm's run.
        producer: id of this node.
        created_at_s: wall clock at which the group was closed.
        compute_dtype: dtype of the engine's passes, or "".
        max_new_tokens: most tokens of an answer.
    """
    firsts = [each.calls[0].prompt_ids for each in runs]
    least = min(ids.size for ids in firsts)
    assert len({int(ids[0]) for ids in firsts}) == 1, "the first prompts of a task begin alike"
    num_shared = sum(1 for _ in takewhile(bool, (len({int(ids[at]) for ids in firsts}) == 1 for at in range(least))))
    made = [_episode(each, num_shared, tokenizer, max_new_tokens) for each in runs]
    group = RolloutGroup(
        run_id=run_id,
        producer=producer,
        policy_id=runs[0].calls[0].spans[0].version.policy_id,
        env=AGENT_RUNS,
        task_id=int.from_bytes(hashlib.sha256(task.encode()).digest()[:7], "big"),
        tokenizer_digest=tokenizer.digest,
        prompt_ids=firsts[0][:num_shared],
        rollouts=tuple(rollout for rollout, _ in made),
        verifier=AGENT_RUNS,
        created_at_s=created_at_s,
        compute_dtype=compute_dtype,
    )
    return group, [outcome for _, outcome in made]


def _turns(calls: Sequence[RecordedCall], num_shared: int) -> list[_Turn]:
    """The calls as turns of conversations; the first prompt loses its first `num_shared` tokens, the group's prompt."""
    conversations: list[list[int]] = []
    turns: list[_Turn] = []
    for call in calls:
        prompt: list[int] = call.prompt_ids.tolist()
        continued = [place for place, ids in enumerate(conversations) if prompt[: len(ids)] == ids]
        place = max(continued, key=lambda place: len(conversations[place]), default=len(conversations))
        observed = prompt[len(conversations[place]) :] if continued else prompt if turns else prompt[num_shared:]
        turns.append(_Turn(call, place, observed))
        conversations[place : place + 1] = [[*prompt, *call.token_ids.tolist()]]
    return turns


def _episode(
    run: RecordedRun, num_shared: int, tokenizer: Tokenizer, max_new_tokens: int
) -> tuple[Rollout, EpisodeOutcome]:
    turns = _turns(run.calls, num_shared)
    ids: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    bounds: list[tuple[int, int]] = []
    for turn in turns:
        call = turn.call
        ids += turn.observed
        logprobs += [float("nan")] * len(turn.observed)
        for span in call.spans:
            if not spans or spans[-1].version != span.version:
                spans.append(VersionSpan(start=len(ids) + span.start if spans else 0, version=span.version))
        bounds.append((len(ids), len(ids) + call.token_ids.size))
        ids += call.token_ids.tolist()
        logprobs += [] if call.logprobs is None else call.logprobs.tolist()
    are_known = all(turn.call.logprobs is not None for turn in turns)
    sampling = run.calls[0].sampling
    rollout = to_rollout(
        tokenizer,
        Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=max(max_new_tokens, *(each.token_ids.size for each in run.calls)),
        ),
        np.asarray(ids, np.int32),
        np.asarray(logprobs, np.float32) if are_known else None,
        spans,
        run.calls[-1].finish,
        bounds,
    )
    after = [turn.conversation for turn in turns[1:]]
    transitions = [
        Transition(conversation=conversation, status=_status(text))
        for conversation, text in zip(after, rollout.actions, strict=False)
    ]
    end = Transition(is_end=True, rewards=dict(run.rewards), status=_status(rollout.actions[-1]))
    return rollout, EpisodeOutcome(reward=run_worth(run.rewards), transitions=(*transitions, end))


def _status(text: str) -> TurnStatus:
    return TurnStatus.MALFORMED if parse_action(text).is_malformed else TurnStatus.OK
