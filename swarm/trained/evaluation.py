"""Evaluation of a model on environments: greedy success, sampled success, pass@k, lengths, and every try to read.

Invariant: equal arguments give the same problems and the same tries. The confined verifier scores every try; a problem
on which it fails is left out of the scores and counted.
"""

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, Final, Literal, TextIO

from swarm.activity import OnProgress, ignore_progress
from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.curriculum import evaluation_tasks
from swarm.environments.load import build_environments
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.episode import Actions, EpisodeOutcome
from swarm.errors import ConfigError, RolloutFailed
from swarm.generation.episode_player import Step, player_of
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Tokenizer
from swarm.model.compute_dtype import place
from swarm.trained.model import TrainedModel
from swarm.types import EpisodeLimits, FinishReason, PolicyVersion, Sampling, Task

Split = Literal["held_out", "all"]
_NORMAL_95: Final = 1.96  # standard errors on each side
_ANY_MODEL: Final = PolicyVersion(policy_id="evaluated", step=0)  # all draw with the same random numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """One try at a problem."""

    actions: Actions
    reward: float = math.nan  # NaN, and no success, until it is scored
    is_success: bool = False
    num_tokens: int = 0  # of its actions; 0 for a greedy one
    is_cut_off: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemScore:
    """A problem and the tries at it."""

    task: Task
    reference: str
    greedy: Tried
    tries: tuple[Tried, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentScore:
    """Scores on the problems of one environment."""

    env: str
    problems: tuple[ProblemScore, ...]
    num_unscored: int  # problems on which the verifier failed
    why_unscored: str = ""  # of the first of them

    @property
    def greedy(self) -> "Mean":
        return mean_of([float(each.greedy.is_success) for each in self.problems])

    @property
    def num_tries(self) -> int:
        return len(self.problems[0].tries) if self.problems else 0

    def pass_at(self, k: int) -> "Mean":
        """Probability that at least one of k tries succeeds, mean over problems; 0 < k <= num_tries."""
        return mean_of([pass_at_k(len(p.tries), sum(t.is_success for t in p.tries), k) for p in self.problems])

    @property
    def reward(self) -> "Mean":
        return mean_of([fmean(t.reward for t in each.tries or (each.greedy,)) for each in self.problems])

    @property
    def mean_tokens(self) -> float:
        return mean_of([float(t.num_tokens) for each in self.problems for t in each.tries]).value

    @property
    def cut_off_share(self) -> float:
        return mean_of([float(t.is_cut_off) for each in self.problems for t in each.tries]).value


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean over problems, with the half-width of its 95 % interval (NaN for fewer than two problems)."""

    value: float
    half_width: float


def mean_of(values: Sequence[float]) -> Mean:
    """Mean of independent values with a normal 95 % interval; NaN if there are no values."""
    if not values:
        return Mean(value=math.nan, half_width=math.nan)
    half = _NORMAL_95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Mean(value=fmean(values), half_width=half)


def pass_at_k(num_tries: int, num_right: int, k: int) -> float:
    """Probability that k of the tries, drawn without replacement, include a right one: 1 - C(n - c, k) / C(n, k).

    Source: arXiv:2107.03374, equation 1.
    """
    assert 0 < k <= num_tries and 0 <= num_right <= num_tries, (num_tries, num_right, k)
    return 1.0 - math.comb(num_tries - num_right, k) / math.comb(num_tries, k)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """Problems and tries of an evaluation."""

    environments: tuple[EnvironmentConfig, ...]
    limits: EpisodeLimits
    split: Split = "held_out"
    num_problems: int = 64  # of each environment, at most
    num_tries: int = 8  # sampled tries at each; 0: greedy only
    temperature: float = 1.0
    seed: int = 0
    batch: int = 16  # problems generated together
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)


async def evaluate_model(
    model: TrainedModel,
    plan: EvaluationPlan,
    progress: Callable[[str, int, int], None],
    device: str = "auto",
    on_answers: OnProgress = ignore_progress,
) -> list[EnvironmentScore]:
    """Plays the problems of every environment and scores every try.

    Args:
        model: model to evaluate; its network is moved to the device.
        plan: problems and tries.
        progress: called with environment, problems done, and problems in all.
        device: device of the network, as in `model.device`; auto picks one.
        on_answers: takes the engine's signs of life, from its thread.

    Returns:
        A score for each environment, in the order of the plan.

    Raises:
        ConfigError: an environment cannot be built, or the model cannot read its problems.
    """
    environments = await asyncio.to_thread(build_environments, plan.environments)
    place(model.network, device)
    engine = TransformersGenerator(model.network, model.tokenizer, _ANY_MODEL, plan.seed, on_progress=on_answers)
    verifier = SandboxVerifier(plan.environments, plan.sandbox)
    step: Step = partial(_step, verifier, asyncio.get_running_loop())
    try:
        scores: list[EnvironmentScore] = []
        for name, environment in environments.items():
            try:
                tasks = await asyncio.to_thread(evaluation_tasks, environment, plan.split, plan.num_problems, plan.seed)
            except LookupError as error:  # a record that cannot be used
                raise ConfigError(str(error)) from None
            problems: list[ProblemScore] = []
            failures: list[str] = []
            progress(name, 0, len(tasks))
            for first in range(0, len(tasks), plan.batch):
                part = tasks[first : first + plan.batch]
                made = await asyncio.to_thread(_try, engine, model.tokenizer, part, plan, step)
                for task, tries in zip(part, made, strict=True):
                    try:
                        problems.append(await _score(verifier, task, tries))
                    except RolloutFailed as error:
                        failures.append(str(error))
                progress(name, min(first + plan.batch, len(tasks)), len(tasks))
            scores.append(
                EnvironmentScore(
                    env=name,
                    problems=tuple(problems),
                    num_unscored=len(failures),
                    why_unscored=failures[0] if failures else "",
                )
            )
        return scores
    finally:
        await verifier.close()


def write_tries(scores: Sequence[EnvironmentScore], file: TextIO) -> None:
    """Writes every try to a text file, as a line of JSON each."""
    for of_env in scores:
        for problem in of_env.problems:
            for number, tried in enumerate((problem.greedy, *problem.tries)):
                row: dict[str, Any] = {
                    "environment": of_env.env,
                    "task_id": problem.task.task_id,
                    "messages": [{"role": m.role, "content": m.content} for m in problem.task.messages],
                    "reference": problem.reference,
                    "is_greedy": number == 0,
                    "actions": list(tried.actions),
                    "reward": tried.reward,
                    "is_success": tried.is_success,
                }
                if number:  # a greedy try is text alone
                    row |= {"num_tokens": tried.num_tokens, "is_cut_off": tried.is_cut_off}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def own_environment(
    data: Path,
    reward: str,
    params: Mapping[str, Any] = MappingProxyType({}),
    reward_range: tuple[float, float] = (0.0, 1.0),
    reward_weights: Mapping[str, float] = MappingProxyType({}),
) -> EnvironmentConfig:
    """Configuration of an environment over a user's .jsonl file, judged by its references or by a function.

    Args:
        data: path of the file.
        reward: function that scores, `my_file.py:score` or `package.module:score`; empty: an answer is right if it is
            the same text, or the same number, as the reference.
        params: further parameters of the environment, such as the names of fields.
        reward_range: least and highest reward.
        reward_weights: weight of each named reward.
    """
    return EnvironmentConfig(
        name="own",
        kind="function" if reward else "jsonl",
        dataset=reward or str(data),
        params={**params, "path": str(data)},
        reward_range=reward_range,
        reward_weights=dict(reward_weights),
        exchange="own",
    )


def _try(
    engine: TransformersGenerator, tokenizer: Tokenizer, tasks: Sequence[Task], plan: EvaluationPlan, step: Step
) -> list[list[Tried]]:
    """Makes the greedy try at each task, then the sampled ones; none of them is scored (blocking)."""
    prompts = [tokenizer.encode_prompt(task) for task in tasks]
    limits = plan.limits
    greedy = engine.greedy(prompts, limits.max_new_tokens, player_of(tokenizer, limits, step, tasks, 1))
    made = [[Tried(actions=actions)] for actions in greedy]
    if plan.num_tries:
        sampling = Sampling(temperature=plan.temperature, max_new_tokens=limits.max_new_tokens)
        observe = player_of(tokenizer, limits, step, tasks, plan.num_tries)
        sampled = engine.generate(prompts, plan.num_tries, sampling, [0] * len(prompts), observe)
        for of_task, rollouts in zip(made, sampled, strict=True):
            for rollout in rollouts:
                num_tokens = int(rollout.trace.action_mask.sum()) if rollout.trace is not None else 0
                is_cut_off = rollout.finish is FinishReason.LENGTH
                of_task.append(Tried(actions=rollout.actions, num_tokens=num_tokens, is_cut_off=is_cut_off))
    return made


async def _score(verifier: SandboxVerifier, task: Task, tries: Sequence[Tried]) -> ProblemScore:
    """Scores the tries at one task by the confined verifier. Raises RolloutFailed."""
    verdict = await verifier.verify(task.env, task.task_id, [each.actions for each in tries])
    greedy, *sampled = [
        replace(each, reward=float(reward), is_success=outcome.is_success)
        for each, outcome, reward in zip(tries, verdict.outcomes, verdict.rewards, strict=True)
    ]
    return ProblemScore(task=task, reference=verdict.reference, greedy=greedy, tries=tuple(sampled))


def _step(
    verifier: SandboxVerifier, loop: asyncio.AbstractEventLoop, env: str, task_id: int, actions: Actions
) -> "Future[EpisodeOutcome]":
    return asyncio.run_coroutine_threadsafe(verifier.step(env, task_id, actions), loop)
