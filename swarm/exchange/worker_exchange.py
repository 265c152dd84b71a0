"""What an agent does for its own worker: groups, draws and versions that it hands over, takes and notes.

Invariant: a group is stored before anything else sees it, and a draw is journalled before it is handed out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swarm.activity import Activity
from swarm.episode import Actions, EpisodeOutcome
from swarm.errors import ConfigError
from swarm.events import OthersSetAside, PolicyEvaluated, StepMade, VersionPublished
from swarm.exchange.own_groups import MadeSinceStep
from swarm.interfaces import Verdict, Verifier
from swarm.types import (
    ApplyReport,
    Attempt,
    Digest,
    Draw,
    Evaluation,
    PatchChain,
    PolicyVersion,
    RolloutGroup,
    StepReport,
)

if TYPE_CHECKING:
    from swarm.exchange.agent import Agent
    from swarm.exchange.capacity import GenerationCapacity


class WorkerExchange:
    """Implements `LocalExchange`, whose docstrings hold.

    Args:
        agent: of the node.
        verifier: scores answers in the sandbox.
        generation: how many groups may be begun.
    """

    def __init__(self, agent: "Agent", verifier: Verifier, generation: "GenerationCapacity") -> None:
        self._agent, self._verifier, self._generation = agent, verifier, generation
        self.last_step_at_s = agent.clock.now_s()  # wall clock of the newest step, or of the end of a pause
        self.idle_figures: Mapping[str, float] = {}  # of the newest step, where the guard set all sources aside
        self.activity: Activity | None = None  # of the worker, as it said last
        self._are_others_held = False  # the learner's guard set groups of other nodes aside

    def capacity(self) -> int:
        """Groups that our generator may start now without any becoming too old to use."""
        agent = self._agent
        if agent.is_paused:
            return 0
        return self._generation.for_own() if agent.weight_follower is None else agent.weight_follower.capacity()

    async def wait_capacity(self) -> int:
        """Waits until `capacity()` is positive and returns it; the generator begins a batch of so many groups."""
        await self._agent.context.changed.until(lambda: self.capacity() > 0)
        num_groups = self.capacity()
        return num_groups if self._agent.weight_follower is not None else self._generation.begin_own_batch(num_groups)

    async def num_asked(self) -> int:
        return self._agent.own_groups.num_asked

    async def put(self, group: RolloutGroup) -> float:
        """Scores, seals, stores and hands on one of our groups; returns its mean reward, NaN where it was dropped."""
        try:
            return await self._agent.own_groups.put(group)
        finally:
            self._generation.end_own_group()

    async def draw(self, head: PolicyVersion) -> Draw:
        return await self._agent.journal.draw(head)

    async def redraw(self, from_step: int) -> list[Draw]:
        is_well_formed = self._agent.admission.is_well_formed
        draws = await self._agent.journal.redraw(from_step)
        made = [replace(draw, groups=tuple(g for g in draw.groups if is_well_formed(g.scored))) for draw in draws]
        return [draw for draw in made if draw.groups]

    async def begin_again(self, step: int, passed: Digest | None = None) -> Attempt:
        await self._agent.resumed()
        return await self._agent.journal.begin_again(step, passed)

    async def publish(self, version: PolicyVersion, manifests: Sequence[bytes] = ()) -> None:
        """A new version of our own lineage exists; one of a lower step than the last begins a new branch."""
        agent = self._agent
        agent.peers.own_head = version
        agent.versions.publish(version)
        agent.context.emit(VersionPublished.of(version))
        agent.coordinator_view.queue_version(version)
        if agent.version_publisher is not None:
            await agent.version_publisher.publish(version, manifests)
        agent.context.changed.fire()

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        follower = self._agent.weight_follower
        if follower is None:
            raise ConfigError("roles: a node with a trainer of its own, or without the generator role, follows nobody")
        if wait:
            await self._agent.resumed()
        return await follower.next_update(held, wait=wait)

    async def report_update(self, report: ApplyReport) -> None:
        assert self._agent.weight_follower is not None, "next_update gave no patch chain"
        await self._agent.weight_follower.on_applied(report)

    async def report_step(self, report: StepReport) -> None:
        agent = self._agent
        await agent.journal.settle(report)
        if not report.was_skipped:
            self.last_step_at_s = agent.clock.now_s()
            agent.own_groups.since_step = MadeSinceStep()
        self.idle_figures = report.diagnostics if report.diagnostics.get("guard_idle_draws") else {}
        agent.coordinator_view.record_edges(report.edges)
        agent.context.emit(StepMade.of(report))
        are_held = bool(report.diagnostics.get("guard_others_held"))
        if are_held != self._are_others_held:
            self._are_others_held = are_held
            agent.context.emit(OthersSetAside(step=report.version.step, is_over=not are_held))
        agent.context.changed.fire()  # the next round begins, where there are rounds

    async def report_checkpoint(self, next_draw: int, error: str = "") -> None:
        await self._agent.journal.record_checkpoint(next_draw, error)

    async def report_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        for entry in evaluations:
            self._agent.coordinator_view.evaluations[f"{entry.env}/{entry.split}"] = entry.accuracy
            self._agent.context.emit(PolicyEvaluated.of(entry))

    async def report_activity(self, activity: Activity) -> None:
        self.activity = activity

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        return await self._verifier.verify(env, task_id, episodes)

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        return await self._verifier.step(env, task_id, actions)
