"""Every loop of a node, in one place: who waits for whom, what is retried, and how it all ends.

Agent side: announce, find neighbours, follow each of them, heartbeat, repair, tidy up.
Worker side: generate, learn, evaluate. The learner waits only for its own groups; the generator waits
only for admission capacity; nobody waits for the network.

Invariant: every task belongs to a TaskGroup, and this file holds the only broad `except`: at a task's
boundary, where the failure is logged with its traceback, counted and reported as an event.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Generator as PythonGenerator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.errors import NotHeld, RolloutFailed, TooLarge, Unauthenticated, Unavailable
from swarm.exchange.agent import Agent
from swarm.exchange.overlay import choose_neighbours
from swarm.exchange.peers import keep_newest
from swarm.interfaces import (
    CoordinatorClient,
    Discovery,
    Generator,
    Learner,
    LocalExchange,
    Offload,
    PeerAddress,
    PeerClient,
    StreamItem,
    TextCodec,
    Transport,
)
from swarm.types import Cursor, Draw, Evaluation, NodeId, Role, RolloutGroup, SealedGroup, Task, short

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0
TIDY_EVERY_S = 30.0
KEPT_SHARE = 0.9  # of the store's budget after tidying: a full store takes groups again
FETCH_TIMEOUT_S = 30.0


class Backoff:
    """Exponential waits with full jitter, from `first_s` to `longest_s`."""

    def __init__(self, rng: random.Random, first_s: float = FIRST_RETRY_S, longest_s: float = LONGEST_RETRY_S) -> None:
        self._rng = rng
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def reset(self) -> None:
        """After a success: the next wait is the first again."""
        self._next_s = self._first_s

    async def wait(self) -> None:
        """Sleeps, and doubles the next wait."""
        await asyncio.sleep(self._rng.uniform(0.5, 1.0) * self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)


async def supervise(name: str, loop: Callable[[], Awaitable[None]], agent: Agent, rng: random.Random) -> None:
    """Runs a loop until it returns; a failure is logged, counted, reported, and the loop begins again."""
    backoff = Backoff(rng)
    while True:
        try:
            await loop()
            return
        except Unavailable as error:
            logger.info("loop interrupted", extra={"loop": name, "error": str(error)})
        except Exception as error:
            logger.exception("loop failed", extra={"loop": name})
            agent.record_failure(name, error)
        await backoff.wait()


# --- agent side --------------------------------------------------------------------------------------


async def run_agent(
    agent: Agent,
    transport: Transport,
    directory: Discovery | None,
    coordinator: CoordinatorClient | None,
    rng: random.Random,
) -> None:
    """Runs every loop of the agent until cancelled."""
    async with asyncio.TaskGroup() as tasks:

        def start(name: str, loop: Callable[[], Awaitable[None]]) -> None:
            tasks.create_task(supervise(name, loop, agent, rng), name=name)

        if directory is not None:
            start("announce", lambda: announce_loop(agent, directory, rng))
            start("neighbours", lambda: neighbours_loop(agent, transport, directory, rng))
            start("repair", lambda: repair_loop(agent, directory, rng))
        if coordinator is not None:
            start("heartbeat", lambda: heartbeat_loop(agent, coordinator))
        start("tidy", lambda: tidy_loop(agent))


async def announce_loop(agent: Agent, directory: Discovery, rng: random.Random) -> None:
    """Keeps our advert in the directory."""
    while True:
        await directory.announce(agent.advert())
        await asyncio.sleep(agent.config.exchange.advert_every_s * rng.uniform(0.8, 1.0))


async def repair_loop(agent: Agent, directory: Discovery, rng: random.Random) -> None:
    """Keeps the directory connected: probe, rejoin, remember peers."""
    while True:
        await asyncio.sleep(agent.config.directory.rejoin_every_s * rng.uniform(0.8, 1.2))
        await directory.maintain()


async def tidy_loop(agent: Agent) -> None:
    """Keeps the store within its budget."""
    while True:
        await asyncio.sleep(TIDY_EVERY_S)
        await agent.tidy(int(KEPT_SHARE * agent.config.exchange.store_bytes))


async def heartbeat_loop(agent: Agent, coordinator: CoordinatorClient) -> None:
    """Reports figures, takes advice, and hands in the versions that the ledger does not have yet."""
    tokens, at_s = agent.counters.tokens_generated, agent.clock.monotonic_s()
    while True:
        now_s = agent.clock.monotonic_s()
        rate = (agent.counters.tokens_generated - tokens) / max(now_s - at_s, 1e-9)
        tokens, at_s = agent.counters.tokens_generated, now_s
        agent.coordination.take_advice(await coordinator.heartbeat(agent.node_report(rate)))
        await hand_in_versions(agent, coordinator)
        await asyncio.sleep(agent.config.coordinator.heartbeat_s)


async def hand_in_versions(agent: Agent, coordinator: CoordinatorClient) -> None:
    """Gives the ledger what it lacks, oldest first; what is left when this fails is handed in later."""
    pending = agent.coordination.pending_versions
    while pending:
        await coordinator.record_version(pending[0])
        del pending[0]


async def neighbours_loop(agent: Agent, transport: Transport, directory: Discovery, rng: random.Random) -> None:
    """Looks at the directory and follows a few peers; one that moved, vanished or misbehaved is let go."""
    cursors: dict[NodeId, Cursor] = {}
    followed: dict[tuple[PeerAddress, bool], asyncio.Task[None]] = {}  # (peer, with notices of others' groups)
    limit = agent.config.exchange.max_neighbours
    async with asyncio.TaskGroup() as tasks:
        while True:
            try:
                adverts = await directory.lookup()
            except Unavailable as error:
                logger.info("directory lookup failed", extra={"error": str(error)})
            else:
                agent.peers.hear(adverts)
                welcome = [advert for advert in adverts if agent.is_welcome(advert.node_id)]
                chosen = choose_neighbours(agent.node_id, welcome, limit)
                relay = len(adverts) - 1 > limit
                wanted = {(PeerAddress(node_id=a.node_id, endpoint=a.endpoints[0]), relay) for a in chosen}
                for gone in [key for key in followed if key not in wanted]:
                    followed.pop(gone).cancel()
                for address, relayed in sorted(wanted - followed.keys(), key=lambda key: key[0].node_id):
                    follow = Follow(agent, transport, address, relayed, cursors, rng)
                    followed[address, relayed] = tasks.create_task(
                        supervise(f"follow {short(address.node_id)}", follow.run, agent, rng)
                    )
            await asyncio.sleep(agent.config.exchange.lookup_every_s * rng.uniform(0.8, 1.2))


class Follow:
    """One neighbour: connect, subscribe where we left off, pass everything through the door."""

    def __init__(
        self,
        agent: Agent,
        transport: Transport,
        address: PeerAddress,
        relay: bool,
        cursors: dict[NodeId, Cursor],
        rng: random.Random,
    ) -> None:
        self._agent = agent
        self._transport = transport
        self._address = address
        self._relay = relay
        self._cursors = cursors
        self._backoff = Backoff(rng)

    async def run(self) -> None:
        """Follows until cancelled; a broken stream is opened again after a wait."""
        while True:
            try:
                await self._session()
            except Unauthenticated as error:
                logger.warning(
                    "peer not authenticated", extra={"peer": short(self._address.node_id), "error": str(error)}
                )
            except Unavailable as error:
                logger.debug("peer unavailable", extra={"peer": short(self._address.node_id), "error": str(error)})
            await self._backoff.wait()

    async def _session(self) -> None:
        peer = self._address.node_id
        self._agent.require_welcome(peer)
        client = await self._transport.connect(self._address, self._agent.config.exchange.dial_timeout_s)
        try:
            await self._agent.set_connected(peer, True)
            async for item in client.subscribe(self._cursors.get(peer, Cursor()), self._relay):
                sealed = await self._content(client, item)
                if sealed is not None:
                    await self._agent.receive(sealed, via=peer)
                    self._agent.require_welcome(peer)
                keep_newest(self._cursors, peer, item.cursor)
                self._backoff.reset()
        finally:
            await self._agent.set_connected(peer, False)
            await client.close()

    async def _content(self, client: PeerClient, item: StreamItem) -> SealedGroup | None:
        latency_ms = self._agent.config.faults.latency_ms
        if latency_ms:
            await asyncio.sleep(latency_ms / 1000)
        if item.sealed is not None:
            return item.sealed if self._agent.takes_from(self._address.node_id) else None
        limit = self._agent.config.exchange.max_group_bytes
        fetching = self._agent.fetching
        if item.size_bytes > limit or item.digest in fetching or await self._agent.store.contains(item.digest):
            return None
        if not self._agent.takes_from(self._address.node_id):
            return None
        fetching.add(item.digest)
        try:
            return await client.fetch(item.digest, limit, FETCH_TIMEOUT_S)
        except (NotHeld, TooLarge) as error:
            logger.debug("notice not followed", extra={"peer": short(self._address.node_id), "error": str(error)})
            return None
        finally:
            fetching.discard(item.digest)


# --- worker side ------------------------------------------------------------------------------------


class Overlap:
    """How many seconds were spent generating, learning, and both at once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._active: set[str] = set()
        self._since_s = clock.monotonic_s()
        self.seconds = {"generate": 0.0, "learn": 0.0, "both": 0.0}

    @contextmanager
    def doing(self, what: str) -> PythonGenerator[None]:
        """Counts the time inside as `what` ("generate" or "learn")."""
        self._account()
        self._active.add(what)
        try:
            yield
        finally:
            self._account()
            self._active.discard(what)

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        self._account()
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken

    def _account(self) -> None:
        now_s = self._clock.monotonic_s()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        for what in self._active:
            self.seconds[what] += elapsed_s
        if len(self._active) == 2:
            self.seconds["both"] += elapsed_s


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
