"""Groups of adversaries that follow the rules: signed, fresh, rightly rewarded, and made to do harm.

Invariant: an attack is a function of task, version and random numbers. Groups of an attack in `ADMISSIBLE` may pass
every check of admission, so that other defences must bound their effect on a learner; honest admission refuses the
groups of all other attacks.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from swarm.generation.produce import UNSCORED
from swarm.simulate.virtual.author import Author
from swarm.types import (
    FinishReason,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Task,
    TokenTrace,
    VersionSpan,
)

SURE, RARE = -0.01, -5.0  # log-probs that a liar claims for each of its tokens
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz0123456789"

ADMISSIBLE: Final = (
    "invented",  # half of the answers right, half of them reversed, by a script
    "unmeasured",  # wrong answers that differ from the right one in their last character, without log-probs
    "rare",  # the same, with log-probs of rare tokens: the claimed ratio is as large as possible
    "sure",  # the same, with log-probs of nearly certain tokens
    "long",  # wrong answers as long as an answer may be
    "one_task",  # invented answers to one task for ever
    "flood",  # invented answers, many times as many as others make
    "stale",  # the same answers signed again and again with a new date and step
    "copied",  # groups of others under one's own name and lineage
)
INADMISSIBLE: Final = (
    "trained_end",  # an end of sequence before the answer
    "hidden",  # tokens before a right answer that the text does not show
    "context",  # tokens before a right answer that are marked as not trained
    "endless",  # a right answer behind more tokens than an answer may have
)
ATTACKS: Final = (*ADMISSIBLE, *INADMISSIBLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """One answer: its text, and the claims about its tokens."""

    text: str
    logprob: float | None = None
    before: tuple[int, ...] = ()  # tokens before those of the text
    are_trained: bool = True  # those before it


@dataclass(kw_only=True)
class Adversary:
    """Makes the groups of one attack in the name of one node.

    Args:
        attack: one of ATTACKS.
        author: producer of the groups; its configuration sets the group size and the token limit.
        rng: random numbers of the attack.
        heard: returns groups that this node has received.

    Example:
        groups = Adversary(attack="invented", ...).groups(mixture.tasks(0, 4), version)
    """

    attack: str
    author: Author
    rng: random.Random
    heard: Callable[[], Sequence[RolloutGroup]]
    _first: Task | None = field(default=None, init=False)
    _made: list[RolloutGroup] = field(default_factory=list[RolloutGroup], init=False)

    def groups(self, tasks: Sequence[Task], version: PolicyVersion) -> list[RolloutGroup]:
        """One unscored group for each of `tasks`, with `version` as its policy; some attacks use another task."""
        return [self._group(task, version) for task in tasks]

    def _group(self, task: Task, version: PolicyVersion) -> RolloutGroup:
        if self.attack == "copied":
            others = [group for group in self.heard() if group.producer != self.author.node_id]
            if others:
                return self._renamed(self.rng.choice(others), version)
        if self.attack == "stale" and len(self._made) >= 8:
            return self._renamed(self.rng.choice(self._made), version)
        if self.attack == "one_task":
            task = self._first = self._first or task
        rollouts = [self._rollout(answer, version) for answer in self._answers(task)]
        group = self.author.group(task, rollouts, version.policy_id)
        if len(self._made) < 8:
            self._made.append(group)
        return group

    def _renamed(self, group: RolloutGroup, version: PolicyVersion) -> RolloutGroup:
        spans = (VersionSpan(start=0, version=version),)
        rollouts = tuple(
            replace(rollout, trace=None if rollout.trace is None else replace(rollout.trace, spans=spans))
            for rollout in group.rollouts
        )
        named = replace(group, producer=self.author.node_id, policy_id=version.policy_id, rollouts=rollouts)
        return replace(named, verifier=UNSCORED, created_at_s=self.author.clock.now_s())

    def _answers(self, task: Task) -> list[_Answer]:
        """Answers to a task, the first half of them right, so that the group has reward variance."""
        right = self.author.environments[task.env].reference(task.task_id)
        count, most = self.author.config.generator.group_size, self.author.config.generator.max_new_tokens
        last = self.rng.choice([letter for letter in LETTERS if letter != right[-1:]])
        near, reversed_text = right[:-1] + last, (right[::-1] + "#")[: most - 1]
        end, pad = min(self.author.tokenizer.eos_ids), 0
        match self.attack:
            case "unmeasured":
                kinds = _Answer(text=right), _Answer(text=near)
            case "rare":
                kinds = _Answer(text=right, logprob=RARE), _Answer(text=near, logprob=RARE)
            case "sure":
                kinds = _Answer(text=right, logprob=SURE), _Answer(text=near, logprob=SURE)
            case "long":
                text = "".join(self.rng.choice(LETTERS) for _ in range(most - 1))
                kinds = _Answer(text=right), _Answer(text=text)
            case "trained_end":
                kinds = _Answer(text=right, before=(end,)), _Answer(text=reversed_text)
            case "hidden":
                kinds = _Answer(text=right, before=(pad,)), _Answer(text=reversed_text)
            case "context":
                kinds = _Answer(text=right, before=(3, 4), are_trained=False), _Answer(text=reversed_text)
            case "endless":
                kinds = _Answer(text=right, before=(3,) * (40 * most), are_trained=False), _Answer(text=reversed_text)
            case _:
                kinds = _Answer(text=right, logprob=-0.05), _Answer(text=reversed_text, logprob=-0.05)
        return [kinds[number >= (count + 1) // 2] for number in range(count)]

    def _rollout(self, answer: _Answer, version: PolicyVersion) -> Rollout:
        ids = np.asarray([*answer.before, *self.author.tokenizer.encode_response(answer.text)], dtype=np.int32)
        mask = np.ones(len(ids), dtype=np.bool_)
        mask[: len(answer.before)] = answer.are_trained
        return Rollout(
            actions=(answer.text,),
            trace=TokenTrace(
                token_ids=ids,
                action_mask=mask,
                logprobs=None if answer.logprob is None else np.full(len(ids), answer.logprob, dtype=np.float32),
                turn_ids=np.zeros(len(ids), dtype=np.int16),
                spans=(VersionSpan(start=0, version=version),),
            ),
            sampling=self.author.sampling,
            finish=FinishReason.STOP,
            claimed_reward=float("nan"),
        )
