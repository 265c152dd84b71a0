"""The agent: what one node knows, and what it does when a group, a draw or a version arrives.

Invariant: every group is stored before anything else sees it, every foreign group came through the
door, and every draw is journalled before it is handed out. No background task lives here: the loops
that drive an agent are in `swarm.loops`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.errors import NotHeld, StorageFull
from swarm.exchange.admit import Door
from swarm.exchange.replay import ReplayBuffer
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
    Refused,
    RefusalReason,
    RolloutGroup,
    ScoredGroup,
    Role,
    SealedGroup,
    StepReport,
    short,
)

logger = logging.getLogger(__name__)

Emit = Callable[[str, JsonDict], None]  # event kind, fields

SUBSCRIBE_BATCH = 32  # log entries read from the store at a time
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
        self.advice = Advice()
        self.pending_versions: list[PolicyVersion] = []
        self.edges: dict[NodeId, EdgeReport] = {}
        self.evaluations: dict[str, float] = {}
        self.endpoints: tuple[str, ...] = ()
        self.last_step_at_s = clock.now_s()
        self._door = door
        self._verifier = verifier
        self._tokenizer_digest = tokenizer_digest
        self._emit = emit
        self._changed = asyncio.Condition()
        self._fresh: dict[Digest, tuple[NodeId, int]] = {}  # producer and oldest step of groups in the log
        self._next_draw = 1
        self._pending_draw: Draw | None = None
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
            self._remember(scored)
        self._log_head = await self.store.head()
        if groups:
            self._emit("restored", {"groups": len(groups), "draws": len(journal)})

    # --- own worker: LocalExchange ---------------------------------------------------------------

    async def capacity(self) -> int:
        """Groups that may be started now without becoming too old to use."""
        return self.replay.capacity(self.head.step, running=0)

    async def wait_capacity(self) -> int:
        """Waits until `capacity()` is positive and returns it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.replay.capacity(self.head.step, running=0) > 0)
            return self.replay.capacity(self.head.step, running=0)

    async def put(self, group: RolloutGroup) -> float:
        """Scores, seals, stores and publishes one of our groups; returns its mean reward."""
        try:
            scored, _ = await self._door.own(group, self.identity)
        except StorageFull as error:
            logger.error("store is full; a rollout group of ours was dropped", extra={"error": str(error)})
            self._emit("storage_full", {"error": str(error)})
            return float("nan")
        self._log_head = await self.store.head()
        self.counters.num_put += 1
        self.counters.tokens_generated += group.num_tokens
        decay = 0.95 if self.counters.num_put > 1 else 0.0
        mean = float(scored.rewards.mean())
        self._reward_mean = decay * self._reward_mean + (1 - decay) * mean
        self._reward_std = decay * self._reward_std + (1 - decay) * float(scored.rewards.std())
        await self._add(scored)
        self._emit("put", {**_group_fields(scored), "tokens": group.num_tokens})
        return mean

    async def draw(self, head: PolicyVersion) -> Draw:
        """The groups of the next step; the same draw again until it was reported."""
        if self._pending_draw is not None:
            return self._pending_draw
        async with self._changed:
            await self._changed.wait_for(self._round_is_complete)
            draw: Draw | None = None
            while draw is None:
                self.replay.limit_age(self.advice.max_age_steps)
                draw = self.replay.draw(self._next_draw, head, self.heads.get, self._source_weights())
                if draw is None:
                    await self._changed.wait()
        await self.store.record_draw(draw)
        self._pending_draw = draw
        self._next_draw = draw.step + 1
        self.counters.num_local_used += sum(d.scored.is_local for d in draw.groups) + draw.num_silent
        self.counters.num_external_used += sum(not d.scored.is_local for d in draw.groups)
        self._emit("draw", _draw_fields(draw, self.config))
        async with self._changed:
            self._changed.notify_all()  # room for the generator
        return draw

    async def redraw(self, from_step: int) -> list[Draw]:
        """The journalled draws from `from_step` on, rebuilt from the store; stops at the first lost group."""
        return await self.store.draws(from_step)

    async def publish(self, version: PolicyVersion) -> None:
        """A new version of our own lineage exists."""
        self.head = version
        if len(self.pending_versions) < MAX_PENDING_VERSIONS:
            self.pending_versions.append(version)
        async with self._changed:
            self._changed.notify_all()

    async def report(self, report: StepReport) -> None:
        """One step was made: its draw is settled, its figures are kept."""
        self._pending_draw = None
        self.last_step_at_s = self.clock.now_s()
        for edge in report.edges:
            self.edges[edge.source] = edge
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

    # --- peers: receiving ------------------------------------------------------------------------

    async def receive(self, sealed: SealedGroup, via: NodeId) -> ScoredGroup | Refused:
        """Passes a foreign group through the door; an admitted one is stored and offered to the learner."""
        self.counters.bytes_received += sealed.size_bytes
        result = await self._door.admit(sealed, via)
        if isinstance(result, Refused):
            self.refusals[result.reason] = self.refusals.get(result.reason, 0) + 1
            self._emit("refused", {"reason": str(result.reason), "producer": result.producer or via})
            logger.debug("group refused", extra={"reason": str(result.reason), "detail": result.detail, "via": short(via)})
            return result
        self.counters.num_admitted += 1
        self._log_head = await self.store.head()
        self._learn_head(result.group)
        await self._add(result)
        self._emit("admitted", {**_group_fields(result), "via": via, "age_s": self.clock.now_s() - result.group.created_at_s})
        return result

    def hear(self, adverts: Sequence[Advert]) -> None:
        """Takes the newest signed head of each peer from the directory."""
        for advert in adverts:
            known = self.heads.get(advert.node_id)
            if advert.node_id != self.node_id and (known is None or advert.head.step > known.step):
                self.heads[advert.node_id] = advert.head

    async def set_connected(self, peer: NodeId, is_connected: bool) -> None:
        """A stream from `peer` was opened or has ended."""
        (self.connected.add if is_connected else self.connected.discard)(peer)
        async with self._changed:
            self._changed.notify_all()

    # --- peers: serving (ExchangeHandler) ---------------------------------------------------------

    async def subscribe(self, peer: NodeId, cursor: Cursor, relay: bool) -> AsyncIterator[StreamItem]:
        """Own groups after `cursor`, then live ones; with `relay` also notices of other nodes' groups."""
        logger.debug("peer subscribed", extra={"peer": short(peer), "relay": relay})
        while True:
            newest = self._log_head
            entries = await self.store.since(cursor, SUBSCRIBE_BATCH, own_only=not relay)
            for cursor, sealed in entries:
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
                async with self._changed:
                    await self._changed.wait_for(lambda at=newest: self._log_head != at)

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        """A held group, ours or another node's. Raises NotHeld."""
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
            oldest_step=min((step for producer, step in self._fresh.values() if producer == self.node_id), default=0),
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

    async def _add(self, scored: ScoredGroup) -> None:
        self.replay.add(scored)
        self._remember(scored)
        async with self._changed:
            self._changed.notify_all()

    def _remember(self, scored: ScoredGroup) -> None:
        self._fresh[scored.digest] = (scored.group.producer, scored.group.oldest_step)
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
            self.heads[group.producer] = newest
        self.delivered_steps[group.producer] = max(newest.step, self.delivered_steps.get(group.producer, 0))

    def _is_worth_sending(self, sealed: SealedGroup, peer: NodeId) -> bool:
        """Not what the peer made itself, nor what is older than anyone may use."""
        if sealed.producer == peer:
            return False
        producer, step = self._fresh.get(sealed.digest, (sealed.producer, -1))
        head = self.head if producer == self.node_id else self.heads.get(producer)
        return step >= 0 and (head is None or head.step - step <= self.config.replay.max_age_steps)

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
