"""The agent: what one node knows, and what it does when a group, a draw or a version arrives.

Invariant: every group is stored before anything else sees it, every group of another node went through admission, and
every draw is journalled before it is handed out. No background task lives here: the loops that drive an agent are in
`swarm.loops`.
"""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from swarm.clock import CLOCK_SKEW_S
from swarm.environments.sandbox.time_accounts import TimeAccounts
from swarm.episode import Actions, EpisodeOutcome
from swarm.errors import ConfigError
from swarm.events import LoopFailed, NodeRestored, OthersSetAside, PolicyEvaluated, StepMade, VersionPublished
from swarm.exchange.admission import Admission
from swarm.exchange.capacity import GenerationCapacity
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.draw_shares import DrawShares
from swarm.exchange.group_ingest import GroupIngest
from swarm.exchange.group_stream import GroupStreams
from swarm.exchange.known_versions import KnownVersions
from swarm.exchange.novelty import Novelty
from swarm.exchange.own_groups import MadeSinceStep, OwnGroups
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.interfaces import EnvironmentShape, GroupStore, Tokenizer, Verdict, Verifier
from swarm.node_context import NodeContext
from swarm.peers.address_book import AddressBook, anchor_of
from swarm.peers.coordinator_client import CoordinatorView
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.peers.peer_table import Peers
from swarm.peers.quotas import IntakeQuota
from swarm.peers.reputation import Reputation
from swarm.types import (
    Advert,
    ApplyReport,
    Attempt,
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
ESTABLISHED = 2  # `Agent.standing` of who counts in full in a run where not everybody does


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
        entry: who may take part in the run; None: as the configuration says.
        replay: a test puts its own buffer here.
        admission_type: a test puts its own class here.
        accounts: of the seconds that groups take before they are admitted; None: nobody's is bounded.
        shapes: of the environments, as far as the verifier has told them.
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
        entry: EntryRule | None = None,
        replay: ReplayBuffer | None = None,
        admission_type: type[Admission] = Admission,
        accounts: TimeAccounts | None = None,
        shapes: Mapping[str, EnvironmentShape] | None = None,
    ) -> None:
        self.context, self.config, self.clock, self.node_id = context, context.config, context.clock, context.node_id
        self.store, self._tokenizer, self._verifier = store, tokenizer, verifier
        self.endpoints: tuple[str, ...] = ()
        self.is_leaving = False
        self.credential: Callable[[], bytes] = bytes  # what our advert shows
        self.relay_reservations: Callable[[], int] = int  # free ones, for nodes that cannot be dialled
        self.num_failures = 0
        self._last_step_at_s = self.clock.now_s()
        self.idle_figures: Mapping[str, float] = {}  # of the newest step, where the guard set all sources aside
        self._are_others_held = False  # the learner's guard set groups of other nodes aside
        config = self.config

        # what is known of the others
        anchors = tuple(map(anchor_of, config.exchange.anchors))
        self.address_book = AddressBook(self.clock, random.Random(f"address book {self.node_id}"), anchors)
        versions = self.versions = KnownVersions(self.node_id, self.clock)
        rule = entry or EntryRule(config.entry, config.run_id, self.clock, config.coordinator.fingerprint)
        self.entry_rule = rule  # one for sessions, records, relayed groups and parties
        parties = self.parties = Parties(None if config.is_private else rule, self.address_book.endpoint_of)
        peers = self.peers = Peers(self.node_id, lambda peer: not parties.is_private and parties.is_established(peer))
        reputation = self.reputation = Reputation(
            self.clock, config.exchange.groups_per_minute, is_denied=rule.is_denied
        )
        self.coordinator_view = CoordinatorView(self.clock)
        quota = IntakeQuota(config.replay, self.clock)

        # what waits for a step, and how much more may be begun
        replay = self.replay = replay or ReplayBuffer(config.replay, self.node_id, config.seed, self.clock)
        replay.limit_stored_bytes(int(WAITING_SHARE * config.exchange.store_bytes))
        shares = DrawShares(parties, config.replay.max_reuse)
        replay.limit_shares(shares)
        self.paused_since_s: float | None = None  # wall clock; None: it works
        self.journal = DrawJournal(
            context, store, replay, peers, self.coordinator_view, quota, reputation, shares, lambda: self.is_paused
        )
        window = WINDOW_STEPS * config.replay.local_groups
        # An own generator begins what followers get no credit for: it slows no step, and they would be left with none.
        takes_off = Role.GENERATOR not in config.roles
        credit = self.credit_ledger = CreditLedger(
            self.clock,
            config.replay.max_age_s,
            window,
            in_rounds=config.replay.barrier,
            num_waiting=replay.num_waiting,
            parties=parties,
            most_taken_off=lambda: replay.most_taken_off if takes_off else 0,
        )
        replay.share_room(credit)
        generation = self._generation = GenerationCapacity(config, replay, self.journal, credit, peers)

        # what goes out: weights, and groups
        self.weight_server = WeightServer(
            context,
            weights,
            credit,
            lambda: 0 if self.is_paused else generation.for_followers(),
            reputation,
            versions.record,
        )
        self.version_publisher = self._make_publisher(weights)
        follower = self.weight_follower = self._make_follower(weights)
        streams = self.streams = GroupStreams(context, store, peers, reputation, self.weight_server, parties.origin_of)

        # what comes in: our own groups, and those of peers
        novelty = self.novelty = Novelty(
            lambda digest: replay.discard(digest, "copied"),
            lambda producer: producer == self.node_id or parties.is_established(producer),
        )
        self.own_groups = OwnGroups(context, store, tokenizer, verifier, replay, streams, follower, novelty)
        if environments is None:
            environments = frozenset(env.name for env in config.environments)
        self.admission = admission_type(
            context,
            store,
            tokenizer,
            verifier,
            peers,
            versions,
            reputation,
            credit,
            environments,
            usable,
            rule,
            novelty,
            parties.origin_of,
            parties.is_established,
            accounts or TimeAccounts(),
            {} if shapes is None else shapes,
        )
        self._learns = follower is None and config.roles != (Role.RELAY,)
        self.ingest = GroupIngest(
            context, self.admission, quota, peers, reputation, parties, credit, replay, streams, novelty, self._learns
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
        return WeightFollower(self.context, weights, self.weight_server, self.reputation.condemn)

    # --- restart -------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Refills buffer, journal position and duplicate knowledge from the store after a restart."""
        if self.version_publisher is not None:
            await self.version_publisher.restore()
        num_draws = await self.journal.restore()
        groups = await self.store.load_scored(self.config.replay.max_groups, self.config.replay.max_bytes)
        usable = await self.context.offload(lambda: [*filter(self.admission.is_well_formed, groups)])
        if len(usable) < len(groups):  # also where max_new_tokens is another one now
            left_out = {"left_out": len(groups) - len(usable), "of": len(groups)}
            logger.warning("stored groups are not learned from: their form is not that of this run", extra=left_out)
        if self._learns:
            self.replay.restore(await self.store.uses(), usable)
        await self.streams.restore(usable)
        learned = await self.context.offload(lambda: [*map(self.admission.as_learned, groups)])
        for scored, answers in zip(groups, learned, strict=True):
            if scored.is_made_here:
                self.novelty.measure_own(scored.group)
            elif scored.is_own_policy(self.node_id) and self.parties.is_established(scored.group.producer):
                self.novelty.measure_follower(scored.group, self.parties.party_of(scored.group.producer))
            self.novelty.record(answers, scored.digest, self.novelty.order(answers))
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

    # --- own worker: LocalExchange, whose docstrings hold ----------------------------------------

    async def wait_capacity(self) -> int:
        """Waits until `capacity()` is positive and returns it; the generator begins a batch of so many groups."""
        await self.context.changed.until(lambda: self.capacity() > 0)
        return (
            self.capacity() if self.weight_follower is not None else self._generation.begin_own_batch(self.capacity())
        )

    async def num_asked(self) -> int:
        return self.own_groups.num_asked

    async def put(self, group: RolloutGroup) -> float:
        """Scores, seals, stores and hands on one of our groups; returns its mean reward, NaN where it was dropped."""
        try:
            return await self.own_groups.put(group)
        finally:
            self._generation.end_own_group()

    async def draw(self, head: PolicyVersion) -> Draw:
        return await self.journal.draw(head)

    async def redraw(self, from_step: int) -> list[Draw]:
        draws = await self.journal.redraw(from_step)
        made = [
            replace(draw, groups=tuple(g for g in draw.groups if self.admission.is_well_formed(g.scored)))
            for draw in draws
        ]
        return [draw for draw in made if draw.groups]

    async def begin_again(self, step: int, passed: Digest | None = None) -> Attempt:
        await self.resumed()
        return await self.journal.begin_again(step, passed)

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
        if self.weight_follower is None:
            raise ConfigError("roles: a node with a trainer of its own, or without the generator role, follows nobody")
        if wait:
            await self.resumed()
        return await self.weight_follower.next_update(held, wait=wait)

    async def report_update(self, report: ApplyReport) -> None:
        assert self.weight_follower is not None, "next_update gave no patch chain"
        await self.weight_follower.on_applied(report)

    async def report_step(self, report: StepReport) -> None:
        await self.journal.settle(report)
        if not report.was_skipped:
            self._last_step_at_s = self.clock.now_s()
            self.own_groups.since_step = MadeSinceStep()
        self.idle_figures = report.diagnostics if report.diagnostics.get("guard_idle_draws") else {}
        self.coordinator_view.record_edges(report.edges)
        self.context.emit(StepMade.of(report))
        are_held = bool(report.diagnostics.get("guard_others_held"))
        if are_held != self._are_others_held:
            self._are_others_held = are_held
            self.context.emit(OthersSetAside(step=report.version.step, is_over=not are_held))
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

    async def report_checkpoint(self, next_draw: int, error: str = "") -> None:
        await self.journal.record_checkpoint(next_draw, error)

    async def report_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        for entry in evaluations:
            self.coordinator_view.evaluations[f"{entry.env}/{entry.split}"] = entry.accuracy
            self.context.emit(PolicyEvaluated.of(entry))

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        return await self._verifier.verify(env, task_id, episodes)

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        return await self._verifier.step(env, task_id, actions)

    # --- pause -------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """The owner of the machine paused it: no batch and no step begins, and nothing is taken in."""
        return self.paused_since_s is not None

    def pause(self, since_s: float) -> None:
        """Begins nothing more until `resume`; what is under way ends. `since_s`: wall clock."""
        self.paused_since_s = since_s
        self.context.changed.fire()

    def resume(self) -> None:
        """Goes on after a pause, with the groups that waited."""
        if self.paused_since_s is not None:
            self.replay.outlast_pause(self.paused_since_s)
            self.paused_since_s = None
            self._last_step_at_s = self.own_groups.last_put_at_s = self.clock.now_s()  # nothing was late
            self.context.changed.fire()

    async def resumed(self) -> None:
        """Waits until the node is not paused."""
        await self.context.changed.until(lambda: not self.is_paused)

    # --- state -------------------------------------------------------------------------------------

    def capacity(self) -> int:
        """Groups that our generator may start now without any becoming too old to use."""
        if self.is_paused:
            return 0
        return self._generation.for_own() if self.weight_follower is None else self.weight_follower.capacity()

    @property
    def head(self) -> PolicyVersion:
        """The newest version of our own lineage."""
        return self.peers.own_head

    @property
    def last_step_at_s(self) -> float:
        """Wall clock of the newest step, or of the newest group on a node that only generates."""
        return self._last_step_at_s if self.weight_follower is None else self.own_groups.last_put_at_s

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest version here: of our own lineage, or what our engine took of the one that we follow."""
        return self.head if self.weight_follower is None else self.weight_follower.head

    @property
    def advertised_version(self) -> PolicyVersion:
        """`newest_version` as the advert says it: with a digest only where its weights can be had here."""
        is_had = self.version_publisher is not None or self.weight_follower is not None
        return self.newest_version if is_had else replace(self.newest_version, digest=b"")

    async def wait_offer_changed(self, advert: Advert) -> None:
        """Waits until the advert must change: other endpoints, another lineage, weights for the first time, a proof."""

        def offer(endpoints: tuple[str, ...], head: PolicyVersion, equivocator: str) -> tuple[object, ...]:
            return endpoints, head.policy_id, bool(head.digest), equivocator

        of = offer(advert.endpoints, advert.head, advert.equivocator)
        await self.context.changed.until(lambda: offer(self._offered, self.advertised_version, self._equivocator) != of)

    @property
    def _offered(self) -> tuple[str, ...]:
        """Where others find this node; nowhere once it leaves: else they dial it in vain until its advert ends."""
        return () if self.is_leaving else self.endpoints

    @property
    def _equivocator(self) -> str:
        """The owner that was proven false last, as the advert names it; empty where none was."""
        return next(reversed(self.weight_server.proofs), "")[:16]

    def is_alive(self, node_id: NodeId) -> bool:
        """Whether that peer is in the swarm for sure: it proved its key to us, or its groups were admitted."""
        peers = self.peers
        return node_id in self.address_book.known or node_id in peers.inbound or node_id in peers.delivered_steps

    def standing(self, node_id: NodeId) -> int:
        """ESTABLISHED for who is that where not everybody is, 1 for who delivered groups or answered at its address, 0
        for all others: their streams make room first."""
        if not self.parties.is_private and self.parties.is_established(node_id):
            return ESTABLISHED
        return int(node_id in self.address_book.known or node_id in self.peers.delivered_steps)

    def is_giver(self, node_id: NodeId) -> bool:
        """Whether it goes first where sending is short: groups that it made were admitted lately, or we follow it."""
        follower = self.weight_follower
        return self.streams.is_giver(node_id) or (follower is not None and node_id == follower.policy_id)

    # --- what others may know about us ------------------------------------------------------------

    def advert(self) -> Advert:
        """This node's record for the directory."""
        return Advert(
            node_id=self.node_id,
            run_id=self.config.run_id,
            endpoints=self._offered,
            roles=self.config.roles,
            tokenizer_digest=self._tokenizer.digest,
            head=self.advertised_version,
            oldest_step=self.streams.oldest_own_step,
            num_groups=self.own_groups.num_put,
            reward_mean=self.own_groups.reward_mean.value or 0.0,
            reward_std=self.own_groups.reward_std.value or 0.0,
            correction=Correction.EXACT,
            held_bytes=self.replay.num_bytes,
            cursor=self.streams.log_head,
            expires_at_s=self.clock.now_s() + 3 * self.config.exchange.advert_every_s,
            equivocator=self._equivocator,
            credential=self.credential(),
            relay_reservations=0 if self.is_leaving else self.relay_reservations(),
        )

    def node_report(self, tokens_per_s: float) -> NodeReport:
        """This node's figures for the coordinator."""
        return NodeReport(
            node_id=self.node_id,
            name=self.config.name or short(self.node_id),
            roles=self.config.roles,
            endpoints=self.endpoints,
            head=self.newest_version,
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
