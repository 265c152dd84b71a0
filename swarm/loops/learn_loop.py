"""Learning loop of a worker: generate, learn, publish, evaluate, driven through a `LocalExchange`.

Invariant: the learner waits only for groups to learn from, the generator only for admission capacity.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial

from swarm.activity import WAITING
from swarm.errors import RolloutFailed
from swarm.interfaces import Learner
from swarm.loops.evaluate import evaluate_version
from swarm.loops.generate_loop import generate_loop, make_groups, slow_down
from swarm.loops.update_weights import FollowWeightsLoop
from swarm.loops.warm_up import warm_up
from swarm.loops.worker import Worker
from swarm.types import Draw, Role

logger = logging.getLogger(__name__)

SAVE_RETRY_S = 30.0  # after a checkpoint that the disk did not take


async def run_worker(worker: Worker) -> None:
    """Runs generation and learning until `learner.num_steps` are made (0: without end), or until cancelled.

    Nothing is generated before a warm-up is over.
    """
    if worker.learner is not None:
        await warm_up(worker, worker.learner, partial(_save, worker, worker.learner))
    if worker.learner is not None and worker.config.learner.deterministic:
        await learn_loop(worker, worker.learner)
        return
    async with asyncio.TaskGroup() as tasks:
        beside: list[asyncio.Task[None]] = []
        if worker.applier is not None:
            follow = FollowWeightsLoop(worker, worker.applier)
            beside.append(tasks.create_task(follow.run(), name="follow"))
        elif Role.GENERATOR in worker.config.roles and worker.config.environments:
            beside.append(tasks.create_task(generate_loop(worker), name="generate"))
        if worker.serve_runs is not None:
            beside.append(tasks.create_task(worker.serve_runs(), name="runs of agents"))
        if worker.learner is not None:
            await learn_loop(worker, worker.learner)
            for task in beside:
                task.cancel()


async def learn_loop(worker: Worker, learner: Learner) -> None:
    """Draws, steps, publishes and evaluates in turn; resumes after the last checkpoint by replaying the journal.

    With `learner.deterministic` the loop also generates, strictly in turn, and no other loop does. A cancellation while
    `worker.saves_when_stopped` waits for the step under way, and saves unsaved steps if `disk.checkpoint_at_end`.
    """
    worker.saved_step = learner.version.step
    try:
        await _learn(worker, learner)
    except asyncio.CancelledError:
        saves = worker.saves_when_stopped and worker.config.disk.checkpoint_at_end
        if saves and learner.version.step > worker.saved_step:
            await _save(worker, learner)
        raise


async def _learn(worker: Worker, learner: Learner) -> None:
    journalled = await worker.exchange.redraw(learner.next_draw)  # before a version is published: it may refuse
    if not journalled:  # else a node that dies again and again would make the same steps for ever
        worker.may_save_at_s = worker.clock.monotonic_s() + worker.checkpoint_pause_s
    await _publish(worker, learner)
    if learner.version.step == 0:
        await evaluate_version(worker, learner)
    for draw in journalled:
        if _is_done(worker, learner):
            break
        draw = await _without_fatal_groups(worker, learner, draw)
        if draw.groups:
            await _learn_from(worker, learner, draw, draw_seconds=0.0)
    while not _is_done(worker, learner):
        if worker.config.learner.deterministic:
            await _generate_until_drawn(worker, learner)
        began_s = worker.clock.monotonic_s()
        worker.on_progress(f"{WAITING} groups")
        draw = await worker.exchange.draw(learner.version)
        await _learn_from(worker, learner, draw, draw_seconds=worker.clock.monotonic_s() - began_s)
    while worker.save_again_at_s < math.inf:
        await asyncio.sleep(SAVE_RETRY_S)
        await _save(worker, learner)


async def _without_fatal_groups(worker: Worker, learner: Learner, draw: Draw) -> Draw:
    """A journalled draw without the groups that end the process alone.

    After two deaths in this step each group is tried first; the agent notes it, so that a third death names the group.
    """
    attempt = await worker.exchange.begin_again(draw.step)
    while attempt.trial is not None:
        alone = tuple(drawn for drawn in draw.groups if drawn.scored.digest == attempt.trial)
        await worker.offload(learner.dry_run, await _with_baselines(worker, replace(draw, groups=alone)))
        attempt = await worker.exchange.begin_again(draw.step, attempt.trial)
    return replace(draw, groups=tuple(d for d in draw.groups if d.scored.digest not in attempt.left_out))


async def _generate_until_drawn(worker: Worker, learner: Learner) -> None:
    """Generates groups until the draw is made, which may use up groups without signal and wait for more."""
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
    """Generates the groups of one draw.

    After a kill in the middle all groups are made again, so that each has the same batch (another batch means other low
    bits), and groups that were stored before are not handed over again.
    """
    count, number = worker.config.replay.local_groups, await worker.exchange.num_asked()
    await make_groups(worker, number - number % count, count, num_stored=number % count)


async def _publish(worker: Worker, learner: Learner) -> None:
    """Publishes the newest version, with patches for followers; without patches if the disk has no room for them."""
    version, weights = learner.snapshot()
    manifests: list[bytes] = []
    if worker.encode is not None:
        worker.on_progress("publishing")
        try:
            manifests = await worker.offload(worker.encode, version, weights)
        except OSError as error:  # StorageFull is one
            logger.error("a version could not be stored for those who follow", extra={"error": str(error)})
    await worker.exchange.publish(version, manifests)


async def _learn_from(worker: Worker, learner: Learner, draw: Draw, draw_seconds: float) -> None:
    """Makes one step, then the evaluation and the checkpoint that are due.

    The evaluation comes before the checkpoint: a step that a restart does not make again has been evaluated.
    """
    before = learner.version.step
    await _to_its_end(worker, _step(worker, learner, draw, draw_seconds))
    step, every = learner.version.step, worker.config.evaluation.every_steps
    if step == before:
        return  # skipped
    if _is_done(worker, learner) or (every and step % every == 0):
        await evaluate_version(worker, learner)
    if _is_save_due(worker, learner):
        await _save(worker, learner)


def _is_save_due(worker: Worker, learner: Learner) -> bool:
    every, now_s = worker.config.learner.checkpoint_every, worker.clock.monotonic_s()
    is_end = worker.config.disk.checkpoint_at_end and _is_done(worker, learner)
    if is_end or now_s >= worker.save_again_at_s:
        return True
    is_its_step = bool(every) and learner.version.step % every == 0
    return is_its_step and now_s >= worker.may_save_at_s


async def _to_its_end(worker: Worker, work: Coroutine[object, object, None]) -> None:
    """Awaits work; where `worker.saves_when_stopped`, a cancellation is raised only after the work has ended."""
    if not worker.saves_when_stopped:
        return await work
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is not None:
            logger.error("the last step or checkpoint failed", exc_info=task.exception())
        raise


async def _save(worker: Worker, learner: Learner) -> None:
    """Writes a checkpoint. A stop waits for it: a second save of the same step would remove the draft of its folder."""
    await _to_its_end(worker, _write_checkpoint(worker, learner))


async def _write_checkpoint(worker: Worker, learner: Learner) -> None:
    """Writes and reports a checkpoint. One that the disk refuses is written later: until then a restart begins at the
    checkpoint before, whose draws the agent keeps.
    """
    error = ""
    worker.on_progress("saving")
    try:
        await worker.offload(learner.save)
    except OSError as refused:
        error = str(refused)
        message = "a checkpoint was not saved: make room on the disk; the node goes on, and the one before is kept"
        logger.error(message, extra={"step": learner.version.step, "error": error})
    else:
        worker.saved_step = learner.version.step
        worker.may_save_at_s = worker.clock.monotonic_s() + worker.checkpoint_pause_s
    worker.save_again_at_s = worker.clock.monotonic_s() + SAVE_RETRY_S if error else math.inf
    await worker.exchange.report_checkpoint(learner.next_draw, error)


async def _step(worker: Worker, learner: Learner, draw: Draw, draw_seconds: float) -> None:
    began_s = worker.clock.monotonic_s()
    with worker.overlap.doing("learn"):
        draw = await _with_baselines(worker, draw)
        report = await worker.offload(learner.step, draw)
        await slow_down(worker, began_s)
    published_s = worker.clock.monotonic_s()
    await _publish(worker, learner)
    published_s = worker.clock.monotonic_s() - published_s
    if worker.serve_runs is not None:  # callers get the newest policy, also where no batch of our own takes it
        await worker.offload(partial(worker.generator.load, *learner.snapshot(), in_flight=True))
    seconds = {**report.seconds, "publish": published_s, "draw_wait": draw_seconds, **worker.overlap.take()}
    await worker.exchange.report_step(replace(report, seconds=seconds))


async def _with_baselines(worker: Worker, draw: Draw) -> Draw:
    """The draw with the reward of a greedy answer to each prompt, or the group's mean if it cannot be scored."""
    if worker.greedy is None:
        return draw
    rewards: list[float] = []
    for drawn, actions in zip(draw.groups, await worker.offload(worker.greedy, draw), strict=True):
        group = drawn.scored.group
        try:
            rewards.append(float((await worker.exchange.verify(group.env, group.task_id, [actions])).rewards[0]))
        except RolloutFailed as error:
            logger.warning("a greedy answer could not be scored", extra={"error": str(error)})
            rewards.append(float(drawn.scored.rewards.mean()))
    return replace(draw, baselines=tuple(rewards))
