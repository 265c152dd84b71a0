"""Runs of agents that a served model learns from: recording of their calls, their ends, and their groups.

A run is one episode: its calls, then one reward. Runs of one task are compared with one another, in a group that closes
with `group_size` runs, or `group_s` seconds after its first reward with the runs rewarded so far. A held-out run is
measured alone.

Invariant: a run without a reward, or that no step may use, is never learned from; the state of each run can be queried.
Each key has its own bounds: MAX_OPEN_RUNS open runs, MAX_BYTES of calls, and IDLE_S without a call.
"""

import asyncio
import hashlib
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from swarm.clock import Clock
from swarm.episode import MAX_TURNS, EpisodeOutcome
from swarm.errors import StorageFull, Unavailable, described
from swarm.interfaces import Tokenizer
from swarm.serving.held_out_runs import QUIET_S, evaluations_of
from swarm.serving.openai_requests import RequestRefused
from swarm.serving.run_groups import RecordedCall, group_of, oldest_step, run_worth, why_not_learned
from swarm.serving.run_store import ClosedGroup, RunRow, RunState, RunStore
from swarm.types import Evaluation, JsonDict, NodeId, PolicyVersion, RolloutGroup

logger = logging.getLogger(__name__)

MAX_OPEN_RUNS: Final = 4096  # of one key
MAX_BYTES: Final = 64 * 2**20  # of the calls that are kept for one key
IDLE_S: Final = 86_400.0  # an open run without a call is over after a day
SLOW_RUN_S: Final = 600.0  # a held-out run without a call for so long no longer delays the end of its round
LOOK_EVERY_S: Final = 1.0
MAX_PUTS: Final = 5  # tries at a group that the node does not take
SESSION_PREFIX: Final = "run-"  # of the key for one run's calls
REWARD_PREFIX: Final = "reward-"  # of the key for its reward, which its agent cannot know
SINGLE_RUN_RECIPE: Final = "reinforce_plus_plus"  # whose baseline is the mean of a step: it needs no group

Result = TypeVar("Result")
Put = Callable[[RolloutGroup, Sequence[EpisodeOutcome]], Coroutine[Any, Any, float]]
"""(group, outcomes) -> mean reward, NaN if the node did not take the group."""
Report = Callable[[Sequence[Evaluation]], Coroutine[Any, Any, None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRules:
    """Rules and bounds of this node for the agent runs that it learns from."""

    run_id: str
    node_id: NodeId
    group_size: int
    group_s: float  # from the first reward of a group until it closes
    temperature: float  # of calls that name none
    max_new_tokens: int  # of one answer
    max_episode_tokens: int
    max_age_steps: int
    takes_single_runs: bool  # runs without a task are learned from


@dataclass(frozen=True, slots=True)
class RunKey:
    """Identity of a run: the name of the API key that opened it, and the run's own name."""

    owner: str
    name: str


class AgentRuns:
    """Runs of agents of one node.

    Args:
        store: the runs on the disk.
        rules: what is learned from.
        tokenizer: tokenizer of the served model.
        version: newest version of the served policy.
        compute_dtype: dtype of the engine's passes.
        clock: wall clock.
    """

    def __init__(
        self,
        store: RunStore,
        rules: RunRules,
        tokenizer: Tokenizer,
        version: Callable[[], PolicyVersion],
        compute_dtype: str,
        clock: Clock,
    ) -> None:
        self.rules = rules
        self._store, self._tokenizer, self._clock = store, tokenizer, clock
        self._version, self._compute_dtype = version, compute_dtype
        self._sessions = {digest: RunKey(*names) for digest, names in store.sessions().items()}
        self._num_tries: dict[int, int] = {}  # puts of a group
        self._rounds = deque[Evaluation]()  # of held-out runs, ended and not reported; two threads use it

    # --- for callers ------------------------------------------------------------------------------------

    def of_session(self, key: str) -> tuple[RunKey, bool] | None:
        """The run that a session key belongs to, and True if that is the reward key; None for any other key."""
        is_reward = key.startswith(REWARD_PREFIX)
        run = self._sessions.get(_digest(_key_of_calls(key) if is_reward else key))
        return None if run is None else (run, is_reward)

    async def open_session(
        self, owner: str, name: str, task: str, *, is_held_out: bool = False
    ) -> tuple[RunKey, str, str]:
        """Begins a run; returns it, its key for calls and its key for the reward. An empty name is replaced.

        An agent that runs code can read the key that it calls with: that key gives no reward.

        Raises:
            RequestRefused: the name is taken, or the owner's key has MAX_OPEN_RUNS open runs or over MAX_BYTES.
        """
        run, reward_key = RunKey(owner, name or secrets.token_hex(8)), REWARD_PREFIX + secrets.token_urlsafe(24)
        key = _key_of_calls(reward_key)
        state = RunState.HELD_OUT if is_held_out else RunState.OPEN
        if not await self._open(run, task, _digest(key), state):
            raise RequestRefused(f"id: the run {run.name!r} exists; choose another name", "id", 409)
        self._sessions[_digest(key)] = run
        return run, key, reward_key

    async def begin_call(self, run: RunKey, task: str) -> RunRow:
        """Finds the run of a call to be answered; opens the run at its first call. Raises RequestRefused."""
        row = await self._in_thread(self._store.find, run.owner, run.name)
        if row is None:
            await self._open(run, task, b"", RunState.OPEN)
            row = await self._in_thread(self._store.find, run.owner, run.name)
            assert row is not None
        if row.state not in (RunState.OPEN, RunState.HELD_OUT):
            raise RequestRefused(f"the run {run.name!r} is over: it has its reward", "X-Episode", 409)
        if task and task != row.task:
            raise RequestRefused(f"X-Task: the run {run.name!r} is of the task {row.task!r}", "X-Task", 409)
        return row

    async def record(self, row: RunRow, call: RecordedCall) -> None:
        """Records an answer before it is sent. Raises RequestRefused if the run is over, StorageFull."""
        now_s = self._clock.now_s()
        add = partial(self._store.add_call, row.number, call, now_s, max_calls=MAX_TURNS, max_bytes=MAX_BYTES)
        if row.state is RunState.HELD_OUT:
            add = partial(self._store.count_held_out, row.number, call.spans[0].version.step, now_s)
        if not await self._in_thread(add):
            raise RequestRefused(f"the run {row.name!r} is over: it got its reward during this call", "X-Episode", 409)

    async def reward(self, run: RunKey, rewards: Mapping[str, float]) -> JsonDict:
        """Ends a run with its rewards, once; the same rewards again change nothing. Raises RequestRefused."""
        row = await self._in_thread(self._store.find, run.owner, run.name)
        if row is None:
            raise _unknown(run)
        if row.state is RunState.HELD_OUT:
            if not row.num_calls:
                raise RequestRefused(f"the held-out run {run.name!r} has no call yet", "id", 409)
            asked = row, rewards, run_worth(rewards), self._clock.now_s()
            for tasks in await self._in_thread(self._store.measure, *asked):
                self._rounds.extend(evaluations_of(row.owner, tasks))
            return await self.state(run)
        if row.state is not RunState.OPEN:
            if row.rewards != dict(rewards):
                raise RequestRefused(f"the run {run.name!r} is over, with other rewards", "reward", 409)
            return await self.state(run)
        calls = await self._in_thread(self._store.calls, row.number)
        note = row.note or why_not_learned(calls, self.rules.max_episode_tokens)
        oldest = 0 if note else oldest_step(calls)
        note = note or self._age_note(oldest)
        if not note and not row.task and not self.rules.takes_single_runs:
            note = (
                "a run without X-Task has no others to be compared with: name its task, or learn by a recipe without "
                f'group baseline (learner.recipe = "{SINGLE_RUN_RECIPE}", replay.keep_zero_variance = true)'
            )
        if not await self._in_thread(self._store.reward, row, rewards, oldest, note, self._clock.now_s()):
            return await self.reward(run, rewards)  # a call that ended in between is looked at, too
        await self._in_thread(self._close_groups)
        return await self.state(run)

    async def state(self, run: RunKey) -> JsonDict:
        """The state of a run, for its owner. Raises RequestRefused if the run does not exist."""
        row = await self._in_thread(self._store.find, run.owner, run.name)
        if row is None:
            raise _unknown(run)
        shown: JsonDict = {
            "object": "episode",
            "id": row.name,
            "task": row.task,
            "state": row.state,
            "num_calls": row.num_calls,
            "rewards": dict(row.rewards),
        }
        if row.note:
            shown["reason"] = row.note
        if row.state is RunState.WAITING:
            members = (await self._in_thread(self._store.waiting)).get((row.owner, row.task), [row])
            left_s = members[0].rewarded_s + self.rules.group_s - self._clock.now_s()
            shown["group"] = {"runs": len(members), "of": self.rules.group_size, "closes_in_s": round(max(0.0, left_s))}
        return shown

    async def overview(self, owner: str) -> JsonDict:
        """Counts the runs of a key by state, and by the reason why they were not learned from."""
        states, reasons = await self._in_thread(self._store.overview, owner)
        return {"object": "episodes", "states": states, "reasons": reasons}

    # --- groups -----------------------------------------------------------------------------------------

    async def hand_over_loop(self, put: Put, report: Report) -> None:
        """Closes due groups and hands closed groups to the node every LOOK_EVERY_S, until cancelled.

        Args:
            put: takes a group.
            report: takes the rounds of held-out runs that ended.
        """
        is_waiting = False
        while True:
            try:
                if rounds := await self.ended_rounds():
                    await report(rounds)
                await self.hand_over(put)
                is_waiting = False
            except (StorageFull, Unavailable) as error:
                if not is_waiting:  # once: a line each second would fill the rest of the disk
                    logger.warning("runs of agents wait", extra={"error": str(error)})
                is_waiting = True
            await asyncio.sleep(LOOK_EVERY_S)

    async def ended_rounds(self) -> list[Evaluation]:
        """Rounds of held-out runs that ended since the last call."""
        now_s = self._clock.now_s()
        for owner, tasks in await self._in_thread(self._store.quiet_rounds, now_s - QUIET_S, now_s - SLOW_RUN_S):
            self._rounds.extend(evaluations_of(owner, tasks))
        return [self._rounds.popleft() for _ in range(len(self._rounds))]

    async def hand_over(self, put: Put) -> None:
        """Ends idle runs, closes due groups, and hands complete groups to the node, those with the fewest tries first.

        Raises:
            StorageFull, Unavailable: the node takes no group now; the next round begins with another one.
        """
        for state in (RunState.OPEN, RunState.HELD_OUT):
            idle = await self._in_thread(self._store.idle, self._clock.now_s() - IDLE_S, state)
            if idle:
                note = f"no reward came in {IDLE_S:g} s after its last call"
                await self._in_thread(self._store.refuse, idle, state, note)
        await self._in_thread(self._close_groups)
        waiting = await self._in_thread(self._store.closed_groups)
        for closed in sorted(waiting, key=lambda each: self._num_tries.get(each.number, 0)):
            try:
                group, outcomes = await self._in_thread(self._group_of, closed)
            except Exception:  # task boundary: of one group, whose rows the disk may have changed
                logger.exception("a group of agents' runs cannot be made", extra={"task": closed.task})
                await self._in_thread(self._store.settle, closed.number, "its calls cannot be read: see the node's log")
                continue
            tries = self._num_tries[closed.number] = self._num_tries.get(closed.number, 0) + 1
            try:
                is_put = not math.isnan(await put(group, outcomes))
                note = "" if is_put else f"the node did not take its group, {tries} times: see its log"
            except (StorageFull, Unavailable):
                raise
            except Exception as error:  # task boundary: of one group, whose values an agent chose
                logger.exception("a group of agents' runs cannot be handed over", extra={"task": closed.task})
                is_put, tries, note = False, MAX_PUTS, f"the node cannot take its group: {described(error)}"
            if is_put or tries >= MAX_PUTS:
                await self._in_thread(self._store.settle, closed.number, note)
                del self._num_tries[closed.number]

    def _group_of(self, closed: ClosedGroup) -> tuple[RolloutGroup, list[EpisodeOutcome]]:
        return group_of(
            self._store.runs_of(closed.number),
            self._tokenizer,
            task=closed.task,
            run_id=self.rules.run_id,
            producer=self.rules.node_id,
            created_at_s=closed.closed_s,
            compute_dtype=closed.compute_dtype,
            max_new_tokens=self.rules.max_new_tokens,
        )

    def _close_groups(self) -> None:
        """Closes complete or due groups; refuses runs too old, or alone where `takes_single_runs` is off (blocking)."""
        now_s, rules = self._clock.now_s(), self.rules
        for (_, task), members in self._store.waiting().items():
            fresh: list[RunRow] = []
            for row in members:
                if note := self._age_note(row.oldest_step):
                    self._store.refuse([row.number], RunState.WAITING, note)
                else:
                    fresh.append(row)
            numbers = [row.number for row in fresh]
            if not task:
                for number in numbers:
                    self._store.close_group([number], f"run {number}", self._compute_dtype, now_s)
                continue
            while len(numbers) >= rules.group_size:
                self._store.close_group(numbers[: rules.group_size], task, self._compute_dtype, now_s)
                numbers = numbers[rules.group_size :]
            if not numbers or now_s < fresh[-len(numbers)].rewarded_s + rules.group_s:
                continue
            if len(numbers) > 1 or rules.takes_single_runs:
                self._store.close_group(numbers, task, self._compute_dtype, now_s)
            else:
                note = f"no other run of its task was rewarded within {rules.group_s:g} s"
                self._store.refuse(numbers, RunState.WAITING, note)

    def _age_note(self, oldest: int) -> str:
        age, most = self._version().step - oldest, self.rules.max_age_steps
        return f"age {age} steps exceeds replay.max_age_steps {most}" if age > most else ""

    async def _open(self, run: RunKey, task: str, secret: bytes, state: RunState) -> bool:
        """Begins a run; returns False if it exists, even if another call began it at the same moment."""
        num_open, num_bytes = await self._in_thread(self._store.totals, run.owner)
        if num_open >= MAX_OPEN_RUNS or num_bytes > MAX_BYTES:
            raise RequestRefused(
                f"{num_open} runs of this key wait for a reward or for others of their task, at most {MAX_OPEN_RUNS}, "
                f"with {num_bytes} bytes of {MAX_BYTES}; reward them, or wait {IDLE_S:g} s",
                status=429,
            )
        asked = run.owner, run.name, task, secret, self._clock.now_s(), state
        is_new, forgotten = await self._in_thread(self._store.open_run, *asked)
        for digest in forgotten:
            self._sessions.pop(digest, None)
        return is_new

    async def _in_thread(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.to_thread(function, *arguments)


def _unknown(run: RunKey) -> RequestRefused:
    return RequestRefused(f"no run {run.name!r} of this key", "id", 404)


def _key_of_calls(reward_key: str) -> str:
    """The key for a run's calls, derived from its reward key by a one-way hash."""
    return SESSION_PREFIX + _digest(reward_key).hex()[:40]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
