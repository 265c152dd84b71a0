"""The agent: what one node knows, and what it does when a group, a draw or a version arrives.

Invariant: every group is stored before anything else sees it, every group of another node went through admission, and
every draw is journalled before it is handed out. No background task lives here: the loops that drive an agent are in
`swarm.loops`.
"""

from collections.abc import Sequence
from dataclasses import replace

from swarm.errors import ConfigError
from swarm.events import LoopFailed, NodeRestored, PolicyEvaluated, StepMade, VersionPublished
from swarm.exchange.admission import Admission
from swarm.exchange.capacity import GenerationCapacity
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.group_ingest import GroupIngest
from swarm.exchange.group_stream import GroupStreams
from swarm.exchange.known_versions import KnownVersions
from swarm.exchange.own_groups import OwnGroups
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.exchange.staleness import CLOCK_SKEW_S
from swarm.interfaces import GroupStore, Tokenizer, Verdict, Verifier
from swarm.node_context import NodeContext
from swarm.peers.coordinator_client import CoordinatorView
from swarm.peers.peer_table import Peers
from swarm.peers.quotas import IntakeQuota
from swarm.peers.reputation import Reputation
from swarm.types import (
    Advert,
    ApplyReport,
    Correction,
    Draw,
    Evaluation,
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

WAITING_SHARE = 0.5  # of the store, for groups that wait for a draw; the rest is for a resume, and for peers
WINDOW_STEPS = 2  # steps whose groups one follower may have outstanding at most
KEPT_AGES = 10  # times max_age_s: how long a group is served, and known as a duplicate, after nobody may use it


class Agent:
    """One node's state; implements `LocalExchange` for its worker.

    `streams` answers its peers, `ingest` takes what they send, `own_groups` takes what its generator made, `journal`
    hands out what the learner learns from. With a weight store a trainer that publishes serves its versions
    (`version_publisher`) and gives credit to those who follow it; a generator without the trainer role follows one
    (`weight_follower`).

    Args:
        context: of the node.
        store: of groups.
        tokenizer: of this node's model.
        verifier: scores answers in the sandbox.
        weights: of a node that publishes or follows.
        environments: names this node can rebuild; those of the configuration when left out.
        usable: what this node's recipe may learn from.
        replay: a test puts its own buffer here.
        admission_type: a test puts its own class here.
    """

    def __init__(
        self,
        context: NodeContext,
        *,
        store: GroupStore,
        tokenizer: Tokenizer,
        verifier: Verifier,
        weights: WeightStore | None = None,
        environments: frozenset[str] | None = None,
        usable: frozenset[Correction] = frozenset(Correction),
        replay: ReplayBuffer | None = None,
        admission_type: type[Admission] = Admission,
    ) -> None:
        self.context, self.config, self.clock, self.node_id = context, context.config, context.clock, context.node_id
        self.store, self._tokenizer, self._verifier = store, tokenizer, verifier
        self.endpoints: tuple[str, ...] = ()
        self.num_failures = 0
        self._last_step_at_s = self.clock.now_s()
        config, exchange = self.config, self.config.exchange

        # what is known of the others
        self.peers = Peers(self.node_id)
        self.versions = KnownVersions(self.node_id, self.clock)
        self.reputation = Reputation(self.clock, exchange.groups_per_minute)
        self.coordinator_view = CoordinatorView(self.clock)
        intake_quota = IntakeQuota(config.replay, self.clock)

        # what waits for a step, and how much more may be begun
        self.replay = replay or ReplayBuffer(config.replay, self.node_id, config.seed, self.clock)
        self.replay.limit_bytes(int(WAITING_SHARE * exchange.store_bytes))
        self.journal = DrawJournal(
            context,
            store=store,
            replay=self.replay,
            peers=self.peers,
            coordinator_view=self.coordinator_view,
            intake_quota=intake_quota,
        )
        window = WINDOW_STEPS * config.replay.local_groups
        self.credit_ledger = CreditLedger(
            self.clock, config.replay.max_age_s, window, config.replay.barrier, self.replay.num_waiting
        )
        self._generation = GenerationCapacity(
            config, replay=self.replay, journal=self.journal, credit_ledger=self.credit_ledger, peers=self.peers
        )

        # what goes out: weights, and groups
        self.weight_server = WeightServer(
            context,
            store=weights,
            credit_ledger=self.credit_ledger,
            capacity=self._generation.for_followers,
            reputation=self.reputation,
            record_version=self.versions.record,
        )
        self.version_publisher = self._make_publisher(weights)
        self.weight_follower = self._make_follower(weights)
        self.streams = GroupStreams(
            context, store=store, peers=self.peers, reputation=self.reputation, weight_server=self.weight_server
        )

        # what comes in: our own groups, and those of peers
        self.own_groups = OwnGroups(
            context,
            store=store,
            tokenizer=tokenizer,
            verifier=verifier,
            replay=self.replay,
            streams=self.streams,
            follower=self.weight_follower,
        )
        self.admission = admission_type(
            context,
            store=store,
            tokenizer=tokenizer,
            verifier=verifier,
            peers=self.peers,
            versions=self.versions,
            reputation=self.reputation,
            credit_ledger=self.credit_ledger,
            environments=environments,
            usable=usable,
        )
        self.ingest = GroupIngest(
            context,
            admission=self.admission,
            intake_quota=intake_quota,
            peers=self.peers,
            reputation=self.reputation,
            credit_ledger=self.credit_ledger,
            replay=self.replay,
            streams=self.streams,
            learns=self.weight_follower is None,
        )

    def _make_publisher(self, weights: WeightStore | None) -> VersionPublisher | None:
        if weights is None or not self.config.weights.publish:
            return None
        return VersionPublisher(self.context, weights, self.weight_server)

    def _make_follower(self, weights: WeightStore | None) -> WeightFollower | None:
        """A node that publishes follows nobody; a generator without a trainer of its own follows one."""
        config = self.config
        if weights is None or config.weights.publish:
            return None
        if Role.TRAINER in config.roles or Role.GENERATOR not in config.roles:
            return None
        return WeightFollower(self.context, weights, self.weight_server)

    # --- restart -------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Refills buffer, journal position and duplicate knowledge from the store after a restart."""
        if self.version_publisher is not None:
            await self.version_publisher.restore()
        num_draws = await self.journal.restore()
        groups = await self.store.load_scored(self.config.replay.max_groups)
        if self.weight_follower is None:
            self.replay.restore(await self.store.uses(), groups)
        await self.streams.restore(groups)
        for scored in groups:
            if not scored.is_made_here:
                self.peers.learn_head(scored.group)  # so that ages are counted as before the restart
        doubtful_s = self.config.replay.max_age_s + CLOCK_SKEW_S
        self.versions.restore([scored.group for scored in groups], doubtful_s)
        # Exact on a node alone; groups of other nodes in the log only make it skip numbers.
        self.own_groups.num_asked = self.streams.log_head.sequence
        if groups:
            # A kill can fall between a group's storage and its event, so the event lists what is held.
            held = tuple((scored.digest.hex(), scored.is_made_here) for scored in groups)
            self.context.emit(NodeRestored(num_groups=len(groups), num_draws=num_draws, held=held))

    # --- own worker: LocalExchange ---------------------------------------------------------------

    async def capacity(self) -> int:
        """Groups that may be started now without becoming too old to use."""
        return self._begin(self._capacity())

    async def wait_capacity(self) -> int:
        """Waits until `capacity()` is positive and returns it."""
        await self.context.changed.until(lambda: self._capacity() > 0)
        return self._begin(self._capacity())

    async def num_asked(self) -> int:
        """Questions asked so far, restarts included: the number of the next one."""
        return self.own_groups.num_asked

    async def put(self, group: RolloutGroup) -> float:
        """Scores, seals, stores and hands on one of our groups; returns its mean reward, NaN where it was dropped."""
        try:
            return await self.own_groups.put(group)
        finally:
            self._generation.own_made()

    async def draw(self, head: PolicyVersion) -> Draw:
        """The groups of the next step; the same draw again until it was reported."""
        return await self.journal.draw(head)

    async def redraw(self, from_step: int) -> list[Draw]:
        """The journalled draws from `from_step` on, rebuilt from the store; those from the first lost one on are
        abandoned, with an event."""
        return await self.journal.redraw(from_step)

    async def publish(self, version: PolicyVersion, manifests: Sequence[bytes] = ()) -> None:
        """A new version of our own lineage exists; one of a lower step than the last begins a new branch."""
        self.peers.own_head = version
        self.versions.publish(version)
        self.context.emit(VersionPublished.of(version))
        self.coordinator_view.queue_version(version)
        if self.version_publisher is not None:
            await self.version_publisher.publish(version, manifests)
        self.context.changed.fire()

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        """How an engine gets from what it holds to the newest version of the followed lineage, as far as it is here."""
        if self.weight_follower is None:
            raise ConfigError("roles: a node with a trainer of its own, or without the generator role, follows nobody")
        return await self.weight_follower.next_update(held, wait=wait)

    async def applied(self, report: ApplyReport) -> None:
        """An engine took a version, or refused it."""
        assert self.weight_follower is not None, "next_update gave no patch chain"
        await self.weight_follower.on_applied(report)

    async def report(self, report: StepReport) -> None:
        """One step was made: its draw is settled, its figures are kept."""
        self.journal.settle(report)
        self._last_step_at_s = self.clock.now_s()
        self.coordinator_view.record_edges(report.edges)
        self.context.emit(StepMade.of(report))
        self.context.changed.fire()  # the next round begins, where there are rounds

    async def tidy(self, max_bytes: int) -> int:
        """Deletes what is too old for anyone, then the oldest beyond a byte budget; returns how many groups.

        What waits for a draw stays, or a draw could not be made again. What the learner would draw again from its
        last checkpoint, or from the one before it, stays unless the store would be full of it: going on comes before
        going back, and a resume then says what it lost (`DrawJournal.redraw`).
        """
        for weights in (self.version_publisher, self.weight_follower):
            if weights is not None:
                await weights.tidy()
        waiting = self.replay.digests | self.journal.in_hand
        oldest_s = self.clock.now_s() - KEPT_AGES * self.config.replay.max_age_s
        num_deleted = await self.store.forget(oldest_s, max_bytes, self.journal.needed_from, waiting)
        return num_deleted + await self.store.forget(0.0, int(1.05 * max_bytes), None, waiting)

    async def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Greedy accuracies were measured."""
        for entry in evaluations:
            self.coordinator_view.evaluations[f"{entry.env}/{entry.split}"] = entry.accuracy
            self.context.emit(PolicyEvaluated.of(entry))

    async def score(self, env: str, task_id: int, answers: Sequence[str]) -> Verdict:
        """The sandboxed verifier."""
        return await self._verifier.score(env, task_id, answers)

    # --- peers -------------------------------------------------------------------------------------

    @property
    def head(self) -> PolicyVersion:
        """The newest version of our own lineage."""
        return self.peers.own_head

    @property
    def last_step_at_s(self) -> float:
        """Wall clock of the newest step, or of the newest group on a node that only generates."""
        return self._last_step_at_s if self.weight_follower is None else self.own_groups.last_put_at_s

    @property
    def served(self) -> PolicyVersion:
        """The newest version here: of our own lineage, or what our engine took of the one that we follow."""
        return self.head if self.weight_follower is None else self.weight_follower.head

    @property
    def offered(self) -> PolicyVersion:
        """`served` as the advert says it: with a digest only where its weights can be had here."""
        is_had = self.version_publisher is not None or self.weight_follower is not None
        return self.served if is_had else replace(self.served, digest=b"")

    async def wait_offer_changed(self, advertised: PolicyVersion) -> None:
        """Waits until the advert must change: another lineage is offered, or weights for the first time."""
        of = (advertised.policy_id, bool(advertised.digest))
        await self.context.changed.until(lambda: (self.offered.policy_id, bool(self.offered.digest)) != of)

    # --- what others may know about us ------------------------------------------------------------

    def advert(self) -> Advert:
        """This node's record for the directory."""
        statistics = self.replay.statistics()
        return Advert(
            node_id=self.node_id,
            run_id=self.config.run_id,
            endpoints=self.endpoints,
            roles=self.config.roles,
            tokenizer_digest=self._tokenizer.digest,
            head=self.offered,
            oldest_step=self.streams.oldest_own_step,
            num_groups=self.own_groups.num_put,
            reward_mean=self.own_groups.reward_mean.value or 0.0,
            reward_std=self.own_groups.reward_std.value or 0.0,
            correction=Correction.EXACT,
            held_bytes=statistics.num_bytes,
            cursor=self.streams.log_head,
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
            reward_mean=self.own_groups.reward_mean.value or 0.0,
            num_local=self.journal.num_local,
            num_external=self.journal.num_external,
            num_refused=sum(self.ingest.refusals.values()),
            edges=tuple(self.coordinator_view.edges.values()),
            evaluations=dict(self.coordinator_view.evaluations),
        )

    def record_failure(self, loop: str, error: Exception) -> None:
        """An unexpected exception ended a loop: counted, and visible in every report."""
        self.num_failures += 1
        self.context.emit(LoopFailed(loop=loop, error=f"{type(error).__name__}: {error}"))

    # --- inside --------------------------------------------------------------------------------------

    def _capacity(self) -> int:
        return self._generation.for_own() if self.weight_follower is None else self.weight_follower.capacity()

    def _begin(self, count: int) -> int:
        return count if self.weight_follower is not None else self._generation.own_begins(count)
