"""Exchange of an agent with its own worker: groups, draws, versions and reports.

Invariant: a group is stored before anything else sees it, and a draw is journalled before it is handed out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.activity import Activity
from swarm.episode import Actions, EpisodeOutcome
from swarm.errors import ConfigError
from swarm.events import OthersSetAside, PolicyEvaluated, StepMade, VersionPublished, WarmedUp
from swarm.exchange.capacity import GenerationCapacity
from swarm.exchange.draw_journal import DrawJournal
from swarm.exchange.known_versions import KnownVersions
from swarm.exchange.own_groups import MadeSinceStep, OwnGroups
from swarm.interfaces import Verdict, Verifier
from swarm.node_context import NodeContext
from swarm.peers.coordinator_client import CoordinatorView
from swarm.peers.peer_table import Peers
from swarm.types import (
    ApplyReport,
    Attempt,
    Digest,
    Draw,
    Evaluation,
    PatchChain,
    PolicyVersion,
    RolloutGroup,
    ScoredGroup,
    StepReport,
    WarmUpReport,
)
from swarm.weight_sync.follower import WeightFollower
from swarm.weight_sync.version_publisher import VersionPublisher


@dataclass(eq=False, kw_only=True, repr=False)
class WorkerExchange:
    """Implements `LocalExchange`, whose docstrings hold."""

    context: NodeContext
    verifier: Verifier  # scores answers in the sandbox
    generation: GenerationCapacity
    own_groups: OwnGroups
    journal: DrawJournal
    is_well_formed: Callable[[ScoredGroup], bool]  # a stored group has the form of the run
    peers: Peers  # their heads, and ours
    versions: KnownVersions
    coordinator_view: CoordinatorView
    publisher: VersionPublisher | None  # None: this node publishes no weights
    follower: WeightFollower | None  # None: this node follows nobody

    def __post_init__(self) -> None:
        self.last_step_at_s = self.context.clock.now_s()  # wall clock of the newest step, or of the end of a pause
        self.idle_figures: Mapping[str, float] = {}  # of the newest step, if the guard set all sources aside
        self.activity: Activity | None = None  # newest of the worker
        self._are_others_held = False  # the learner's guard set groups of other nodes aside

    def capacity(self) -> int:
        """Number of groups that our generator may start now without any becoming too old to use; 0 in a pause."""
        if self.context.pause.is_on:
            return 0
        return self.generation.for_own() if self.follower is None else self.follower.capacity()

    async def wait_capacity(self) -> int:
        """Waits until `capacity()` is positive and returns it; the caller then begins a batch of at most that many."""
        await self.context.changed.until(lambda: self.capacity() > 0)
        num_groups = self.capacity()
        return num_groups if self.follower is not None else self.generation.begin_own_batch(num_groups)

    async def num_asked(self) -> int:
        return self.own_groups.num_asked

    async def put(self, group: RolloutGroup, outcomes: Sequence[EpisodeOutcome] = ()) -> float:
        """Scores, seals, stores and offers one of our groups; returns its mean reward, NaN if it was dropped."""
        try:
            return await self.own_groups.put(group, outcomes)
        finally:
            if not outcomes:
                self.generation.end_own_group()

    async def draw(self, head: PolicyVersion) -> Draw:
        return await self.journal.draw(head)

    async def redraw(self, from_step: int) -> list[Draw]:
        draws = await self.journal.redraw(from_step)
        made = [replace(draw, groups=tuple(g for g in draw.groups if self.is_well_formed(g.scored))) for draw in draws]
        return [draw for draw in made if draw.groups]

    async def begin_again(self, step: int, passed: Digest | None = None) -> Attempt:
        await self.context.pause.over()
        return await self.journal.begin_again(step, passed)

    async def publish(self, version: PolicyVersion, manifests: Sequence[bytes] = ()) -> None:
        """Publishes a new version of our own lineage; a step below the last version's begins a new branch."""
        self.peers.own_head = version
        self.versions.publish(version)
        self.context.emit(VersionPublished.of(version))
        self.coordinator_view.queue_version(version)
        if self.publisher is not None:
            await self.publisher.publish(version, manifests)
        self.context.changed.fire()

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        if self.follower is None:
            raise ConfigError("roles: a node with a trainer of its own, or without the generator role, follows nobody")
        if wait:
            await self.context.pause.over()
        return await self.follower.next_update(held, wait=wait)

    async def report_update(self, report: ApplyReport) -> None:
        assert self.follower is not None, "next_update gave no patch chain"
        await self.follower.on_applied(report)

    async def report_step(self, report: StepReport) -> None:
        await self.journal.settle(report)
        if not report.was_skipped:
            self.last_step_at_s = self.context.clock.now_s()
            self.own_groups.since_step = MadeSinceStep()
        self.idle_figures = report.diagnostics if report.diagnostics.get("guard_idle_draws") else {}
        self.coordinator_view.record_edges(report.edges)
        self.context.emit(StepMade.of(report))
        are_held = bool(report.diagnostics.get("guard_others_held"))
        if are_held != self._are_others_held:
            self._are_others_held = are_held
            self.context.emit(OthersSetAside(step=report.version.step, is_over=not are_held))
        self.context.changed.fire()  # the next round begins, where there are rounds

    async def report_checkpoint(self, next_draw: int, error: str = "") -> None:
        await self.journal.record_checkpoint(next_draw, error)

    async def report_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        for entry in evaluations:
            self.coordinator_view.evaluations[f"{entry.env}/{entry.split}"] = entry.accuracy
            self.context.emit(PolicyEvaluated.of(entry))

    async def report_warm_up(self, report: WarmUpReport) -> None:
        self.context.emit(WarmedUp(report=report))

    async def report_activity(self, activity: Activity) -> None:
        self.activity = activity

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        return await self.verifier.verify(env, task_id, episodes)

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        return await self.verifier.step(env, task_id, actions)
