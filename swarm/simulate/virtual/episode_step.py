"""Step of a virtual learner on a draw of episodes: the real batch, advantages and coefficients, checked.

Invariant: the expected rows are rebuilt from the actions, a fresh environment and the tokenizer, without the code of
admission and batch.
Shape letters: N rollouts, L tokens.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from swarm.config import LearnerConfig, NodeConfig
from swarm.environments.tool_calls import parse_action
from swarm.episode import Actions, Transition, TurnStatus
from swarm.exchange.checks.episode_checks import TURN_REWARD_TOLERANCE
from swarm.interfaces import Environment, Tokenizer
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.fallbacks import RecipeSet
from swarm.objectives.methods import load_recipes
from swarm.report.invariants import TRAINED, TURNS, WHOLE_EPISODES
from swarm.types import ClaimedTurn, Draw, EpisodeLimits, Rollout, ScoredGroup, Task

Found = tuple[str, str]  # name of the invariant, and what broke it


@dataclass(frozen=True, kw_only=True)
class EpisodeStep:
    """A step of a learner whose groups are episodes, with checks of the draw and the batch.

    Example:
        digest, found = EpisodeStep(config=config, tokenizer=tokenizer, environments=environments).make(draw, policy_id)
    """

    config: NodeConfig
    tokenizer: Tokenizer
    environments: Mapping[str, Environment]

    def make(self, draw: Draw, policy_id: str) -> tuple[bytes, list[Found]]:
        """Digest of all coefficients of the recipe, and the violations; the digest is empty if the draw is wrong."""
        limits = self.config.generator.episode_limits
        expected = [
            expected_row(self.environments[drawn.scored.group.env], drawn.scored.group.task_id, rollout, self.tokenizer)
            for drawn in draw.groups
            for rollout in drawn.scored.group.rollouts
        ]
        found = [*_differences([drawn.scored for drawn in draw.groups], expected, self.tokenizer, limits)]
        if found:
            return b"", found  # no learner may get this draw
        batch = make_batch(draw, self.tokenizer, policy_id=policy_id)
        found += _batch_differences(batch, draw, expected)
        digest = hashlib.sha256()
        for part in _recipes(self.config.learner.model_dump_json()).slices(batch):
            advantaged = with_advantages(part.recipe, part.batch, self.config.replay.external)
            scores = advantaged.behavior_logprobs.nan_to_num()
            of_part = coefficients(part.recipe, advantaged, scores, scores).logprobs.numpy()
            digest.update(of_part.tobytes())
            actions = np.stack([_padded(expected[place].mask, of_part.shape[1]) for place in part.places.tolist()])
            if np.any(of_part[~actions]):
                found.append((TRAINED, "a token that the model did not choose has a coefficient"))
        return digest.digest(), found


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedRow:
    """Tokens, turns and rewards of an episode, rebuilt from its actions."""

    ids: list[int]
    mask: list[bool]  # the tokens of actions
    turn_ids: list[int]
    conversations: list[int]  # of each token
    transitions: tuple[Transition, ...]
    reward: float
    is_ended: bool  # by the environment
    num_observed: int  # tokens of the observation after the last action, where there is one


def expected_row(environment: Environment, task_id: int, rollout: Rollout, tokenizer: Tokenizer) -> ExpectedRow:
    """Replays a rollout in a new episode; keeps the trace's tokens of each action that decode to its text."""
    trace = rollout.trace
    assert trace is not None, "every node of a virtual swarm says which tokens it drew"
    ids, mask, turn_ids, conversations = list[int](), list[bool](), list[int](), list[int]()
    has_end: dict[int, bool] = {}  # conversation -> whether its newest action ended by itself
    is_ended, num_observed, conversation = False, 0, 0
    transitions = _transitions(environment, task_id, rollout.actions)
    for turn, text in enumerate(rollout.actions):
        chosen = trace.token_ids[trace.action_mask & (trace.turn_ids == turn)].tolist()
        transition = transitions[turn] if turn < len(transitions) else None
        has_end[conversation] = chosen[-1:] == [*tokenizer.eos_ids]
        if tokenizer.decode(chosen) != text:
            chosen = tokenizer.encode_response(text)
        conversations += [conversation] * len(chosen)
        observed: list[int] = []
        if transition is not None and not transition.is_end:
            conversation = transition.conversation
            if conversation in has_end:
                observed = tokenizer.encode_observation(transition.messages, has_end[conversation])
            else:
                opening = Task(env=environment.name, task_id=0, messages=transition.messages)
                observed = tokenizer.encode_prompt(opening)
        is_ended, num_observed = transition is None or transition.is_end, len(observed)
        if turn == len(rollout.actions) - 1:
            observed = []
        ids += [*chosen, *observed]
        mask += [True] * len(chosen) + [False] * len(observed)
        turn_ids += [turn] * (len(chosen) + len(observed))
        conversations += [conversation] * len(observed)
    rewards = transitions[-1].rewards if transitions else {}
    return ExpectedRow(
        ids=ids,
        mask=mask,
        turn_ids=turn_ids,
        conversations=conversations,
        transitions=tuple(transitions),
        reward=min(max(rewards.get("outcome", 0.0), 0.0), 1.0),
        is_ended=is_ended,
        num_observed=num_observed,
    )


def _transitions(environment: Environment, task_id: int, actions: Actions) -> list[Transition]:
    """Transitions of the environment up to its end or turn limit, without the replay code of nodes."""
    episode, made = environment.episode(task_id), list[Transition]()
    for text in actions:
        if made and made[-1].is_end:
            break
        transition = episode.step(parse_action(text))
        if len(made) + 1 == environment.max_turns and not transition.is_end:
            transition = Transition(
                is_end=True,
                reward=transition.reward,
                rewards=transition.rewards,
                status=TurnStatus.LIMIT,
                state_key=transition.state_key,
                role=transition.role,
            )
        made.append(transition)
    return made


def _differences(
    groups: Sequence[ScoredGroup], expected: Sequence[ExpectedRow], tokenizer: Tokenizer, limits: EpisodeLimits
) -> Iterator[Found]:
    """Yields each difference between the rollouts of a draw and the episodes rebuilt from their actions."""
    rows = iter(expected)
    for scored in groups:
        where = f"group {scored.digest.hex()[:8]} of {scored.group.env}"
        for number, rollout in enumerate(scored.group.rollouts):
            row, trace = next(rows), rollout.trace
            assert trace is not None
            if len(row.transitions) != len(rollout.actions):
                yield WHOLE_EPISODES, f"{where}: {len(rollout.actions)} actions, {len(row.transitions)} are taken"
            if (trace.token_ids.tolist(), trace.turn_ids.tolist()) != (row.ids, row.turn_ids):
                yield WHOLE_EPISODES, f"{where}: tokens that its actions and environment do not make"
            if trace.action_mask.tolist() != row.mask:
                yield TRAINED, f"{where}: an action mask of other tokens"
            if not row.is_ended and limits.has_room(len(row.ids), row.num_observed):
                yield WHOLE_EPISODES, f"{where}: it ends though its environment goes on"
            most = max(
                sum(chosen for chosen, at in zip(row.mask, row.turn_ids, strict=True) if at == turn)
                for turn in {*row.turn_ids}
            )
            if most > limits.max_new_tokens or (len(rollout.actions) > 1 and len(row.ids) > limits.max_episode_tokens):
                yield WHOLE_EPISODES, f"{where}: {most} tokens in a turn, {len(row.ids)} in all"
            if rollout.claimed_turns and not _are_right(rollout.claimed_turns, row.transitions):
                yield TURNS, f"{where}: claims of turns that a new replay does not give"
            if abs(float(scored.rewards[number]) - row.reward) > 1e-6:
                yield TURNS, f"{where}: reward {scored.rewards[number]:.3f}, a new replay gives {row.reward:.3f}"


def _are_right(claims: Sequence[ClaimedTurn], turns: Sequence[Transition]) -> bool:
    return len(claims) == len(turns) and all(
        claim.status is turn.status and abs(claim.reward - turn.reward) <= TURN_REWARD_TOLERANCE
        for claim, turn in zip(claims, turns, strict=True)
    )


def _batch_differences(batch: Batch, draw: Draw, expected: Sequence[ExpectedRow]) -> Iterator[Found]:
    """Yields each difference between the batch of a draw and the rebuilt episodes."""
    sizes = [len(drawn.scored.group.rollouts) for drawn in draw.groups]
    if batch.group_index.tolist() != [index for index, size in enumerate(sizes) for _ in range(size)]:
        yield WHOLE_EPISODES, "a batch in which the rollouts of a group are not together"
    length = batch.token_ids.shape[1]
    for place, row in enumerate(expected):
        if batch.mask[place].tolist() != _padded(row.mask, length).tolist():
            yield TRAINED, "a batch that trains other tokens than those of actions"
        if batch.token_ids[place].tolist() != [*row.ids, *[0] * (length - len(row.ids))]:
            yield WHOLE_EPISODES, "a batch with other tokens than its episodes have"
        in_batch = [0] * length if batch.conversation_ids is None else batch.conversation_ids[place].tolist()
        if in_batch[: len(row.ids)] != row.conversations:
            yield WHOLE_EPISODES, "a batch with tokens in conversations that are not theirs"
        turns = [] if batch.turn_rewards is None else batch.turn_rewards[place].tolist()
        rewards = [turn.reward for turn in row.transitions]
        if not np.allclose([*turns, *[0.0] * (len(rewards) - len(turns))][: len(rewards)], rewards, atol=1e-6):
            yield TURNS, f"turn rewards {turns} of a batch, a new replay gives {rewards}"
        statuses = None if batch.turn_statuses is None else batch.turn_statuses[place]
        if statuses is not None and statuses != tuple(turn.status for turn in row.transitions):
            yield TURNS, f"statuses {statuses} of a batch, a new replay gives others"


def _padded(mask: Sequence[bool], length: int) -> np.ndarray:
    padded = np.zeros(length, np.bool_)
    padded[: len(mask)] = mask
    return padded


@lru_cache(maxsize=64)
def _recipes(learner: str) -> RecipeSet:
    """The recipes of a learner section in JSON, which can be hashed for the cache, unlike the section."""
    return load_recipes(LearnerConfig.model_validate_json(learner))
