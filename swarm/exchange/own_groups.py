"""Groups of this node's own generator: scored in the sandbox, sealed, stored, and only then learned from and sent.

Invariant: a group is in the store before learner or peers see it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from swarm.config.node_config import AGENT_RUNS
from swarm.episode import EpisodeOutcome
from swarm.errors import RolloutFailed, StorageFull, TooLarge
from swarm.events import DiskFull, GroupPut, GroupUnscored, mean_and_std
from swarm.exchange.checks.admission_limits import AdmissionLimits
from swarm.exchange.checks.episode_checks import check_believed, check_episodes, check_replay
from swarm.exchange.checks.reward_recheck import to_scored_group
from swarm.exchange.group_stream import GroupStreams
from swarm.exchange.novelty import Novelty
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.flow import RunningMean, TokenBucket
from swarm.interfaces import GroupStore, Tokenizer, Verdict, Verifier
from swarm.node_context import NodeContext
from swarm.types import ClaimedTurn, FinishReason, RefusalReason, RolloutGroup, ScoredGroup, SealedGroup, Task
from swarm.weight_sync.follower import WeightFollower
from swarm.wire.envelopes import seal_group

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class MadeSinceStep:
    """Counts of own groups since the newest optimizer step, which show why a learner waits."""

    num_put: int = 0
    num_with_signal: int = 0
    num_unscored: int = 0  # dropped
    error: str = ""  # why the newest was dropped


@dataclass(eq=False, repr=False)
class OwnGroups:
    """Scores, seals and stores the groups of our generator, then hands them to our learner and our peers."""

    _context: NodeContext
    _store: GroupStore  # groups are in it before anybody sees them
    _tokenizer: Tokenizer
    _verifier: Verifier
    _replay: ReplayBuffer  # takes them for the learner of this node, unless it follows another node
    _streams: GroupStreams
    _follower: WeightFollower | None  # of the trainer whose credit each group uses up; None: this node learns itself
    _novelty: Novelty  # knows our answers before any peer can copy them
    num_asked: int = field(default=0, init=False)  # questions since the store began, stored or not
    num_put: int = field(default=0, init=False)  # groups stored; this and the rest: since the process started
    num_unscored: int = field(default=0, init=False)
    tokens_generated: int = field(default=0, init=False)
    since_step: MadeSinceStep = field(default_factory=MadeSinceStep, init=False)
    is_full: bool = field(default=False, init=False)  # the newest group was dropped: the disk had no room for it

    def __post_init__(self) -> None:
        self.reward_mean, self.reward_std = RunningMean(memory=0.95), RunningMean(memory=0.95)
        self.last_put_at_s = self._context.clock.now_s()
        self._limits = AdmissionLimits.from_config(self._context.config)
        self._warnings = TokenBucket(per_s=1 / 60, burst=3, at_s=self._context.clock.monotonic_s())

    async def put(self, group: RolloutGroup, outcomes: Sequence[EpisodeOutcome] = ()) -> float:
        """Stores a finished group; returns its mean reward, NaN if it was dropped.

        Raises:
            LookupError: unknown task.
            StorageFull: the store has no room for a group with `outcomes` (see `LocalExchange.put`).
        """
        if not outcomes:
            self.num_asked += 1  # also when it cannot be stored: the question is not asked again
        try:
            with self._streams.putting():
                scored, _, is_known = await self.seal_and_store(group, outcomes)
                if is_known:  # the worker died before it noted that
                    return mean_and_std(scored.rewards)[0]
                await self._streams.read_head()
        except StorageFull as error:
            if not self.is_full:  # once: a line for each group would fill the rest of the disk
                full = "store is full; groups of ours are dropped until there is room on the disk"
                logger.error(full, extra={"error": str(error)})
            if not (outcomes and self.is_full):  # such a group comes again each second
                self._context.emit(DiskFull(error=str(error)))
            self.is_full = True
            if outcomes:
                raise  # what an agent did cannot be made again: its group waits for room
            return float("nan")
        except (RolloutFailed, TooLarge) as error:
            self.num_unscored += 1
            if self._warnings.try_take(self._context.clock.monotonic_s()):  # once a minute: it may break each group
                fields = {"error": str(error), "num_unscored": self.num_unscored}
                logger.warning("a rollout group of ours could not be scored", extra=fields)
            self.since_step.num_unscored += 1
            self.since_step.error = str(error)
            self._context.emit(GroupUnscored(env=group.env, error=str(error)))
            return float("nan")
        if self.is_full:
            logger.info("the store has room again")
        self.is_full = False
        self.num_put += 1
        self.since_step.num_put += 1
        self.since_step.num_with_signal += self._replay.is_wanted(scored)
        self.tokens_generated += group.num_tokens
        self.last_put_at_s = self._context.clock.now_s()
        mean, std = mean_and_std(scored.rewards)
        self.reward_mean.add(mean)
        self.reward_std.add(std)
        if self._follower is None:
            self._replay.add(scored)
        else:
            self._follower.credit.record_stored(group.created_at_s)
        self._streams.offer(scored, via=self._context.node_id)
        self._context.changed.fire()
        self._context.emit(GroupPut.of(scored))
        return mean

    async def seal_and_store(
        self, group: RolloutGroup, outcomes: Sequence[EpisodeOutcome] = ()
    ) -> tuple[ScoredGroup, SealedGroup, bool]:
        """Adds the sandbox's rewards, or those of `outcomes`, to a group as claims; signs and stores the group.

        Returns:
            The group in both forms, and True if it was stored before.

        Raises:
            LookupError: unknown environment or task.
            RolloutFailed: the engine cut an answer off, the verifier failed, or `check_own` refused an episode.
            TooLarge: the group cannot be sealed.
            StorageFull: the store has no room.
        """
        if any(rollout.finish is FinishReason.ABORTED for rollout in group.rollouts):
            raise RolloutFailed("its answers were cut off each time that they were asked for; see the engine's log")
        if outcomes:
            assert group.env == AGENT_RUNS, "other episodes are replayed"
            task = Task(env=group.env, task_id=group.task_id, messages=())
            verdict = Verdict(task=task, outcomes=tuple(outcomes), verifier=group.verifier, reference="")
        else:
            verdict = await self._verifier.verify(group.env, group.task_id, [r.actions for r in group.rollouts])
        rollouts = tuple(
            replace(rollout, claimed_reward=outcome.reward, claimed_turns=_claims(outcome))
            for rollout, outcome in zip(group.rollouts, verdict.outcomes, strict=True)
        )
        claimed = replace(group, rollouts=rollouts, verifier=verdict.verifier)
        await self._context.offload(self.check_own, claimed, verdict)
        sealed = await self._context.offload(seal_group, claimed, self._context.identity)
        now_s = self._context.clock.now_s()
        scored = to_scored_group(
            claimed,
            sealed,
            verdict.rewards,
            self._tokenizer,
            is_made_here=True,
            now_s=now_s,
            outcomes=verdict.outcomes,
        )
        if outcomes and await self._store.contains(sealed.digest):
            return scored, sealed, True
        await self._store.put(scored, sealed)
        self._novelty.measure_own(claimed)
        self._novelty.record(claimed, sealed.digest, self._novelty.order(claimed))
        return scored, sealed, False

    def check_own(self, group: RolloutGroup, verdict: Verdict) -> None:
        """Refuses a group that peers would charge us for: an episode broke off, or differs from its replay here.

        Checks only episodes of several turns, and none on a node that runs alone, whose environments need not be
        reproducible. Raises RolloutFailed: the group has to be dropped.
        """
        limits = self._limits
        if self._context.config.is_alone or group.env not in limits.episode_environments:
            return
        finding = check_episodes(group, self._tokenizer, limits.episodes)
        if group.env in limits.believed_from or group.env in limits.own_environments:  # nobody replays them
            finding = finding or check_believed(group, verdict, self._tokenizer)
        else:
            finding = finding or check_replay(group, verdict, self._tokenizer, limits.episodes)
        if finding is not None and finding[0] is not RefusalReason.UNUSABLE_TEXT:  # which costs us nothing
            where = f"environment {group.env}, task {group.task_id}"
            raise RolloutFailed(f"{where}: not the episode that its actions make: {finding[1]}")


def _claims(outcome: EpisodeOutcome) -> tuple[ClaimedTurn, ...]:
    """Claims about each turn of an episode; none if it has fewer than two turns."""
    if len(outcome.transitions) < 2:
        return ()
    return tuple(ClaimedTurn(reward=each.reward, status=each.status) for each in outcome.transitions)
