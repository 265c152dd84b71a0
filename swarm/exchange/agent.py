"""The agent: what one node knows, and what it does when a group, a draw or a version arrives.

Invariant: every group is stored before anything else sees it, every foreign group came through the
door, and every draw is journalled before it is handed out. No background task lives here: the loops
that drive an agent are in `swarm.loops`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.errors import ConfigError, RolloutFailed, StorageFull, TooLarge, Unavailable
from swarm.events import (
    DiskFull,
    Emit,
    GroupPut,
    GroupUnscored,
    LoopFailed,
    NodeRestored,
    PolicyEvaluated,
    StepMade,
    VersionPublished,
    mean_and_std,
)
from swarm.exchange.admission import Admission
from swarm.exchange.admission_checks import CLOCK_SKEW_S
from swarm.exchange.capacity import GenerationCapacity
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.group_ingest import GroupIngest
from swarm.exchange.group_stream import GroupStreams
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.flow import RunningMean, Signal
from swarm.identity import Identity
from swarm.interfaces import GroupStore, Offload, Verdict, Verifier
from swarm.peers.coordinator_view import CoordinatorView
from swarm.peers.peer_table import Peers
from swarm.peers.quotas import IntakeQuota
from swarm.types import (
    Advert,
    ApplyReport,
    Correction,
    Digest,
    Draw,
    Evaluation,
    NodeId,
    NodeReport,
    PatchChain,
    PolicyVersion,
    Role,
    RolloutGroup,
    StepReport,
    short,
)
from swarm.weight_sync.credit import CreditLedger
from swarm.weight_sync.follower import WeightFollower
from swarm.weight_sync.version_publisher import VersionPublisher
from swarm.weight_sync.weight_server import WeightServer
from swarm.weights.store import WeightStore

logger = logging.getLogger(__name__)

WAITING_SHARE = 0.5  # of the store, for groups that wait for a draw; the rest is for a resume, and for peers
WINDOW_STEPS = 2  # steps whose groups one follower may have outstanding at most
KEPT_AGES = 10  # times max_age_s: how long a group is served, and known as a duplicate, after nobody may use it


@dataclass(slots=True)
class Counters:
    """Totals since this process started."""

    num_put: int = 0
    tokens_generated: int = 0


class Agent:
    """One node's state; implements `LocalExchange` for its worker.

    `serving` answers its peers, `intake` takes what they send.
    With a weight store a trainer that publishes serves its versions (`version_publisher`) and grants credit to its
    followers; a generator without the trainer role follows one (`weight_follower`).
    """

    def __init__(
        self,
        *,
        config: NodeConfig,
        identity: Identity,
        store: GroupStore,
        replay: ReplayBuffer,
        admission: Admission,
        verifier: Verifier,
        tokenizer_digest: Digest,
        clock: Clock,
        emit: Emit,
        weights: WeightStore | None = None,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        self.config = config
        self.identity = identity
        self.node_id: NodeId = identity.node_id
        self.store = store
        self.replay = replay
        self.replay.limit_bytes(int(WAITING_SHARE * config.exchange.store_bytes))
        self.clock = clock
        self.counters = Counters()
        self.num_failures = 0
        self.peers = Peers(self.node_id)
        self.head = PolicyVersion(policy_id=self.node_id, step=0)
        self.coordination = CoordinatorView(clock)
        self.endpoints: tuple[str, ...] = ()
        self.last_step_at_s = clock.now_s()
        self._admission = admission
        self.versions = admission.versions
        self._verifier = verifier
        self._tokenizer_digest = tokenizer_digest
        self._emit = emit
        intake_quota = IntakeQuota(config.replay, clock)
        self._changed = Signal()  # what a draw or the generator waits for: groups, versions, connections
        self._num_streams: Counter[NodeId] = Counter()  # from each peer: an old one may end after a new one began
        self._num_asked = 0  # groups of ours, tried or stored, since the store began
        self._reward_mean, self._reward_std = RunningMean(memory=0.95), RunningMean(memory=0.95)
        self.drawing = DrawJournal(
            config, store, replay, self.peers, self.coordination, emit, self._changed, intake_quota
        )
        window = WINDOW_STEPS * config.replay.local_groups
        self.credit_ledger = CreditLedger(
            clock, config.replay.max_age_s, window, config.replay.barrier, replay.num_waiting
        )
        admission.credit_ledger = self.credit_ledger
        self._allowance = GenerationCapacity(config, replay, self.drawing, self.credit_ledger, lambda: self.head.step)
        self.weight_server = WeightServer(
            node_id=self.node_id,
            store=weights,
            publishes=config.weights.publish,
            credit_ledger=self.credit_ledger,
            capacity=self._allowance.for_followers,
            require_allowed=self.require_welcome,
            record_version=self.versions.record,
            changed=self._changed,
            offload=offload,
        )
        self.serving = GroupStreams(
            self.node_id, store, config.replay, self.head_of, self.require_welcome, self.weight_server
        )
        self.version_publisher, self.weight_follower = self._weights_side(weights, offload)
        self.intake = GroupIngest(
            node_id=self.node_id,
            config=config,
            admission=admission,
            intake_quota=intake_quota,
            peers=self.peers,
            credit_ledger=self.credit_ledger,
            replay=replay,
            serving=self.serving,
            changed=self._changed,
            emit=emit,
            clock=clock,
            learns=self.weight_follower is None,
        )

    def _weights_side(
        self, weights: WeightStore | None, offload: Offload
    ) -> tuple[VersionPublisher | None, WeightFollower | None]:
        """Who publishes follows nobody; who has no trainer of its own follows one."""
        config = self.config
        if weights is None:
            return None, None
        if config.weights.publish:
            return VersionPublisher(self.identity, weights, self.weight_server, self._emit, offload), None
        if Role.TRAINER in config.roles or Role.GENERATOR not in config.roles:
            return None, None
        weight_follower = WeightFollower(
            config=config,
            node_id=self.node_id,
            store=weights,
            weight_server=self.weight_server,
            changed=self._changed,
            emit=self._emit,
            clock=self.clock,
            offload=offload,
        )
        return None, weight_follower

    # --- restart -------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Refills buffer, journal position and duplicate knowledge from the store after a restart."""
        if self.version_publisher is not None:
            await self.version_publisher.restore()
        num_draws = await self.drawing.restore()
        groups = await self.store.load_scored(self.config.replay.max_groups)
        if self.weight_follower is None:
            self.replay.restore(await self.store.uses(), groups)
        await self.serving.restore(groups)
        for scored in groups:
            if not scored.is_made_here:
                self.peers.learn_head(scored.group)  # so that ages are counted as before the restart
        doubtful_s = self.config.replay.max_age_s + CLOCK_SKEW_S
        self.versions.restore([scored.group for scored in groups], doubtful_s)
        self._num_asked = self.serving.log_head.sequence  # exact alone; groups of others only make it skip numbers
        if groups:
            # a kill can fall between a group's storage and its event: what is held is told again
            held = tuple((scored.digest.hex(), scored.is_made_here) for scored in groups)
            self._emit(NodeRestored(num_groups=len(groups), num_draws=num_draws, held=held))

    # --- own worker: LocalExchange ---------------------------------------------------------------

    async def capacity(self) -> int:
        """Groups that may be started now without becoming too old to use."""
        return self._begin(self._capacity())

    async def wait_capacity(self) -> int:
        """Waits until `capacity()` is positive and returns it."""
        await self._changed.until(lambda: self._capacity() > 0)
        return self._begin(self._capacity())

    async def num_asked(self) -> int:
        """Questions asked so far, restarts included: the number of the next one."""
        return self._num_asked

    async def put(self, group: RolloutGroup) -> float:
        """Scores, seals, stores and publishes one of our groups; returns its mean reward."""
        self._num_asked += 1  # also when it cannot be stored: it is not asked again
        try:
            return await self._put(group)
        finally:
            self._allowance.own_made()

    async def _put(self, group: RolloutGroup) -> float:
        try:
            with self.serving.putting():
                scored, _ = await self._admission.own(group, self.identity)
                await self.serving.read_head()
        except StorageFull as error:
            logger.error("store is full; a rollout group of ours was dropped", extra={"error": str(error)})
            self._emit(DiskFull(error=str(error)))
            return float("nan")
        except (RolloutFailed, TooLarge) as error:
            logger.warning("a rollout group of ours could not be scored", extra={"error": str(error)})
            self._emit(GroupUnscored(env=group.env, error=str(error)))
            return float("nan")
        self.counters.num_put += 1
        self.counters.tokens_generated += group.num_tokens
        mean, std = mean_and_std(scored.rewards)
        self._reward_mean.add(mean)
        self._reward_std.add(std)
        if self.weight_follower is not None:
            self.weight_follower.credit.record_stored()
            self.last_step_at_s = self.clock.now_s()  # what goes on here is generation
        self.intake.add(scored, via=self.node_id)
        self._emit(GroupPut.of(scored))
        return mean

    async def draw(self, head: PolicyVersion) -> Draw:
        """The groups of the next step; the same draw again until it was reported."""
        return await self.drawing.draw(head)

    async def redraw(self, from_step: int) -> list[Draw]:
        """The journalled draws from `from_step` on, rebuilt from the store; those from the first lost one on are
        abandoned, which is told as an event."""
        return await self.drawing.redraw(from_step)

    async def publish(self, version: PolicyVersion, manifests: Sequence[bytes] = ()) -> None:
        """A new version of our own lineage exists; one of a lower step than the last begins a new branch."""
        self.head = version
        self.versions.publish(version)
        self._emit(VersionPublished.of(version))
        self.coordination.note_version(version)
        if self.version_publisher is not None:
            await self.version_publisher.publish(version, manifests)
        self._changed.fire()

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        """How an engine gets from what it holds to the newest version of the followed lineage, as far as it is here."""
        if self.weight_follower is None:
            raise ConfigError("roles: a node with a trainer of its own, or without the generator role, follows nobody")
        return await self.weight_follower.next_update(held, wait=wait)

    async def applied(self, report: ApplyReport) -> None:
        """An engine took a version, or refused it."""
        assert self.weight_follower is not None, "next_update gave no way"
        await self.weight_follower.on_applied(report)

    async def report(self, report: StepReport) -> None:
        """One step was made: its draw is settled, its figures are kept."""
        self.drawing.settle(report)
        self.last_step_at_s = self.clock.now_s()
        self.coordination.note_edges(report.edges)
        self._emit(StepMade.of(report))
        self._changed.fire()  # the next round begins, where there are rounds

    async def tidy(self, max_bytes: int) -> int:
        """Deletes what is too old for anyone, then the oldest beyond a byte budget; returns how many groups.

        What waits for a draw stays, or a draw could not be made again. What the learner would draw again from its
        last checkpoint, or from the one before it, stays unless the store would be full of it: going on comes before
        going back, and a resume then says what it lost (`Drawing.redraw`).
        """
        for weights in (self.version_publisher, self.weight_follower):
            if weights is not None:
                await weights.tidy()
        waiting = self.replay.digests | self.drawing.in_hand
        oldest_s = self.clock.now_s() - KEPT_AGES * self.config.replay.max_age_s
        num_deleted = await self.store.forget(oldest_s, max_bytes, self.drawing.needed_from, waiting)
        return num_deleted + await self.store.forget(0.0, int(1.05 * max_bytes), None, waiting)

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Greedy accuracies were measured."""
        for entry in evaluations:
            self.coordination.evaluations[f"{entry.env}/{entry.split}"] = entry.accuracy
            self._emit(PolicyEvaluated.of(entry))

    async def score(self, env: str, task_id: int, answers: Sequence[str]) -> Verdict:
        """The sandboxed verifier."""
        return await self._verifier.score(env, task_id, answers)

    # --- peers -------------------------------------------------------------------------------------

    @property
    def served(self) -> PolicyVersion:
        """The newest version here: of our own lineage, or what our engine took of the one that we follow."""
        return self.head if self.weight_follower is None else self.weight_follower.head

    @property
    def offered(self) -> PolicyVersion:
        """`served` as the advert says it: with a digest only where its weights can be had here."""
        is_had = self.version_publisher is not None or self.weight_follower is not None
        return self.served if is_had else replace(self.served, digest=b"")

    async def offers_other_weights(self, told: PolicyVersion) -> None:
        """Waits until `offered` is of another lineage than was told, or has weights for the first time: those who
        follow it should find us."""
        of = (told.policy_id, bool(told.digest))
        await self._changed.until(lambda: (self.offered.policy_id, bool(self.offered.digest)) != of)

    def head_of(self, policy_id: NodeId) -> PolicyVersion | None:
        """Newest known head of a lineage, ours included."""
        return self.head if policy_id == self.node_id else self.peers.heads.get(policy_id)

    async def set_connected(self, peer: NodeId, is_connected: bool) -> None:
        """A stream from `peer` was opened or has ended."""
        self._num_streams[peer] += 1 if is_connected else -1
        if self._num_streams[peer] > 0:
            self.peers.connected.add(peer)
        else:
            del self._num_streams[peer]
            self.peers.connected.discard(peer)
        self._changed.fire()

    def is_welcome(self, peer: NodeId) -> bool:
        """False while the peer's standing is below the floor: we neither follow nor serve it until it has decayed."""
        return self._admission.is_open_to(peer)

    def require_welcome(self, peer: NodeId) -> None:
        """Raises Unavailable for a peer that is not welcome now."""
        if not self.is_welcome(peer):
            raise Unavailable(f"the standing of {short(peer)} is below the floor; it decays with time")

    def expire_credit(self) -> None:
        """Frees the credit that followers did not use in time, for others and for our own generator."""
        if self.credit_ledger.expire():
            self._changed.fire()

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
            head=self.offered,
            oldest_step=self.serving.oldest_own_step,
            num_groups=self.counters.num_put,
            reward_mean=self._reward_mean.value or 0.0,
            reward_std=self._reward_std.value or 0.0,
            correction=Correction.EXACT,
            held_bytes=statistics.num_bytes,
            cursor=self.serving.log_head,
            expires_at_s=self.clock.now_s() + 3 * self.config.exchange.advert_every_s,
        )

    def node_report(self, tokens_per_s: float) -> NodeReport:
        """This node's figures for the coordinator."""
        return NodeReport(
            node_id=self.node_id,
            name=self.config.name or short(self.node_id),
            roles=self.config.roles,
            endpoints=self.endpoints,
            head=self.served,
            tokens_per_s=tokens_per_s,
            reward_mean=self._reward_mean.value or 0.0,
            num_local=self.drawing.num_local,
            num_external=self.drawing.num_external,
            num_refused=sum(self.intake.refusals.values()),
            edges=tuple(self.coordination.edges.values()),
            evaluations=dict(self.coordination.evaluations),
        )

    def record_failure(self, loop: str, error: Exception) -> None:
        """An unexpected exception ended a loop: counted, and visible in every report."""
        self.num_failures += 1
        self._emit(LoopFailed(loop=loop, error=f"{type(error).__name__}: {error}"))

    # --- inside --------------------------------------------------------------------------------------

    def _capacity(self) -> int:
        return self._allowance.for_own() if self.weight_follower is None else self.weight_follower.capacity()

    def _begin(self, count: int) -> int:
        return count if self.weight_follower is not None else self._allowance.own_begins(count)
