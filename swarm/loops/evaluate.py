"""Evaluation of the newest version: success on each environment and split, and a few episodes for people to read.

Invariant: the sandboxed verifier scores each try. A failure of the verifier says nothing about the policy: success is
taken over scored problems, and the guard ignores an evaluation in which fewer than half of the problems were scored.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from swarm.episode import Actions
from swarm.errors import RolloutFailed
from swarm.interfaces import Learner, Verdict
from swarm.loops.worker import Worker
from swarm.telemetry.shown_episodes import NUM_SHOWN, ShownEpisode
from swarm.types import MAX_OUTCOMES, Evaluation, Task

logger = logging.getLogger(__name__)


async def evaluate_version(worker: Worker, learner: Learner) -> None:
    """Evaluates the newest version on every environment and split, and reports the results to learner and agent."""
    evaluations, telling, shown = list[Evaluation](), list[Evaluation](), list[ShownEpisode]()
    step = learner.version.step
    for (env, split), tasks in worker.evaluation_tasks.items():
        evaluation, episodes = await evaluate_tasks(worker, step, env, split)
        if split == "held_out":
            shown += episodes
        if evaluation is None:
            continue
        evaluations.append(evaluation)
        if 2 * evaluation.num_problems >= len(tasks):
            telling.append(evaluation)
    learner.evaluated(telling)
    await _keep_best(worker, learner, [each.accuracy for each in telling if each.split == "held_out"])
    await worker.exchange.report_evaluations(evaluations)
    await worker.offload(worker.show, shown)


async def evaluate_tasks(
    worker: Worker, step: int, env: str, split: str
) -> tuple[Evaluation | None, list[ShownEpisode]]:
    """Evaluates the newest weights on one environment and split: None if nothing was scored, and episodes to show."""
    tasks = worker.evaluation_tasks[env, split]
    tries = await worker.offload(worker.evaluate, tasks)
    verdicts, error = list[Verdict | None](), ""
    for task, of_task in zip(tasks, tries, strict=True):
        try:
            verdicts.append(await worker.exchange.verify(task.env, task.task_id, of_task))
        except RolloutFailed as failed:
            verdicts.append(None)
            error = str(failed)
    scored = [verdict for verdict in verdicts if verdict is not None]
    if error:  # once: a reward may fail on every answer
        fields = {"env": env, "left_out": len(tasks) - len(scored), "problems": len(tasks), "error": error}
        logger.warning("answers of an evaluation could not be scored", extra=fields)
    shown = _to_show(step, tasks, tries, verdicts)
    if not scored:
        return None, shown
    references = Counter(verdict.reference for verdict in scored if verdict.reference)  # a reward may need none
    evaluation = Evaluation(
        step=step,
        env=env,
        split=split,
        accuracy=fmean(_num_right(verdict) / len(verdict.outcomes) for verdict in scored),
        num_problems=len(scored),
        majority_baseline=max(references.values(), default=0) / len(scored),
        at_s=worker.clock.now_s(),
        num_right=_outcomes(verdicts),
        num_tries=len(scored[0].outcomes),
        rewards=_graded(verdicts),
        problems=_digest(tasks, scored[0]),
    )
    return evaluation, shown


async def _keep_best(worker: Worker, learner: Learner, held_out: Sequence[float]) -> None:
    """Offers the version if every held-out split was at least half scored: other means cannot be compared."""
    num_wanted = sum(split == "held_out" for _, split in worker.evaluation_tasks)
    if worker.keep_best is None or not held_out or len(held_out) < num_wanted:
        return
    try:
        await worker.offload(worker.keep_best, *learner.snapshot(), fmean(held_out))
    except OSError as error:
        extra = {"step": learner.version.step, "error": str(error)}
        logger.error("the best version was not kept: make room on the disk", extra=extra)


def _outcomes(verdicts: Sequence[Verdict | None]) -> tuple[int, ...]:
    """Right tries at each problem, -1 where it was not scored; empty for more than MAX_OUTCOMES problems."""
    counts = (-1 if verdict is None else _num_right(verdict) for verdict in verdicts)
    return tuple(counts) if len(verdicts) <= MAX_OUTCOMES else ()


def _graded(verdicts: Sequence[Verdict | None]) -> tuple[float, ...]:
    """Mean reward at each problem, 0 where it was not scored; empty as `_outcomes`, or where each is 0 or 1."""
    means = [0.0 if verdict is None else round(float(verdict.rewards.mean()), 4) for verdict in verdicts]
    is_graded = any(0 < reward < 1 for verdict in verdicts if verdict for reward in verdict.rewards.tolist())
    return tuple(means) if is_graded and len(verdicts) <= MAX_OUTCOMES else ()


def _digest(tasks: Sequence[Task], scored: Verdict) -> str:
    """Digest of the problems, of the verifier of a scored one, and of the number of tries: 16 hex characters."""
    shown = [(task.env, [(each.role, each.content) for each in task.messages], task.drawn) for task in tasks]
    return hashlib.sha256(repr((shown, scored.verifier, len(scored.outcomes))).encode()).hexdigest()[:16]


def _num_right(verdict: Verdict) -> int:
    return sum(outcome.is_success for outcome in verdict.outcomes)


def _to_show(
    step: int, tasks: Sequence[Task], tries: Sequence[Sequence[Actions]], verdicts: Sequence[Verdict | None]
) -> list[ShownEpisode]:
    """Episodes to show: the first try at each of the first NUM_SHOWN problems, if it was scored."""
    return [
        ShownEpisode(
            step=step,
            env=task.env,
            task_id=task.task_id,
            opening=task.messages,
            actions=of_task[0],
            outcome=verdict.outcomes[0],
            reference=verdict.reference,
            num_tries=len(of_task),
            num_right=_num_right(verdict),
        )
        for task, of_task, verdict in list(zip(tasks, tries, verdicts, strict=True))[:NUM_SHOWN]
        if verdict is not None
    ]
