"""Rollout groups and greedy answers from tasks: functions over a generator and a tokenizer.

Invariant: every rollout of a group answers the same prompt, and the group holds the exact tokens of that prompt.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swarm.clock import Clock
from swarm.config import GeneratorConfig
from swarm.episode import Actions
from swarm.generation.episode_player import Step, player_of
from swarm.interfaces import Generator, Observe, Tokenizer
from swarm.model.token_alignment import with_byte_lengths
from swarm.types import EpisodeLimits, NodeId, RolloutGroup, Sampling, Task

# A name that no verifier has; the local wire refuses an empty one.
UNSCORED = "unscored"


def produce(
    generator: Generator,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    group_size: int,
    sampling: Sampling,
    *,
    run_id: str,
    producer: NodeId,
    clock: Clock,
    numbers: Sequence[int] | None = None,
    byte_lengths: bool = False,
    observe: Observe | None = None,
) -> list[RolloutGroup]:
    """Generates one group of `group_size` rollouts for each task (blocking; run it in a thread).

    Args:
        generator: engine that answers.
        tokenizer: tokenizer of the engine's model.
        tasks: tasks to answer.
        group_size: rollouts of each task.
        sampling: parameters to draw tokens with.
        run_id: id of the run.
        producer: id of this node.
        clock: gives `created_at_s`.
        numbers: number of each task in the node's training sequence; see `Generator.generate`.
        byte_lengths: adds the number of bytes that each token stands for, for nodes with other tokenizers.
        observe: plays the environments of these tasks; see `Generator.generate`.

    Returns:
        Groups in the order of `tasks`; rewards are NaN and the verifier is UNSCORED until the agent fills both.
    """
    prompts = [tokenizer.encode_prompt(task) for task in tasks]
    policy_id = generator.version.policy_id
    generated = generator.generate(prompts, group_size, sampling, numbers, observe)
    return [
        RolloutGroup(
            run_id=run_id,
            producer=producer,
            policy_id=policy_id,
            env=task.env,
            task_id=task.task_id,
            tokenizer_digest=tokenizer.digest,
            prompt_ids=np.asarray(prompt, dtype=np.int32),
            rollouts=tuple(with_byte_lengths(each, tokenizer) for each in rollouts)
            if byte_lengths
            else tuple(rollouts),
            verifier=UNSCORED,
            created_at_s=clock.now_s(),
            compute_dtype=generator.compute_dtype,
        )
        for task, prompt, rollouts in zip(tasks, prompts, generated, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class GroupProducer:
    """Generates the rollout groups of a node's training tasks (blocking).

    Example:
        groups = GroupProducer(engine, tokenizer, mixture.tasks, config.generator, run_id, node_id, clock).produce(0, 4)
    """

    generator: Generator
    tokenizer: Tokenizer
    tasks: Callable[[int, int], list[Task]]  # of the training sequence, by first number and count
    config: GeneratorConfig
    run_id: str
    producer: NodeId
    clock: Clock
    step: Step | None = None  # plays environments of several turns

    def produce(self, first: int, count: int) -> list[RolloutGroup]:
        """Generates groups for tasks number `first` to `first + count - 1` of the training sequence."""
        return self.answer(self.tasks(first, count), self.config.group_size, range(first, first + count))

    def answer(self, tasks: Sequence[Task], group_size: int, numbers: Sequence[int]) -> list[RolloutGroup]:
        """Generates one group of `group_size` rollouts for each task; `numbers` as for the function `produce`.

        Nodes that generate with the weights of one trainer draw different samples for the same question, even if their
        seeds are equal.
        """
        if self.generator.version.policy_id != self.producer:  # others answer with the same weights
            first = int.from_bytes(hashlib.sha256(self.producer.encode()).digest()[:7], "little")
            numbers = [first + number for number in numbers]
        return produce(
            self.generator,
            self.tokenizer,
            tasks,
            group_size,
            Sampling(temperature=self.config.temperature, max_new_tokens=self.config.max_new_tokens),
            run_id=self.run_id,
            producer=self.producer,
            clock=self.clock,
            numbers=numbers,
            byte_lengths=self.config.byte_lengths,
            observe=player_of(self.tokenizer, self.config.episode_limits, self.step, tasks, group_size),
        )


def evaluate(
    generator: Generator, tokenizer: Tokenizer, tasks: Sequence[Task], limits: EpisodeLimits, step: Step | None = None
) -> list[Actions]:
    """Answers each task greedily, in order (blocking); `step` plays environments of several turns."""
    prompts = [tokenizer.encode_prompt(task) for task in tasks]
    return generator.greedy(prompts, limits.max_new_tokens, player_of(tokenizer, limits, step, tasks, 1))


def try_tasks(
    generator: Generator,
    tokenizer: Tokenizer,
    tasks: Sequence[Task],
    limits: EpisodeLimits,
    step: Step | None = None,
    *,
    num_tries: int = 0,
    temperature: float = 1.0,
) -> list[list[Actions]]:
    """Answers each task, in order (blocking): `num_tries` times by sampling, or once greedily if that is 0.

    Sampled answers have equal seeds at every call with the same weights.
    """
    if not num_tries:
        return [[actions] for actions in evaluate(generator, tokenizer, tasks, limits, step)]
    prompts = [tokenizer.encode_prompt(task) for task in tasks]
    sampling = Sampling(temperature=temperature, max_new_tokens=limits.max_new_tokens)
    observe = player_of(tokenizer, limits, step, tasks, num_tries)
    made = generator.generate(prompts, num_tries, sampling, [0] * len(prompts), observe)
    return [[rollout.actions for rollout in of_task] for of_task in made]
