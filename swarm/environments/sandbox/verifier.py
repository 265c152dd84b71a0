"""Sandboxed verifier: scores answers in confined processes, so that no answer can run code on the node.

Invariant: own answers and those of peers never share a process, nor wait for one another. If a peer's answer breaks its
process or takes too long, the time to replace the process counts against its producer. Slow answers of peers are scored
in a separate process.
"""

import asyncio
import json
import logging
import math
import os
import secrets
import signal
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.replay import MAX_EPISODES
from swarm.environments.sandbox.child import LEAST_SHARE_S
from swarm.environments.sandbox.scoring_process import (
    PROCESS_CPU_S,
    ScoringProcess,
    ScoringProcesses,
    SpareProcesses,
    read_reply,
)
from swarm.environments.sandbox.scoring_turns import Lane, ScoringTurns
from swarm.environments.sandbox.time_accounts import Allowance, TimeAccounts
from swarm.episode import Actions, EpisodeOutcome, Message, outcome_from_json
from swarm.errors import ConfigError, OverBudget, RolloutFailed, TooLarge
from swarm.flow import BoundedTable
from swarm.interfaces import Producer, Verdict
from swarm.trust_policy import FIRST_TRY_S, PROBE_S
from swarm.types import Task

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES: Final = 16 * 2**20
# CPU seconds of a minute that reading and replaying the groups of one party may take: a quarter of a core. Groups
# beyond that are refused, and not charged.
REPLAY_S_PER_MINUTE: Final = 15.0
# Share of a request's CPU bound that a first try may take (8 ms for 8 answers of 50 ms). Honest answers take 0.1 ms to
# a few ms; a request that exceeds its first try is scored again, among the slow ones.
FIRST_SHARE: Final = 0.02
FIRST_MOST_S: Final = 0.1  # bound of a first try, whatever an environment declares for an action
FIRST_TIMEOUT_SHARE: Final = 0.2  # of timeout_s
MOST_PLAYING: Final = 16  # processes of own episodes, where steps take longer than SLOW_STEP_S
PROGRAM_PACE: Final = 20.0  # wall-clock seconds for a CPU second of programs: they have the lowest priority of all
SLOW_STEP_S: Final = 0.02
SLOW_NICE: Final = 5  # of the process of slow answers: a third of the CPU where others want it, too


class TookLong(RolloutFailed):
    """A first try at scoring answers exceeded its share of the time."""


class TaskFailed(RolloutFailed):
    """The task cannot be built on this node, whatever the answers are."""


class SandboxVerifier:
    """An `interfaces.Verifier` over confined, long-lived processes, started when first needed.

    One process scores the answers of this node, others play its episodes, and others score the answers of peers in the
    order of `ScoringTurns`, one of them the answers that exceeded a first try. A process is replaced once it has used
    PROCESS_CPU_S of CPU, and killed when one answer takes more CPU time than its environment allows, or a request takes
    more time than `limits.timeout_s`, plus the time of programs.
    """

    def __init__(self, configs: tuple[EnvironmentConfig, ...], limits: SandboxConfig) -> None:
        """Takes the environments that may be scored; all are built before the first answer is scored."""
        self._names = frozenset(config.name for config in configs)
        self._limits = limits
        self._processes = ScoringProcesses(configs, limits)
        self.shapes = self._processes.shapes  # of every environment, once the first process started
        self._own_turn = asyncio.Lock()
        self._own: list[ScoringProcess] = []  # at most one; empty while it is busy
        self._turns = ScoringTurns(lambda: asyncio.get_running_loop().time())
        # by party; admission charges the time of reading texts to them, too
        self.accounts = TimeAccounts(lambda: asyncio.get_running_loop().time(), REPLAY_S_PER_MINUTE)
        self._external: list[ScoringProcess] = []  # those that wait for a request
        self._slow: list[ScoringProcess] = []  # at most one; empty while it is busy
        self._playing: list[ScoringProcess] = []  # those of own episodes that wait for a request
        self._play_places = asyncio.Semaphore(1)  # more once a step took long
        self._plays_side_by_side = False
        # the process that keeps an episode, by environment, task and actions
        self._holders = BoundedTable[tuple[str, int, Actions], ScoringProcess](MAX_EPISODES)
        self._spares = SpareProcesses(self._processes)  # in place of those that a first try costs
        self._is_closed = False
        self.num_started = 0  # scoring processes
        self.num_replaced = 0  # processes started in place of an ended one
        self.own_s = 0.0  # time spent on scoring own answers, one group at a time

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        """Rebuilds the task and replays each episode, as `swarm.interfaces.Verifier.verify`.

        Raises:
            LookupError, RolloutFailed: as `Verifier.verify`; LookupError also if a peer's task cannot be built.
            TooLarge: the request exceeds MAX_REQUEST_BYTES; nothing was sent.
            OverBudget: the groups of the producer's account have taken all the time that they may for now.
            ConfigError: the environments cannot be built.
        """
        if producer is None:  # each is played: the owner wants to know if equal answers get different rewards
            async with self._own_turn:
                began_s = time.monotonic()
                reply = await self._ask_one_of(self._own, self._request(env, task_id, episodes))
                self.own_s += time.monotonic() - began_s
        else:
            distinct = list(dict.fromkeys(episodes))  # a model that is sure of its answer gives few
            reply = await self._score_external(self._request(env, task_id, distinct), producer)
            if isinstance(reply, TaskFailed):  # not the producer's fault, as with a task that does not exist
                raise LookupError(str(reply))
            if isinstance(reply, Verdict) and len(distinct) < len(episodes):
                outcome_of = dict(zip(distinct, reply.outcomes, strict=True))
                reply = replace(reply, outcomes=tuple([outcome_of[actions] for actions in episodes]))
        if isinstance(reply, Verdict):
            return reply
        raise reply

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        """Outcome so far of an episode of this node, given all its actions, the newest last. Raises as `verify`.

        A process keeps the episodes that it played, so that a new action costs one step instead of a replay. Once a
        step took longer than SLOW_STEP_S, several processes play.
        """
        request = replace(self._request(env, task_id, [actions], is_live=True), action=len(actions))
        async with self._play_places:
            holder = self._holders.pop((env, task_id, actions[:-1]), None)
            if holder in self._playing:  # it waits: the next request takes it
                self._playing.remove(holder)
                self._playing.append(holder)
            process = await self._waiting(self._playing) or await self._replacement(self._playing)
            began_s = asyncio.get_running_loop().time()
            reply = await self._ask_and_replace(process, self._playing, request)
            if asyncio.get_running_loop().time() - began_s > SLOW_STEP_S and not self._plays_side_by_side:
                self._plays_side_by_side = True
                for _ in range(MOST_PLAYING - 1):
                    self._play_places.release()
        if not isinstance(reply, Verdict):
            raise reply
        outcome = reply.outcomes[0]
        if not outcome.is_ended:
            self._holders[env, task_id, actions] = process
        return outcome

    def _request(self, env: str, task_id: int, episodes: Sequence[Actions], *, is_live: bool = False) -> "_Request":
        if env not in self._names:
            raise LookupError(f"environment {env!r} is not part of this run")
        body = json.dumps({"env": env, "task_id": task_id, "episodes": episodes, "is_live": is_live})
        if len(body) > MAX_REQUEST_BYTES:
            raise TooLarge(f"actions of {len(body)} bytes exceed {MAX_REQUEST_BYTES}")
        return _Request(env, task_id, len(episodes), body)

    async def limits_in_force(self) -> dict[str, bool]:
        """Name of each limit -> True if it is in force for own answers. Starts their process; raises as `verify`."""
        async with self._own_turn:
            if not self._own:
                self._own.append(await self._start(self._own))
            return dict(self._own[0].limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the processes; later requests, as from an engine thread that still plays, raise RolloutFailed."""
        self._is_closed = True
        pools = (self._own, self._external, self._slow, self._playing)
        idle = [process for pool in pools for process in pool]
        for pool in pools:
            pool.clear()
        for process in idle:
            process.writer.close()
        await self._spares.close()
        await self._processes.close()

    async def _score_external(self, request: "_Request", producer: Producer) -> Verdict | Exception:
        """Verdict on a peer's answers, or the error to raise; slow answers get a second try. Raises OverBudget."""
        is_all = self.accounts.allowance(producer) is Allowance.ALL
        lane = self._turns.lane_of(producer, request.env)
        if not is_all and lane is Lane.SLOW:  # a try of FIRST_TRY_S delays nobody
            lane = Lane.KNOWN if producer.is_known else Lane.NEW
        if lane is not Lane.SLOW:
            first: Verdict | Exception | None = None
            while first is None:
                async with self._turn(producer, lane) as allowance:
                    # if other unknown producers wait, too, many may have come at one moment
                    is_crowded = self._turns.is_unused(producer) and self._turns.is_crowded(lane)
                    is_last = allowance is Allowance.FIRST_TRY
                    least_s = FIRST_TRY_S if is_last else PROBE_S if is_crowded else LEAST_SHARE_S
                    share = 0.0 if is_last or is_crowded else FIRST_SHARE
                    part = replace(request, share=share, least_s=least_s, allowance=allowance)
                    first = await self._ask_one_of(self._external, part, producer)
                if isinstance(first, TookLong) and is_last:
                    return self._over_budget()
                if isinstance(first, TookLong) and is_crowded:
                    first = None  # its next turn comes after those of producers without a try
            if not isinstance(first, TookLong):
                return first
            self._turns.note_overrun(producer, request.env)
        async with self._turn(producer, Lane.SLOW) as allowance:
            if allowance is Allowance.FIRST_TRY:
                return self._over_budget()
            return await self._ask_one_of(self._slow, request, producer)

    @asynccontextmanager
    async def _turn(self, producer: Producer, lane: Lane) -> AsyncGenerator[Allowance]:
        """Holds a place for a producer's answers; yields its allowance. Raises OverBudget before or after waiting."""
        self._allowance(producer)
        async with self._turns.of(producer, lane):
            yield self._allowance(producer)  # again: others of its account may have been scored

    def _allowance(self, producer: Producer) -> Allowance:
        allowance = self.accounts.allowance(producer)
        if allowance is Allowance.NOTHING:
            raise self._over_budget()
        return allowance

    def _over_budget(self) -> OverBudget:
        return OverBudget(f"its groups have taken {REPLAY_S_PER_MINUTE:g} s of a minute to replay")

    async def _ask_one_of(
        self, idle: list[ScoringProcess], request: "_Request", producer: Producer | None = None
    ) -> Verdict | Exception:
        """Asks an idle or new process; returns the verdict, or the error to raise. Replaces a process that ends."""
        process = await self._waiting(idle) or await self._replacement(idle)
        began_s = asyncio.get_running_loop().time()
        try:
            return await self._ask_and_replace(process, idle, request)
        finally:
            if producer is not None:
                used_s = asyncio.get_running_loop().time() - began_s
                self._turns.charge(producer, used_s, is_slow=idle is self._slow)
                taken_s = min(process.taken_s, used_s)  # of CPU: a busy machine is nobody's fault
                self.accounts.spend(producer, taken_s, request.allowance)

    async def _ask_and_replace(
        self, process: ScoringProcess, idle: list[ScoringProcess], request: "_Request"
    ) -> Verdict | Exception:
        nonce = secrets.token_hex(16)
        try:
            reply = await self._ask(process, request, nonce)
            if reply.get("nonce") != nonce:
                raise ValueError("it answered another request")
            result = _result_of(request, reply)
            used_s = reply.get("cpu_s")
            process.cpu_s = used_s if isinstance(used_s, float) else float("inf")
            if process.cpu_s < PROCESS_CPU_S:
                idle.append(process)
                return result
            logger.debug("scoring process replaced", extra={"cpu_s": process.cpu_s})
            await self._processes.end(process)
        except (OSError, EOFError, ValueError, RecursionError) as problem:
            # no verifier of ours answers so: an answer has ended the process, or taken it over
            result = await self._failure(process, request, problem)
        except BaseException:  # cancelled: the reply that is on its way would be taken for the next one's
            await self._processes.end(process)
            raise
        if self._is_closed:
            return result
        try:
            idle.append(await self._replacement(idle))
            self.num_replaced += 1
        except (RolloutFailed, ConfigError):
            logger.warning("a scoring process could not be replaced", exc_info=True)  # the next request tries again
        return result

    async def _waiting(self, idle: list[ScoringProcess]) -> ScoringProcess | None:
        """An idle process that is still alive; None if there is none."""
        while idle:
            process = idle.pop()
            if not process.reader.at_eof():
                return process
            await self._processes.end(process)
            self.num_replaced += 1
        return None

    async def _replacement(self, idle: list[ScoringProcess]) -> ScoringProcess:
        """A new process; for first tries a spare one, if there is any."""
        process = self._spares.take() if idle is self._external else None
        if process is None:
            return await self._start(idle)
        self.num_started += 1
        return process

    async def _start(self, pool: list[ScoringProcess]) -> ScoringProcess:
        if self._is_closed:
            raise RolloutFailed("scoring has ended with the node")
        process = await self._processes.start()
        self.num_started += 1
        if pool is self._slow:
            with suppress(OSError):  # it may have ended already
                os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + SLOW_NICE)
        return process

    async def _ask(self, process: ScoringProcess, request: "_Request", nonce: str) -> dict[str, Any]:
        frame = request.frame(nonce)
        began_s = cpu_s_of(process.pid)
        programs_s = math.inf if self._has_programs(request) else 0.0  # of CPU; unknown without a reply
        try:
            async with asyncio.timeout(self._timeout_s(request)):
                process.writer.write(len(frame).to_bytes(4) + frame)
                await process.writer.drain()
                reply = await read_reply(process.reader)
                used_s = reply.get("programs_cpu_s", 0.0)
                programs_s = max(used_s, 0.0) if isinstance(used_s, float) else math.inf
                return reply
        finally:  # before the process may be reaped: afterwards its CPU time is unknown
            taken_s = cpu_s_of(process.pid) - began_s + programs_s
            process.taken_s = taken_s if taken_s >= 0 else math.inf

    def _has_programs(self, request: "_Request") -> bool:
        return self._processes.program_cpu_s.get(request.env, 0.0) > 0

    def _timeout_s(self, request: "_Request") -> float:
        """Wall-clock seconds for a request; programs add PROGRAM_PACE x their CPU bound, as they have low priority."""
        if request.is_first_try:
            return self._limits.timeout_s * FIRST_TIMEOUT_SHARE
        program_s = self._processes.program_cpu_s.get(request.env, 0.0)
        return self._limits.timeout_s + request.num_episodes * PROGRAM_PACE * program_s

    async def _failure(self, process: ScoringProcess, request: "_Request", problem: Exception) -> RolloutFailed:
        env, where = request.env, request.where
        if request.is_first_try and isinstance(problem, (EOFError, TimeoutError)):
            self._spares.end(process)  # in the background; the cause will show in the next try
            return TookLong(f"environment {env}: the answers took longer than a first try may")
        signal_number = await self._processes.end(process)
        if isinstance(problem, TimeoutError):
            return RolloutFailed(f"{where}: scoring took longer than timeout_s {self._timeout_s(request):g}")
        if signal_number == signal.SIGPROF:
            bound_s = self._processes.answer_cpu_s.get(env, 0.0)
            return RolloutFailed(f"{where}: an answer took more CPU time than answer_cpu_s {bound_s:g}")
        if isinstance(problem, EOFError):
            by = f"signal {signal_number} ended it" if signal_number else "it exited (os._exit?)"
            return RolloutFailed(f"{where}: the scoring process ended before it answered: {by}")
        return RolloutFailed(f"{where}: the scoring process answered nonsense: {type(problem).__name__}")


@dataclass(frozen=True, slots=True)
class _Request:
    """Request to score answers."""

    env: str
    task_id: int
    num_episodes: int
    body: str  # environment, task and actions as JSON
    share: float = 1.0  # of the CPU time that all actions may take
    least_s: float = LEAST_SHARE_S  # CPU time of a first try at few actions
    allowance: Allowance = Allowance.ALL  # of its party
    action: int = 0  # number of the only new action; 0: episodes are replayed

    @property
    def is_first_try(self) -> bool:
        return self.share < 1.0

    @property
    def where(self) -> str:
        number = f", action {self.action}" if self.action else ""
        return f"environment {self.env}, task {self.task_id}{number}"

    def frame(self, nonce: str) -> bytes:
        head = json.dumps({"nonce": nonce, "share": self.share, "least_s": self.least_s, "first_s": FIRST_MOST_S})
        return f"{head[:-1]}, {self.body[1:]}".encode()


def cpu_s_of(pid: int) -> float:
    """CPU seconds used by a child process that is not yet reaped; infinity if its CPU clock cannot be read."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of that process
    except OSError:
        return math.inf


def _result_of(request: _Request, reply: dict[str, Any]) -> Verdict | Exception:
    """The verdict, or the error to raise. Raises ValueError for a malformed reply."""
    try:
        return _verdict(request, reply)
    except (LookupError, RolloutFailed) as error:
        return error


def _verdict(request: _Request, reply: dict[str, Any]) -> Verdict:
    """Parses a possibly hostile reply. Raises the LookupError or RolloutFailed in it, ValueError if it is malformed."""
    env, task_id, num_episodes = request.env, request.task_id, request.num_episodes
    if reply.get("error") == "share":
        raise TookLong(f"environment {env}: the answers took longer than a first try may")
    if reply.get("error") == "lookup":
        raise LookupError(str(reply.get("detail")))
    if reply.get("error") == "task":
        raise TaskFailed(str(reply.get("detail")))
    if "error" in reply:
        raise RolloutFailed(f"{request.where}: the verifier raised {reply.get('detail')}")
    try:
        data = reply["task"]
        messages = tuple(Message(role=str(m["role"]), content=str(m["content"])) for m in data["messages"])
        max_turns = int(data["max_turns"])
        is_held_out = data["is_held_out"] is True
        task = Task(env=env, task_id=task_id, messages=messages, is_held_out=is_held_out, max_turns=max_turns)
        outcomes = _outcomes(reply["outcomes"])
        verifier, reference = str(reply["verifier"]), str(reply["reference"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(type(error).__name__) from None
    if len(outcomes) != num_episodes:
        raise ValueError(f"{len(outcomes)} outcomes of {num_episodes} episodes")
    return Verdict(task=task, outcomes=outcomes, verifier=verifier, reference=reference)


def _outcomes(values: Any) -> tuple[EpisodeOutcome, ...]:
    """Outcomes of a reply; equal outcomes are mostly parsed once. Raises ValueError or TypeError if malformed."""
    outcomes: list[EpisodeOutcome] = []
    known: list[tuple[Any, EpisodeOutcome]] = []  # the last few: answers are mostly right or wrong
    for value in values:
        outcome = next((read for each, read in known if each == value), None)
        if outcome is None:
            outcome = outcome_from_json(value)
            known = [*known[-3:], (value, outcome)]
        outcomes.append(outcome)
    return tuple(outcomes)
