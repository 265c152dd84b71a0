"""What trains and generates on a node: generate, learn, evaluate, driven through a `LocalExchange`.

Invariant: the learner waits only for groups to learn from, the generator only for admission capacity.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.errors import RolloutFailed
from swarm.interfaces import Generator, Learner, LocalExchange, Offload, TextCodec
from swarm.loops.overlap import Overlap
from swarm.types import Draw, Evaluation, Role, RolloutGroup, Task

logger = logging.getLogger(__name__)

Produce = Callable[[int, int], list[RolloutGroup]]  # blocking; number of the first question, how many
Ask = Callable[[int, int], Awaitable[list[RolloutGroup]]]  # the same, choosing the questions
Evaluate = Callable[[Sequence[Task]], list[str]]  # blocking; greedy answers of the newest version
Greedy = Callable[[Draw], list[str]]  # blocking; greedy answers of the newest version to each group's prompt


@dataclass(kw_only=True)
class Worker:
    """What trains and generates on a node, behind protocols."""

    config: NodeConfig
    exchange: LocalExchange
    generator: Generator
    produce: Produce
    evaluate: Evaluate
    learner: Learner | None
    codec: TextCodec
    evaluation_tasks: dict[tuple[str, str], Sequence[Task]]  # (environment, split) -> tasks
    clock: Clock
    offload: Offload
    ask: Ask | None = None  # in place of `produce` where the recipe chooses its questions
    greedy: Greedy | None = None  # where the recipe compares with a greedy answer
    overlap: Overlap = field(init=False)

    def __post_init__(self) -> None:
        self.overlap = Overlap(self.clock)


async def run_worker(worker: Worker) -> None:
    """Runs generation and learning until `learner.num_steps` are made, or until cancelled."""
    if worker.learner is not None and worker.config.learner.deterministic:
        await learn_loop(worker, worker.learner)
        return
    async with asyncio.TaskGroup() as tasks:
        generates = Role.GENERATOR in worker.config.roles
        generating = tasks.create_task(generate_loop(worker), name="generate") if generates else None
        if worker.learner is not None:
            await learn_loop(worker, worker.learner)
            if generating is not None:
                generating.cancel()


async def generate_loop(worker: Worker) -> None:
    """Generates whenever admission capacity allows, always with the newest weights."""
    while True:
        capacity = await worker.exchange.wait_capacity()
        count = min(capacity, worker.config.generator.groups_per_batch)
        await _generate(worker, await worker.exchange.num_asked(), count)


async def learn_loop(worker: Worker, learner: Learner) -> None:
    """Draw, step, publish, evaluate; resumes after the last checkpoint by replaying the journal.

    With `learner.deterministic` it also generates, strictly in turn, and no other loop does.
    """
    await worker.exchange.publish(learner.version)
    if learner.version.step == 0:
        await _evaluate(worker, learner)
    for draw in await worker.exchange.redraw(learner.next_draw):
        if _is_done(worker, learner):
            break
        await _learn_from(worker, learner, draw, draw_seconds=0.0)
    while not _is_done(worker, learner):
        if worker.config.learner.deterministic:
            await _generate_until_drawn(worker, learner)
        began_s = worker.clock.monotonic_s()
        draw = await worker.exchange.draw(learner.version)
        await _learn_from(worker, learner, draw, draw_seconds=worker.clock.monotonic_s() - began_s)
    await worker.offload(learner.save)


async def _generate_until_drawn(worker: Worker, learner: Learner) -> None:
    """Generates what is missing; again when a draw used up groups without signal and waits for more."""
    drawing = asyncio.ensure_future(worker.exchange.draw(learner.version))
    try:
        while True:
            room = asyncio.ensure_future(worker.exchange.wait_capacity())
            try:
                await asyncio.wait({drawing, room}, return_when=asyncio.FIRST_COMPLETED)
                if drawing.done():
                    return
                room.result()
                await _generate_round(worker)
            finally:
                room.cancel()
    finally:
        drawing.cancel()


def _is_done(worker: Worker, learner: Learner) -> bool:
    num_steps = worker.config.learner.num_steps
    return num_steps > 0 and learner.version.step >= num_steps


async def _generate_round(worker: Worker) -> None:
    """The groups of one draw. After a kill in the middle all are made again, so that each has the batch it had
    (another batch means other low bits), and those that are stored already are left out."""
    count, number = worker.config.replay.local_groups, await worker.exchange.num_asked()
    await _generate(worker, number - number % count, count, num_stored=number % count)


async def _generate(worker: Worker, first: int, count: int, num_stored: int = 0) -> None:
    """Asks `count` questions from number `first` on and hands over all but the first `num_stored` groups."""
    learner, began_s = worker.learner, worker.clock.monotonic_s()
    with worker.overlap.doing("generate"):
        if learner is not None and learner.version != worker.generator.version:
            version, weights = learner.snapshot()
            await worker.offload(worker.generator.load, version, weights)
        if worker.ask is None:
            groups = await worker.offload(worker.produce, first, count)
        else:
            groups = await worker.ask(first, count)
        await _slow_down(worker, began_s)
    for group in groups[num_stored:]:
        await worker.exchange.put(group)


async def _learn_from(worker: Worker, learner: Learner, draw: Draw, draw_seconds: float) -> None:
    """One step with what is due after it. The evaluation comes before the checkpoint: a step that a restart
    does not make again has been evaluated."""
    before = learner.version.step
    await _step(worker, learner, draw, draw_seconds)
    step, every = learner.version.step, worker.config.evaluation.every_steps
    if step == before:
        return  # skipped
    if _is_done(worker, learner) or (every and step % every == 0):
        await _evaluate(worker, learner)
    checkpoint_every = worker.config.learner.checkpoint_every
    if checkpoint_every and step % checkpoint_every == 0:
        await worker.offload(learner.save)


async def _step(worker: Worker, learner: Learner, draw: Draw, draw_seconds: float) -> None:
    began_s = worker.clock.monotonic_s()
    with worker.overlap.doing("learn"):
        draw = await _with_baselines(worker, draw)
        report = await worker.offload(learner.step, draw)
        await _slow_down(worker, began_s)
    seconds = {**report.seconds, "draw_wait": draw_seconds, **worker.overlap.take()}
    await worker.exchange.publish(report.version)
    await worker.exchange.report(replace(report, seconds=seconds))


async def _with_baselines(worker: Worker, draw: Draw) -> Draw:
    """The draw with the reward of a greedy answer to each prompt, or the group's mean where it cannot be scored."""
    if worker.greedy is None:
        return draw
    rewards: list[float] = []
    for drawn, answer in zip(draw.groups, await worker.offload(worker.greedy, draw), strict=True):
        group = drawn.scored.group
        try:
            rewards.append(float((await worker.exchange.score(group.env, group.task_id, [answer])).rewards[0]))
        except RolloutFailed as error:
            logger.warning("a greedy answer could not be scored", extra={"error": str(error)})
            rewards.append(float(drawn.scored.rewards.mean()))
    return replace(draw, baselines=tuple(rewards))


async def _evaluate(worker: Worker, learner: Learner) -> None:
    """Greedy accuracy on each environment and split, scored by the sandboxed verifier."""
    evaluations: list[Evaluation] = []
    for (env, split), tasks in worker.evaluation_tasks.items():
        answers = await worker.offload(worker.evaluate, tasks)
        num_right, references = 0.0, list[str]()
        for task, answer in zip(tasks, answers, strict=True):
            try:
                verdict = await worker.exchange.score(env, task.task_id, [answer])
            except RolloutFailed as error:
                logger.warning("an answer could not be scored and counts as wrong", extra={"error": str(error)})
                continue
            num_right += float(verdict.rewards[0] >= 1.0)
            references.append(verdict.reference)
        commonest = max((references.count(reference) for reference in set(references)), default=0)
        evaluations.append(
            Evaluation(
                step=learner.version.step,
                env=env,
                split=split,
                accuracy=num_right / max(len(tasks), 1),
                num_problems=len(tasks),
                majority_baseline=commonest / max(len(tasks), 1),
                at_s=worker.clock.now_s(),
            )
        )
    await worker.exchange.evaluated(evaluations)


async def _slow_down(worker: Worker, began_s: float) -> None:
    extra = worker.config.faults.slow_factor - 1.0
    if extra > 0:
        await asyncio.sleep(extra * (worker.clock.monotonic_s() - began_s))
