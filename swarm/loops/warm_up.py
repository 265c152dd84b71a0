"""Supervised warm-up: a few updates toward given answers before step 1, where the model's own answers teach nothing.

Invariant: no held-out question is shown, and the updates end as soon as rewards differ in half of the groups that are
tried, or most answers are right: reinforcement learning needs variance, not certainty. The result is version 0 and is
saved as such; a warm-up that was interrupted begins again with the model's own weights.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Final

from swarm.errors import ConfigError, NonFiniteStep, RolloutFailed
from swarm.interfaces import Learner
from swarm.loops.evaluate import evaluate_tasks
from swarm.loops.worker import Pair, WarmUp, Worker
from swarm.types import Task, WarmUpReport

logger = logging.getLogger(__name__)

WARMING_UP: Final = "warming up"
ANSWERS_PER_STEP: Final = 16
ENOUGH_SIGNAL: Final = 0.5  # share of the tried groups with rewards that differ
MOSTLY_RIGHT: Final = 0.9  # mean reward of the tried groups, from which on there is less and less variance
TRY_EVERY: Final = 5  # updates at most: a model that knows the form may go from no signal to certainty in fewer
NUM_TRIED: Final = 16  # groups
# Times learner.learning_rate: a right answer says where to go, and there are some tens of updates, not hundreds.
# Measured (docs/training.md): with the rate itself no group had signal after 32 updates, with 10 times 7 of 16 had.
RATE_FACTOR: Final = 10.0
NOTE: Final = "warm_up"  # key of the report in the notes of a checkpoint


async def warm_up(worker: Worker, learner: Learner, save: Callable[[], Awaitable[None]]) -> None:
    """Warms up a learner at step 0, or reports a warm-up that was made before.

    Raises:
        ConfigError: no given answer earns any reward, or the checkpoints are lost.
    """
    part = worker.warm_up
    if part is None or learner.version.step > 0:
        return
    if NOTE not in part.notes:
        await worker.exchange.redraw(learner.next_draw)  # it refuses where checkpoints are lost
        report = await _imitate(worker, part)
        part.notes[NOTE] = asdict(report)
        if report.num_steps:
            await worker.offload(part.begin_anew)
            await save()
    await worker.exchange.report_warm_up(WarmUpReport(**part.notes[NOTE]))


async def _imitate(worker: Worker, part: WarmUp) -> WarmUpReport:
    rate = RATE_FACTOR * worker.config.learner.learning_rate
    most, shown, losses = worker.config.warm_up.num_steps, set[Pair](), list[float]()
    held_out = [env for env, split in worker.evaluation_tasks if split == "held_out"]
    before = [(await evaluate_tasks(worker, 0, env, "held_out"))[0] for env in held_out]
    signal, level = await _signal(worker, part)
    signal_before, next_try = signal, 1
    while len(losses) < most and signal < ENOUGH_SIGNAL * len(part.tasks) and level < MOSTLY_RIGHT:
        pairs = await _right_pairs(worker, part, len(losses) * ANSWERS_PER_STEP)
        if not pairs and losses:
            break
        if not pairs:
            raise ConfigError(
                f"warm_up.answers = {worker.config.warm_up.answers!r}: of the first {ANSWERS_PER_STEP} answers each is "
                f"missing, longer than generator.max_new_tokens = {worker.config.generator.max_new_tokens}, or worth "
                "0; name a .jsonl file with answers that the reward accepts (--warm-up FILE)"
            )
        try:
            seen = f"rewards differ in {signal} of {len(part.tasks)} tried groups, their mean is {level:.2f}"
            activity = f"{WARMING_UP} ({len(losses) + 1} of {most} updates at most; {seen}), part"
            losses.append(await worker.offload(part.imitate, pairs, rate, activity))
        except NonFiniteStep as error:
            logger.warning("the warm-up ends here", extra={"updates": len(losses), "error": str(error)})
            break
        shown.update(pairs)
        if len(losses) in (next_try, most):
            signal, level = await _signal(worker, part)
            next_try += min(TRY_EVERY, max(1, next_try // 2))
    return WarmUpReport(
        num_steps=len(losses),
        num_answers=len(shown),
        first_loss=losses[0] if losses else 0.0,
        last_loss=losses[-1] if losses else 0.0,
        num_groups=len(part.tasks),
        signal_before=signal_before,
        signal_after=signal,
        accuracy={each.env: each.accuracy for each in before if each is not None},
    )


async def _right_pairs(worker: Worker, part: WarmUp, first: int) -> list[Pair]:
    """The next pairs, those whose answers earn nothing left out."""
    pairs = await worker.offload(part.pairs, first, ANSWERS_PER_STEP)
    if not part.are_scored:
        return list(pairs)
    worth = [await _worth(worker, task, [(answer,)]) for task, answer in pairs]
    return [pair for pair, rewards in zip(pairs, worth, strict=True) if max(rewards, default=0.0) > 0]


async def _signal(worker: Worker, part: WarmUp) -> tuple[int, float]:
    """Number of tried tasks whose answers get different rewards, and the mean reward of all."""
    tries = await worker.offload(part.tries, part.tasks)
    worth = [await _worth(worker, task, of_task) for task, of_task in zip(part.tasks, tries, strict=True)]
    every = [reward for rewards in worth for reward in rewards]
    return sum(len(set(rewards)) > 1 for rewards in worth), sum(every) / max(1, len(every))


async def _worth(worker: Worker, task: Task, episodes: Sequence[tuple[str, ...]]) -> list[float]:
    """Rewards of the episodes; [] if they could not be scored."""
    try:
        return (await worker.exchange.verify(task.env, task.task_id, episodes)).rewards.tolist()
    except RolloutFailed as error:
        logger.warning("answers of the warm-up could not be scored", extra={"env": task.env, "error": str(error)})
        return []
