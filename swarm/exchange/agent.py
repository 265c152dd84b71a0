"""Agent: the parts of one node, how they are connected, and its state after a restart and in a pause.

Invariant: every group is stored before anything else sees it, every group of another node went through admission, and
every draw is journalled before it is handed out. No background task lives here: the loops that drive an agent are in
`swarm.loops`. The worker calls the agent through `worker_exchange.py`; `swarm.loops.own_advert` advertises it to other
nodes.
"""

import logging
import random
from collections.abc import Callable, Mapping
from functools import partial

from swarm.clock import CLOCK_SKEW_S
from swarm.environments.sandbox.time_accounts import TimeAccounts
from swarm.events import LoopFailed, NodeRestored
from swarm.exchange.admission import Admission
from swarm.exchange.capacity import GenerationCapacity
from swarm.exchange.checks.origin_checks import OriginChecks
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.draw_shares import DrawShares
from swarm.exchange.group_ingest import GroupIngest
from swarm.exchange.group_stream import GroupStreams
from swarm.exchange.known_versions import KnownVersions
from swarm.exchange.novelty import Novelty
from swarm.exchange.own_groups import OwnGroups
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.exchange.worker_exchange import WorkerExchange
from swarm.interfaces import EnvironmentShape, GroupStore, Tokenizer, Verifier
from swarm.node_context import NodeContext
from swarm.peers.address_book import AddressBook, anchor_of
from swarm.peers.coordinator_client import CoordinatorView
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.peers.peer_table import Peers
from swarm.peers.quotas import IntakeQuota
from swarm.peers.reputation import Reputation
from swarm.types import Correction, NodeId, PolicyVersion, Role
from swarm.weight_sync.credit import CreditLedger
from swarm.weight_sync.follower import WeightFollower
from swarm.weight_sync.version_publisher import VersionPublisher
from swarm.weight_sync.weight_server import WeightServer
from swarm.weights.store import WeightStore

logger = logging.getLogger(__name__)

WAITING_SHARE = 0.5  # of the store, for groups that wait for a draw; the rest is for a resume, and for peers
WINDOW_STEPS = 2  # steps whose groups one follower may have outstanding at most
KEPT_AGES = 10  # times max_age_s for which a stored group is kept and served, though no node may use it any more
ESTABLISHED = 2  # `Agent.standing` of an established node in a run where not everybody is


class Agent:
    """The connected parts and the state of one node.

    `local` serves the worker, `streams` answers peers, `ingest` takes groups of peers, `own_groups` takes groups of the
    node's own generator, and `journal` hands out draws to the learner. A node that publishes serves its versions
    (`version_publisher`) and gives credit to its followers; a generator without the trainer role follows a trainer
    (`weight_follower`). Both need a weight store.

    Args:
        context: parts that all collaborators of the agent share.
        store: groups and draw journal.
        tokenizer: tokenizer of this node's model.
        verifier: scores answers in the sandbox.
        weights: weight store of a node that publishes or follows; None for any other node.
        environments: names of the environments that this node can rebuild; None: those of the configuration.
        usable: corrections that this node's recipe may learn from.
        entry: rule that admits nodes to the run; None: the rule of the configuration.
        replay_type: class of the replay buffer; a test puts its own class here.
        admission_type: class of the admission; a test puts its own class here.
        accounts: CPU seconds that the groups of each party take before they are admitted; None: unbounded.
        shapes: shapes of the environments that the verifier knows, by name; None: none is known.
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
        replay_type: Callable[..., ReplayBuffer] = ReplayBuffer,
        admission_type: type[Admission] = Admission,
        accounts: TimeAccounts | None = None,
        shapes: Mapping[str, EnvironmentShape] | None = None,
    ) -> None:
        self.context, self.config, self.clock, self.node_id = context, context.config, context.clock, context.node_id
        self.store, self.tokenizer_digest = store, tokenizer.digest
        self.endpoints: tuple[str, ...] = ()
        self.is_leaving = False
        self.credential: Callable[[], bytes] = bytes  # shown in our advert
        self.relay_reservations: Callable[[], int] = int  # free ones, for nodes that cannot be dialled
        self.num_failures = 0
        config, clock = self.config, self.clock

        # what is known of other nodes
        anchors = tuple(map(anchor_of, config.exchange.anchors))
        self.address_book = AddressBook(clock, random.Random(f"address book {self.node_id}"), anchors)
        versions = self.versions = KnownVersions(self.node_id, clock)
        # one rule for sessions, records, relayed groups and parties
        rule = self.entry_rule = entry or EntryRule(config.entry, config.run_id, clock, config.coordinator.fingerprint)
        parties = self.parties = Parties(None if config.is_private else rule, self.address_book.endpoint_of)
        peers = self.peers = Peers(self.node_id, self._is_listed)
        reputation = Reputation(clock, is_denied=rule.is_denied)
        self.reputation, self.coordinator_view = reputation, CoordinatorView(clock)
        quota = IntakeQuota(config.replay, clock)

        # groups that wait for a step, and how many more may be begun
        shares = DrawShares(parties, config.replay.max_reuse)
        max_stored_bytes = int(WAITING_SHARE * config.exchange.store_bytes)
        replay = self.replay = replay_type(config.replay, self.node_id, config.seed, clock, shares, max_stored_bytes)
        # A node that also generates withholds no credit: its own generator would begin those groups instead.
        most_taken_off = int if Role.GENERATOR in config.roles else replay.most_taken_off
        credit = self.credit_ledger = CreditLedger(
            clock,
            config.replay.max_age_s,
            WINDOW_STEPS * config.replay.local_groups,
            in_rounds=config.replay.barrier,
            num_waiting=replay.num_waiting,
            parties=parties,
            most_taken_off=most_taken_off,
        )
        view = self.coordinator_view
        self.journal = DrawJournal(context, store, replay, credit, peers, view, quota, reputation, shares)
        generation = GenerationCapacity(context, replay, self.journal, credit, peers)

        # weights and groups that go out
        self.weight_server = WeightServer(
            context, weights, credit, generation.for_followers, reputation, versions.record
        )
        self.version_publisher = None
        if weights is not None and config.weights.publish:
            self.version_publisher = VersionPublisher(context, weights, self.weight_server)
        follower = self.weight_follower = self._make_follower(weights)
        streams = self.streams = GroupStreams(context, store, peers, reputation, self.weight_server, parties.origin_of)

        # groups that come in: our own, and those of peers
        novelty = self.novelty = Novelty(partial(replay.discard, reason="copied"), self._counts_in_full)
        self.own_groups = OwnGroups(context, store, tokenizer, verifier, replay, streams, follower, novelty)
        if environments is None:
            environments = frozenset(env.name for env in config.environments)
        self.admission = admission_type(
            context,
            store,
            tokenizer,
            verifier,
            OriginChecks(context, rule, reputation, environments, peers, versions, credit),
            reputation,
            usable,
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
        self.local = WorkerExchange(
            context=context,
            verifier=verifier,
            generation=generation,
            own_groups=self.own_groups,
            journal=self.journal,
            is_well_formed=self.admission.is_well_formed,
            peers=peers,
            versions=versions,
            coordinator_view=view,
            publisher=self.version_publisher,
            follower=follower,
        )

    def _is_listed(self, node_id: NodeId) -> bool:
        """True for an established node in a run that is not private."""
        return not self.parties.is_private and self.parties.is_established(node_id)

    def _counts_in_full(self, producer: NodeId) -> bool:
        return producer == self.node_id or self.parties.is_established(producer)

    def _make_follower(self, weights: WeightStore | None) -> WeightFollower | None:
        """The follower of a generator with weights that neither trains nor publishes; None for any other node."""
        config = self.config
        if weights is None or config.weights.publish:
            return None
        if Role.TRAINER in config.roles or Role.GENERATOR not in config.roles:
            return None
        return WeightFollower(self.context, weights, self.weight_server, self.reputation.condemn)

    # --- restart -------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Restores buffer, journal position, known versions and known answers from the store after a restart."""
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

    async def tidy(self, max_bytes: int) -> int:
        """Tidies weights; deletes groups too old for anyone, then the oldest beyond a byte budget; returns how many.

        Groups that wait for a draw stay, so that the draw can be made again. Groups that the learner would draw again
        from its last checkpoint, or from the one before it, stay unless the store exceeds its budget by a twentieth:
        new groups take precedence, and a resume then reports the loss (`DrawJournal.redraw`).
        """
        for weights in (self.version_publisher, self.weight_follower):
            if weights is not None:
                await weights.tidy()
        waiting = self.replay.digests | self.journal.in_hand
        oldest_s = self.clock.now_s() - KEPT_AGES * self.config.replay.max_age_s
        num_deleted = await self.store.forget(oldest_s, max_bytes, self.journal.needed_from, waiting)
        return num_deleted + await self.store.forget(0.0, int(1.05 * max_bytes), None, waiting)

    # --- pause -------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """True while the node is paused by the owner of the machine."""
        return self.context.pause.is_on

    def pause(self, since_s: float) -> None:
        """Pauses the node: no new work begins until `resume`. `since_s`: wall-clock start of the pause."""
        self.context.pause.since_s = since_s
        self.context.changed.fire()

    def resume(self) -> None:
        """Ends a pause, if there is one; the pause adds nothing to the age of waiting groups of the own lineage."""
        since_s = self.context.pause.since_s
        if since_s is not None:
            self.replay.outlast_pause(since_s)
            self.local.last_step_at_s = self.own_groups.last_put_at_s = self.clock.now_s()  # nothing was late
            self.context.pause.since_s = None
            self.context.changed.fire()

    async def resumed(self) -> None:
        """Waits until the node is not paused."""
        await self.context.pause.over()

    # --- state -------------------------------------------------------------------------------------

    @property
    def head(self) -> PolicyVersion:
        """The newest version of our own lineage."""
        return self.peers.own_head

    @property
    def last_step_at_s(self) -> float:
        """Wall clock of the newest step (on a follower: own group), end of a pause, or start, whichever came last."""
        return self.local.last_step_at_s if self.weight_follower is None else self.own_groups.last_put_at_s

    @property
    def newest_version(self) -> PolicyVersion:
        """The newest version here: of our own lineage, or on a follower the newest that its engine loaded."""
        return self.head if self.weight_follower is None else self.weight_follower.head

    def is_alive(self, node_id: NodeId) -> bool:
        """True if the peer is certainly in the swarm: it proved its key to us, or its groups were admitted."""
        peers = self.peers
        return node_id in self.address_book.known or node_id in peers.inbound or node_id in peers.delivered_steps

    def standing(self, node_id: NodeId) -> int:
        """Rank of a peer; streams of peers of lower rank make room first.

        ESTABLISHED for an established node in a run that is not private, 1 for another peer that delivered groups or
        answered at its address, 0 for all others.
        """
        if self._is_listed(node_id):
            return ESTABLISHED
        return int(node_id in self.address_book.known or node_id in self.peers.delivered_steps)

    def is_giver(self, node_id: NodeId) -> bool:
        """True if the peer is served first if upload is short: its reputation reaches GIVER_SCORE, or we follow it."""
        follower = self.weight_follower
        return self.streams.is_giver(node_id) or (follower is not None and node_id == follower.policy_id)

    def record_failure(self, loop: str, error: Exception) -> None:
        """Counts an unexpected exception that ended a loop or task, and emits LoopFailed."""
        self.num_failures += 1
        self.context.emit(LoopFailed(loop=loop, error=f"{type(error).__name__}: {error}"))
