"""The agent: what one node knows, and what it does when a group, a draw or a version arrives.

Invariant: every group is stored before anything else sees it, every foreign group came through the
door, and every draw is journalled before it is handed out. No background task lives here: the loops
that drive an agent are in `swarm.loops`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.errors import NotHeld, RolloutFailed, StorageFull, TooLarge, Unavailable
from swarm.exchange.admit import Door
from swarm.exchange.appetite import Appetite
from swarm.exchange.replay import ReplayBuffer
from swarm.exchange.signal import Signal
from swarm.identity import Identity
from swarm.interfaces import GroupStore, StreamItem, Verdict, Verifier
from swarm.types import (
    Advert,
    Advice,
    Correction,
    Cursor,
    Digest,
    Draw,
    EdgeReport,
    Evaluation,
    JsonDict,
    NodeId,
    NodeReport,
    PolicyVersion,
    RefusalReason,
    Refused,
    Role,
    RolloutGroup,
    ScoredGroup,
    SealedGroup,
    StepReport,
    short,
)

logger = logging.getLogger(__name__)

Emit = Callable[[str, JsonDict], None]  # event kind, fields
Value = TypeVar("Value")

SUBSCRIBE_BATCH = 32  # log entries read from the store at a time
MAX_PEERS = 4096  # peers remembered; whoever was heard of longest ago is forgotten first
MAX_EDGES = 256  # sources with figures of their own: each report to the coordinator carries them all
STORAGE_RETRY_S = 1.0  # between two attempts to journal a draw on a full disk
MAX_PENDING_VERSIONS = 10_000  # versions kept for a coordinator that is away


@dataclass(slots=True)
class Counters:
    """Totals since this process started."""

    num_put: int = 0
    num_admitted: int = 0
    num_local_used: int = 0
    num_external_used: int = 0
    tokens_generated: int = 0
    bytes_received: int = 0  # sealed groups from peers, useful or not
    bytes_sent: int = 0  # sealed groups to peers


@dataclass(frozen=True, slots=True)
class _Fresh:
    """What decides to whom a stored group is worth sending."""

    producer: NodeId
    via: NodeId  # who sent it to us; ourselves for our own groups
    oldest_step: int


class Agent:
    """One node's state; implements `LocalExchange` for its worker and `ExchangeHandler` for its peers."""

    def __init__(
        self,
        *,
        config: NodeConfig,
        identity: Identity,
        store: GroupStore,
        replay: ReplayBuffer,
        door: Door,
        verifier: Verifier,
        tokenizer_digest: Digest,
        clock: Clock,
        emit: Emit,
    ) -> None:
        self.config = config
        self.identity = identity
        self.node_id: NodeId = identity.node_id
        self.store = store
        self.replay = replay
        self.clock = clock
        self.counters = Counters()
        self.num_failures = 0
        self.refusals: dict[RefusalReason, int] = {}
        self.heads: dict[NodeId, PolicyVersion] = {}  # newest signed head of each peer
        self.delivered_steps: dict[NodeId, int] = {}  # newest policy step among each peer's admitted groups
        self.connected: set[NodeId] = set()
        self.fetching: set[Digest] = set()  # notices being fetched from some neighbour: no second copy
        self.head = PolicyVersion(policy_id=self.node_id, step=0)
        self._advice, self._advice_ends_s = Advice(), 0.0
        self.pending_versions: list[PolicyVersion] = []
        self.edges: dict[NodeId, EdgeReport] = {}
        self.evaluations: dict[str, float] = {}
        self.endpoints: tuple[str, ...] = ()
        self.last_step_at_s = clock.now_s()
        self._door = door
        self._verifier = verifier
        self._tokenizer_digest = tokenizer_digest
        self._emit = emit
        self._appetite = Appetite(config.replay, clock)
        self._changed = Signal()  # what a draw or the generator waits for: groups, versions, connections
        self._log_grew = Signal()  # what relaying streams wait for
        self._own_log_grew = Signal()  # what all other streams wait for
        self._drawing = asyncio.Lock()
        self._fresh: dict[Digest, _Fresh] = {}  # of the newest groups in the log
        self._arriving: Counter[Digest] = Counter()  # on their way through the door
        self._num_putting = 0
        self._num_asked = 0  # groups of ours, tried or stored, since the store began
        self._next_draw = 1
        self._pending_draw: Draw | None = None
        self._has_drawn = False  # a draw was made and its step is not yet reported
        self._reward_mean = 0.0
        self._reward_std = 0.0
        self._log_head = Cursor()  # newest entry of the store's log

    # --- restart -------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Refills buffer, journal position and duplicate knowledge from the store after a restart."""
        journal = await self.store.journal(0)
        self._next_draw = journal[-1][0] + 1 if journal else 1
        groups = await self.store.load_scored(self.config.replay.max_groups)
        self.replay.restore(await self.store.uses(), groups)
        for scored in groups:
            self._remember(scored, via=self.node_id)
            if not scored.is_local:
                self._learn_head(scored.group)  # so that ages are counted as before the restart
        self._log_head = await self.store.head()
        self._num_asked = self._log_head.sequence  # exact alone; with groups of others in the log it only skips numbers
        if groups:
            # a kill can fall between a group's storage and its event: what is held is told again
            held = [[scored.digest.hex(), scored.is_local] for scored in groups]
            self._emit("restored", {"groups": len(groups), "draws": len(journal), "held": held})

    # --- own worker: LocalExchange ---------------------------------------------------------------

    async def capacity(self) -> int:
        """Groups that may be started now without becoming too old to use."""
        return self._capacity()

    async def wait_capacity(self) -> int:
        """Waits until `capacity()` is positive and returns it."""
        await self._changed.until(lambda: self._capacity() > 0)
        return self._capacity()

    async def num_asked(self) -> int:
        """Questions asked so far, restarts included: the number of the next one."""
        return self._num_asked

    async def put(self, group: RolloutGroup) -> float:
        """Scores, seals, stores and publishes one of our groups; returns its mean reward."""
        self._num_asked += 1  # also when it cannot be stored: it is not asked again
        self._num_putting += 1
        try:
            scored, _ = await self._door.own(group, self.identity)
            log_head = await self.store.head()
        except StorageFull as error:
            logger.error("store is full; a rollout group of ours was dropped", extra={"error": str(error)})
            self._emit("storage_full", {"error": str(error)})
            return float("nan")
        except (RolloutFailed, TooLarge) as error:
            logger.warning("a rollout group of ours could not be scored", extra={"error": str(error)})
            self._emit("unscored", {"error": str(error), "env": group.env})
            return float("nan")
        finally:
            self._num_putting -= 1
        self._log_head = log_head
        self.counters.num_put += 1
        self.counters.tokens_generated += group.num_tokens
        decay = 0.95 if self.counters.num_put > 1 else 0.0
        mean = float(scored.rewards.mean())
        self._reward_mean = decay * self._reward_mean + (1 - decay) * mean
        self._reward_std = decay * self._reward_std + (1 - decay) * float(scored.rewards.std())
        self._add(scored, via=self.node_id)
        self._emit("put", {**_group_fields(scored), "tokens": group.num_tokens})
        return mean

    async def draw(self, head: PolicyVersion) -> Draw:
        """The groups of the next step; the same draw again until it was reported."""
        async with self._drawing:
            if self._pending_draw is None:
                self._pending_draw = await self._draw(head)
            return self._pending_draw

    async def _draw(self, head: PolicyVersion) -> Draw:
        await self._changed.until(self._round_is_complete)
        draw: Draw | None = None
        while draw is None:
            self.replay.limit_age(self.advice.max_age_steps)
            draw = self.replay.draw(self._next_draw, head, self.heads.get, self._source_weights())
            if draw is None:
                self._changed.fire()  # what was used up or too old makes room for the generator
                await self._changed.wait()
        self._has_drawn = True
        await self._journal(draw)
        self._next_draw = draw.step + 1
        self.counters.num_local_used += sum(d.scored.is_local for d in draw.groups) + draw.num_silent
        self.counters.num_external_used += sum(not d.scored.is_local for d in draw.groups)
        self._emit("draw", _draw_fields(draw, self.config))
        self._changed.fire()  # room for the generator
        self._appetite.drew()
        return draw

    async def _journal(self, draw: Draw) -> None:
        """Records a draw. On a full disk the learner waits, with its groups in hand, until there is room."""
        is_told = False
        while True:
            try:
                return await self.store.record_draw(draw)
            except StorageFull as error:
                if not is_told:
                    logger.error("store is full; learning waits until there is room", extra={"error": str(error)})
                    self._emit("storage_full", {"error": str(error)})
                is_told = True
            await asyncio.sleep(STORAGE_RETRY_S)

    async def redraw(self, from_step: int) -> list[Draw]:
        """The journalled draws from `from_step` on, rebuilt from the store; stops at the first lost group."""
        return await self.store.draws(from_step)

    async def publish(self, version: PolicyVersion) -> None:
        """A new version of our own lineage exists."""
        self.head = version
        if len(self.pending_versions) < MAX_PENDING_VERSIONS:
            self.pending_versions.append(version)
        self._changed.fire()

    async def report(self, report: StepReport) -> None:
        """One step was made: its draw is settled, its figures are kept."""
        if self._pending_draw is not None and report.draw_step in (0, self._pending_draw.step):
            self._pending_draw, self._has_drawn = None, False
        self.last_step_at_s = self.clock.now_s()
        for edge in report.edges:
            keep_newest(self.edges, edge.source, edge, MAX_EDGES)
        self._emit("step", _step_fields(report))

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Greedy accuracies were measured."""
        for entry in evaluations:
            self.evaluations[f"{entry.env}/{entry.split}"] = entry.accuracy
            self._emit(
                "evaluation",
                {
                    "step": entry.step,
                    "env": entry.env,
                    "split": entry.split,
                    "accuracy": entry.accuracy,
                    "num_problems": entry.num_problems,
                    "majority_baseline": entry.majority_baseline,
                },
            )

    async def score(self, env: str, task_id: int, answers: Sequence[str]) -> Verdict:
        """The sandboxed verifier."""
        return await self._verifier.score(env, task_id, answers)

    # --- coordinator ------------------------------------------------------------------------------

    @property
    def advice(self) -> Advice:
        """The coordinator's newest advice; no opinion once its lease ran out."""
        return self._advice if self.clock.monotonic_s() < self._advice_ends_s else Advice()

    def take_advice(self, advice: Advice) -> None:
        """A heartbeat was answered."""
        self._advice, self._advice_ends_s = advice, self.clock.monotonic_s() + advice.lease_s

    # --- peers: receiving ------------------------------------------------------------------------

    async def receive(self, sealed: SealedGroup, via: NodeId) -> ScoredGroup | Refused:
        """Passes a foreign group through the door; an admitted one is stored and offered to the learner."""
        self.counters.bytes_received += sealed.size_bytes
        self._arriving[sealed.digest] += 1
        try:
            result = await self._door.admit(sealed, via)
            if isinstance(result, ScoredGroup):
                self._log_head = await self.store.head()
        finally:
            self._arriving[sealed.digest] -= 1
            if not self._arriving[sealed.digest]:
                del self._arriving[sealed.digest]
        if isinstance(result, Refused):
            self.refusals[result.reason] = self.refusals.get(result.reason, 0) + 1
            self._emit("refused", {"reason": str(result.reason), "producer": result.producer or via})
            logger.debug(
                "group refused", extra={"reason": str(result.reason), "detail": result.detail, "via": short(via)}
            )
            if result.reason is not RefusalReason.LOW_STANDING:
                self._drop_unwelcome(via, result.producer or via)
            return result
        self.counters.num_admitted += 1
        self._learn_head(result.group)
        self._add(result, via)
        self._emit(
            "admitted", {**_group_fields(result), "via": via, "age_s": self.clock.now_s() - result.group.created_at_s}
        )
        return result

    def takes_from(self, peer: NodeId) -> bool:
        """Whether our draws still have use for a group that this neighbour offers; asked once for each."""
        return self._appetite.take(peer, max(1, len(self.connected)), self.replay.num_external)

    def hear(self, adverts: Sequence[Advert]) -> None:
        """Takes the newest signed head of each peer from the directory."""
        for advert in adverts:
            known = self.heads.get(advert.node_id)
            if advert.node_id != self.node_id and (known is None or advert.head.step > known.step):
                keep_newest(self.heads, advert.node_id, advert.head)

    def is_welcome(self, peer: NodeId) -> bool:
        """False while the peer's standing is below the floor: we neither follow nor serve it until it has decayed."""
        return self._door.is_open_to(peer)

    def require_welcome(self, peer: NodeId) -> None:
        """Raises Unavailable for a peer that is not welcome now."""
        if not self.is_welcome(peer):
            raise Unavailable(f"the standing of {short(peer)} is below the floor; it decays with time")

    async def set_connected(self, peer: NodeId, is_connected: bool) -> None:
        """A stream from `peer` was opened or has ended."""
        (self.connected.add if is_connected else self.connected.discard)(peer)
        self._changed.fire()

    # --- peers: serving (ExchangeHandler) ---------------------------------------------------------

    async def subscribe(self, peer: NodeId, cursor: Cursor, relay: bool) -> AsyncIterator[StreamItem]:
        """Own groups after `cursor`, then live ones; with `relay` also notices of other nodes' groups.

        Raises:
            Unavailable: the peer's standing is below the floor; also in the middle of a stream.
        """
        logger.debug("peer subscribed", extra={"peer": short(peer), "relay": relay})
        grew = self._log_grew if relay else self._own_log_grew
        while True:
            self.require_welcome(peer)
            newest = self._log_head
            entries = await self.store.since(cursor, SUBSCRIBE_BATCH, own_only=not relay)
            for position, sealed in entries:
                if self._is_settling(sealed):
                    await grew.wait()
                    break
                cursor = position
                if not self._is_worth_sending(sealed, peer):
                    continue
                is_own = sealed.producer == self.node_id
                self.counters.bytes_sent += sealed.size_bytes if is_own else 0
                yield StreamItem(
                    cursor=cursor,
                    digest=sealed.digest,
                    size_bytes=sealed.size_bytes,
                    sealed=sealed if is_own else None,
                )
            if not entries:
                cursor = newest  # what lies between is not for this peer
                if self._log_head == newest:
                    await grew.wait()

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        """A held group, ours or another node's. Raises NotHeld; Unavailable for a peer that is not welcome."""
        self.require_welcome(peer)
        sealed = await self.store.get(digest)
        if sealed is None:
            raise NotHeld(f"group {short(digest)} is not held")
        self.counters.bytes_sent += sealed.size_bytes
        return sealed

    # --- what others may know about us ------------------------------------------------------------

    def advert(self) -> Advert:
        """This node's record for the directory."""
        statistics = self.replay.statistics()
        return Advert(
            node_id=self.node_id,
            run_id=self.config.run_id,
            endpoints=self.endpoints,
            roles=self.config.roles,
            tokenizer_digest=self._tokenizer_digest,
            head=self.head,
            oldest_step=min((f.oldest_step for f in self._fresh.values() if f.producer == self.node_id), default=0),
            num_groups=self.counters.num_put,
            reward_mean=self._reward_mean,
            reward_std=self._reward_std,
            correction=Correction.EXACT,
            held_bytes=statistics.num_bytes,
            cursor=self._log_head,
            expires_at_s=self.clock.now_s() + 3 * self.config.exchange.advert_every_s,
        )

    def node_report(self, tokens_per_s: float) -> NodeReport:
        """This node's figures for the coordinator."""
        return NodeReport(
            node_id=self.node_id,
            name=self.config.name or short(self.node_id),
            roles=self.config.roles,
            endpoints=self.endpoints,
            head=self.head,
            tokens_per_s=tokens_per_s,
            reward_mean=self._reward_mean,
            num_local=self.counters.num_local_used,
            num_external=self.counters.num_external_used,
            num_refused=sum(self.refusals.values()),
            edges=tuple(self.edges.values()),
            evaluations=dict(self.evaluations),
        )

    def record_failure(self, loop: str, error: Exception) -> None:
        """An unexpected exception ended a loop: counted, and visible in every report."""
        self.num_failures += 1
        self._emit("failure", {"loop": loop, "error": f"{type(error).__name__}: {error}"})

    @property
    def is_trainer(self) -> bool:
        """True when this node makes optimizer steps."""
        return Role.TRAINER in self.config.roles

    # --- inside --------------------------------------------------------------------------------------

    def _add(self, scored: ScoredGroup, via: NodeId) -> None:
        self.replay.add(scored)
        self._remember(scored, via)
        self._changed.fire()
        self._log_grew.fire()
        if scored.is_local:
            self._own_log_grew.fire()

    def _drop_unwelcome(self, *peers: NodeId) -> None:
        """Wakes the streams when a peer has just fallen below the floor, so that its own end at once."""
        if not all(map(self.is_welcome, peers)):
            self._log_grew.fire()
            self._own_log_grew.fire()

    def _capacity(self) -> int:
        if self.config.learner.deterministic and (self._has_drawn or self._can_draw()):
            return 0  # strictly in turn: the step comes first
        return self.replay.capacity(self.head.step, running=0)

    def _can_draw(self) -> bool:
        return self.replay.num_local >= self.config.replay.local_groups

    def _remember(self, scored: ScoredGroup, via: NodeId) -> None:
        self._fresh[scored.digest] = _Fresh(scored.group.producer, via, scored.group.oldest_step)
        while len(self._fresh) > self.config.replay.max_groups:
            del self._fresh[next(iter(self._fresh))]

    def _learn_head(self, group: RolloutGroup) -> None:
        """A signed group is evidence of its producer's head: no wait for the next advert."""
        newest = max(
            (span.version for rollout in group.rollouts if rollout.trace for span in rollout.trace.spans),
            key=lambda version: version.step,
            default=None,
        )
        if newest is None:
            return
        known = self.heads.get(group.producer)
        if known is None or newest.step > known.step:
            keep_newest(self.heads, group.producer, newest)
        delivered_step = max(newest.step, self.delivered_steps.get(group.producer, 0))
        keep_newest(self.delivered_steps, group.producer, delivered_step)

    def _is_settling(self, sealed: SealedGroup) -> bool:
        """In the store, but its put or receive has not come back yet to say what it is worth."""
        if sealed.digest in self._fresh:
            return False
        return self._num_putting > 0 if sealed.producer == self.node_id else sealed.digest in self._arriving

    def _is_worth_sending(self, sealed: SealedGroup, peer: NodeId) -> bool:
        """Not what the peer made or sent us itself, nor what is older than anyone may use."""
        fresh = self._fresh.get(sealed.digest)
        if fresh is None or peer in (fresh.producer, fresh.via):
            return False
        head = self.head if fresh.producer == self.node_id else self.heads.get(fresh.producer)
        return head is None or head.step - fresh.oldest_step <= self.config.replay.max_age_steps

    def _round_is_complete(self) -> bool:
        """Always, unless `replay.barrier` asks to wait for every connected peer's rollouts of this round."""
        if not self.config.replay.barrier:
            return True
        return all(self.delivered_steps.get(peer, -1) >= self.head.step for peer in self.connected)

    def _source_weights(self) -> dict[NodeId, float]:
        """Own measured effective sample size per source; the coordinator's advice can only lower it."""
        weights = {source: edge.ess_share for source, edge in self.edges.items()}
        for source, weight in self.advice.source_weights.items():
            weights[source] = min(weights.get(source, 1.0), weight)
        return weights


def keep_newest(table: dict[NodeId, Value], peer: NodeId, value: Value, limit: int = MAX_PEERS) -> None:
    """Sets a peer's entry in a table of at most `limit` peers: the one set longest ago makes room."""
    table.pop(peer, None)
    table[peer] = value
    while len(table) > limit:
        del table[next(iter(table))]


def _group_fields(scored: ScoredGroup) -> JsonDict:
    return {
        "digest": scored.digest.hex(),
        "producer": scored.group.producer,
        "env": scored.group.env,
        "step": scored.group.oldest_step,
        "bytes": scored.size_bytes,
        "reward": float(scored.rewards.mean()),
    }


def _draw_fields(draw: Draw, config: NodeConfig) -> JsonDict:
    """A draw as an event: enough to check every invariant of a run afterwards."""
    return {
        "step": draw.step,
        "num_silent": draw.num_silent,
        "silent": [digest.hex() for digest in draw.silent],
        "groups": [
            {
                **_group_fields(drawn.scored),
                "age": drawn.age_steps,
                "use": drawn.use,
                "local": drawn.scored.is_local,
            }
            for drawn in draw.groups
        ],
        "max_age_steps": config.replay.max_age_steps,
        "max_reuse": config.replay.max_reuse,
    }


def _step_fields(report: StepReport) -> JsonDict:
    return {
        "step": report.version.step,
        "draw": report.draw_step,
        "digest": report.version.digest.hex()[:16],
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "num_tokens": report.num_tokens,
        "was_skipped": report.was_skipped,
        "diagnostics": report.diagnostics,
        "seconds": report.seconds,
        "ages": list(report.ages_steps),
        "num_local": report.num_local,
        "num_external": report.num_external,
        "edges": [
            {
                "source": edge.source,
                "groups": edge.num_groups,
                "age": edge.age_mean_steps,
                "ess": edge.ess_share,
                "kl": edge.mismatch_kl,
                "reward": edge.reward_mean,
            }
            for edge in report.edges
        ],
    }
