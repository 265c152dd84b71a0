"""Fault plan of a virtual swarm: rates, delays, partitions and crashes of one run, as data.

Invariant: a plan is frozen, and a random one follows from its arguments alone, so that a failing run can be replayed
by its seed.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Final, cast

from swarm.simulate.virtual.adversaries import ATTACKS
from swarm.simulate.virtual.episode_plan import EpisodePlan

TIGHT_STORES: Final = (4 * 2**10, 16 * 2**10)  # bytes: ten groups of a virtual swarm, or some forty


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A cut between the nodes of an island and all others, from `start_s` to `end_s` (network time)."""

    start_s: float
    end_s: float
    island: frozenset[int]  # node numbers

    def cuts(self, a: int, b: int) -> bool:
        """True if the two nodes are on different sides."""
        return (a in self.island) != (b in self.island)


@dataclass(frozen=True, kw_only=True, slots=True)
class Crash:
    """A node's death at `at_s` without notice, and its restart from its disk `down_s` later."""

    node: int  # node number
    at_s: float  # network time
    down_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WrongClock:
    """A wrong wall clock of one node: a skew from the start, and a jump at one moment."""

    node: int  # node number
    skew_s: float  # from the start; positive: ahead of true time
    jumps_at_s: float  # network time
    jump_s: float  # added to the skew from then on; negative: back


class DiskFault(StrEnum):
    """Damage to a node's disk between a crash and the restart."""

    POWER_CUT = "power_cut"  # what was not synced is lost, all of it or the newest part
    ROTTEN_GROUPS = "rotten_groups"  # some stored bodies have other bytes
    ROTTEN_CHECKPOINT = "rotten_checkpoint"  # the newest one, where there is one before it
    LOST_STORE = "lost_store"  # damaged beyond reading: moved aside, and begun anew


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskDamage:
    """A fault of a node's disk, applied while the node is down after a crash."""

    node: int  # node number, of a `Crash`
    fault: DiskFault


@dataclass(frozen=True, kw_only=True, slots=True)
class SeamRates:
    """Failure rates of the seams of every node, per call."""

    full_disk: float = 0.0  # a group or a draw cannot be written
    unsaved_checkpoint: float = 0.0  # the disk is full when a checkpoint is due
    failing_verifier: float = 0.0  # the confined process ends
    slow_thread: float = 0.0  # work given to a thread waits up to `slow_thread_s` first
    slow_thread_s: float = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turncoat:
    """An additional node that is honest until some moment, and then sends the groups of an attack."""

    attack: str  # one of `swarm.simulate.virtual.adversaries.ATTACKS`
    is_member: bool = False  # it counts in full, as honest nodes do; else it is a newcomer
    honest_s: float = 0.0  # network time until which it does what honest nodes do


class RelayVice(StrEnum):
    """Misbehaviour of a relay."""

    LIES = "lies"  # about whether it could dial a node
    WITHHOLDS = "withholds"  # passes on nothing
    THROTTLES = "throttles"  # passes on a few bytes a second


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayFault:
    """A time, from `start_s` to `end_s` (network time), in which a node misbehaves as a relay."""

    node: int  # node number
    vice: RelayVice
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultPlan:
    """The network and node faults of one run. The defaults are a perfect network.

    Rates are per message: one item of a subscription, or one answer to a fetch. Nodes are numbered in the order in
    which they are added to the network; times are seconds since the network was made.
    """

    latency_s: float = 0.0  # one way, for every message
    jitter_s: float = 0.0  # mean of an exponential delay on top
    drop_rate: float = 0.0  # the connection breaks there, as TCP breaks: the reader gets Unavailable
    duplicate_rate: float = 0.0  # the same item arrives twice
    reorder_rate: float = 0.0  # the item arrives up to `reorder_s` late, after later ones
    reorder_s: float = 1.0
    corrupt_rate: float = 0.0  # one byte of the body is flipped
    bytes_per_s: float = math.inf  # what one node can send to all others together
    partitions: tuple[Partition, ...] = ()
    # Applied by the owner of the nodes, not by the network:
    crashes: tuple[Crash, ...] = ()
    coordinator_crash: Crash | None = None  # its node number means nothing
    store_bytes: int = 0  # budget of every node's store, tidied every other second; 0: there is always room
    num_hostile: int = 0  # more nodes, numbered after the honest ones, that send whatever does harm
    wrong_clocks: tuple[WrongClock, ...] = ()  # at most one for each node
    seams: SeamRates = SeamRates()  # fail until the last quarter of the run
    settings: tuple[str, ...] = ()  # overrides of every node's configuration, as in `--set`
    turncoats: tuple[Turncoat, ...] = ()  # more nodes, numbered after the honest ones
    damages: tuple[DiskDamage, ...] = ()
    episodes: EpisodePlan | None = None  # what the nodes play in place of single answers
    coordinator_write_s: float = 0.0  # most that a write of the coordinator to its disk takes; a crash may undo it
    outward_share: float | None = None  # of the nodes: nobody can dial them; None: nobody relays or measures that
    relay_reservations: int = 0  # of every node that relays, and twice as many connections; 0: as configured
    relay_faults: tuple[RelayFault, ...] = ()

    def is_outward(self, number: int) -> bool:
        """True if nobody can dial the node of this number; these nodes are spread evenly over the numbers."""
        share = self.outward_share or 0.0
        return int((number + 1) * share + 1e-9) > int(number * share + 1e-9)

    @classmethod
    def random(cls, seed: int, num_nodes: int, duration_s: float, *, has_episodes: bool = False) -> "FaultPlan":
        """A plan drawn from `seed`; most kinds of faults are on in about half of the plans.

        Args:
            seed: any number.
            num_nodes: number of honest nodes, numbered from 0.
            duration_s: length of the run; partitions, crashes and relay faults end before its last quarter.
            has_episodes: True adds a plan of episodes drawn from the same seed, and leaves out undialable nodes.
        """
        rng = random.Random(f"fault plan {seed}")

        def sometimes(most: float) -> float:
            return rng.random() * most if rng.random() < 0.5 else 0.0

        plan = cls(
            latency_s=rng.choice([0.0, 0.005, 0.05, 0.2]),
            jitter_s=sometimes(0.1),
            drop_rate=sometimes(0.05),
            duplicate_rate=sometimes(0.1),
            reorder_rate=sometimes(0.1),
            reorder_s=rng.uniform(0.1, 5.0),
            corrupt_rate=sometimes(0.05),
            bytes_per_s=rng.choice([math.inf, math.inf, 1e6, 1e5]),
            partitions=tuple(_random_partition(rng, num_nodes, duration_s) for _ in range(rng.choice([0, 0, 1, 2]))),
            crashes=_random_crashes(rng, num_nodes, duration_s),
            coordinator_crash=_random_crash(rng, -1, duration_s) if rng.random() < 0.3 else None,
            num_hostile=rng.choice([0, 0, 1]),
        )
        plan = replace(  # drawn last, so that older seeds keep their other faults
            plan,
            store_bytes=rng.choice([0, 0, *TIGHT_STORES]),
            wrong_clocks=_random_clocks(rng, num_nodes, duration_s),
            seams=SeamRates(
                full_disk=sometimes(0.03),
                failing_verifier=sometimes(0.05),
                unsaved_checkpoint=sometimes(0.5),
                slow_thread=sometimes(0.1),
            ),
            settings=_random_settings(rng),
            turncoats=_random_turncoats(rng, num_nodes, duration_s),
        )
        plan = replace(
            plan,
            damages=tuple(damage for crash in plan.crashes for damage in _random_damages(rng, crash.node)),
            coordinator_write_s=rng.choice([0.0, 0.02, 0.1]),
            episodes=EpisodePlan.random(seed) if has_episodes else None,
        )
        # not with episodes: their seeds keep their plans
        return plan if has_episodes else with_outward(plan, _random_share(rng), rng, num_nodes, duration_s)

    def faults(self) -> "list[FaultPlan]":
        """Plans that each lack one fault, or one kind of fault, of this plan: candidates for a smaller failing plan."""
        smaller: list[FaultPlan] = []
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if value == field.default:
                continue
            smaller.append(replace(self, **{field.name: field.default}))
            if isinstance(value, tuple):
                parts = cast("tuple[Any, ...]", value)
                if len(parts) > 1:
                    smaller += [
                        replace(self, **{field.name: parts[:index] + parts[index + 1 :]}) for index in range(len(parts))
                    ]
            elif isinstance(value, SeamRates):
                rates = [rate for rate in fields(value) if getattr(value, rate.name) != rate.default]
                if len(rates) > 1:
                    smaller += [replace(self, seams=replace(value, **{rate.name: rate.default})) for rate in rates]
        return smaller


def with_outward(
    plan: FaultPlan, share: float | None, rng: random.Random, num_nodes: int, duration_s: float
) -> FaultPlan:
    """The plan with a share of nodes that nobody can dial and with relay faults; if `share` is None, without both."""
    if share is None:
        return replace(plan, outward_share=None, relay_reservations=0, relay_faults=())
    most = rng.choice([0, 0, 2, 4])
    # few reservations only in a small swarm: the coordinator's are then enough for all nodes
    plan = replace(plan, outward_share=share, relay_reservations=most if num_nodes < 100 else 0)
    dialable = [number for number in range(num_nodes) if not plan.is_outward(number)]
    faulty = rng.sample(dialable, rng.randint(0, (len(dialable) + 1) // 2))
    return replace(plan, relay_faults=tuple(_random_relay_fault(rng, node, duration_s) for node in faulty))


def shrink(plan: FaultPlan, is_failing: Callable[[FaultPlan], bool]) -> FaultPlan:
    """The plan with faults removed one by one as long as it still fails: no single one can be removed from the result.

    Args:
        plan: a failing plan.
        is_failing: runs a plan and returns True if the run fails.
    """
    while True:
        smaller = next((smaller for smaller in plan.faults() if is_failing(smaller)), None)
        if smaller is None:
            return plan
        plan = smaller


SETTINGS: Final[dict[str, tuple[Any, ...]]] = {
    "generator.group_size": (2, 3, 4),
    "replay.local_groups": (1, 2),
    "replay.external_groups": (0, 1, 2, 4),
    "replay.max_age_steps": (0, 1, 4),
    "replay.max_reuse": (1, 2, 3),
    "replay.sampler": ("uniform", "fresh", "effective"),
    "replay.keep_zero_variance": ("false", "true"),
    "replay.max_groups": (8, 256),
    "exchange.max_neighbours": (1, 2, 4, 8),
    "learner.checkpoint_every": (1, 5, 7),
}
"""Settings of a random plan, and their values."""


def _random_settings(rng: random.Random) -> tuple[str, ...]:
    if rng.random() < 0.5:
        return ()
    keys = rng.sample(sorted(SETTINGS), rng.randint(1, 5))
    return tuple(f"{key}={rng.choice(SETTINGS[key])}" for key in keys)


def _random_turncoats(rng: random.Random, num_nodes: int, duration_s: float) -> tuple[Turncoat, ...]:
    """Turncoats of a random plan: at most three in ten of all keys, or one."""
    if rng.random() < 0.5:
        return ()
    return tuple(
        Turncoat(
            attack=rng.choice(ATTACKS),
            is_member=rng.random() < 0.5,
            honest_s=rng.choice([0.0, rng.uniform(0.0, duration_s * 0.5)]),
        )
        for _ in range(rng.randint(1, max(1, 3 * num_nodes // 7)))
    )


def _random_damages(rng: random.Random, node: int) -> list[DiskDamage]:
    if rng.random() < 0.4:
        return []
    faults = rng.sample(sorted(DiskFault), rng.choice([1, 1, 2]))
    return [DiskDamage(node=node, fault=fault) for fault in faults]


def _random_clocks(rng: random.Random, num_nodes: int, duration_s: float) -> tuple[WrongClock, ...]:
    """Wrong clocks of a random plan: a skew within or beyond the allowed one, and a jump of seconds or of an hour."""
    if rng.random() < 0.5:
        return ()
    nodes = rng.sample(range(num_nodes), rng.randint(1, max(1, num_nodes // 3)))
    return tuple(
        WrongClock(
            node=node,
            skew_s=rng.choice([0.0, rng.uniform(-60.0, 60.0), rng.uniform(-600.0, 600.0)]),
            jumps_at_s=rng.uniform(0.0, duration_s * 0.2),  # every group that waits is too old after an hour's jump
            jump_s=rng.choice([0.0, rng.uniform(-10.0, 10.0), -3600.0, 3600.0]),
        )
        for node in nodes
    )


def _random_share(rng: random.Random) -> float | None:
    return rng.choice([0.3, 0.7, 0.7, 0.9, 1.0]) if rng.random() < 0.5 else None


def _random_relay_fault(rng: random.Random, node: int, duration_s: float) -> RelayFault:
    start_s = rng.choice([0.0, rng.uniform(0.0, duration_s * 0.5)])
    end_s = start_s + rng.uniform(0.05, 0.25) * duration_s
    return RelayFault(node=node, vice=rng.choice(sorted(RelayVice)), start_s=start_s, end_s=end_s)


def _random_partition(rng: random.Random, num_nodes: int, duration_s: float) -> Partition:
    start_s = rng.uniform(0.0, duration_s * 0.5)
    size = rng.randint(1, max(1, num_nodes // 2))
    island = frozenset(rng.sample(range(num_nodes), min(size, num_nodes)))
    return Partition(start_s=start_s, end_s=start_s + rng.uniform(0.05, 0.25) * duration_s, island=island)


def _random_crashes(rng: random.Random, num_nodes: int, duration_s: float) -> tuple[Crash, ...]:
    crashing = rng.sample(range(num_nodes), rng.randint(0, max(1, num_nodes // 4)))
    return tuple(_random_crash(rng, node, duration_s) for node in crashing)


def _random_crash(rng: random.Random, node: int, duration_s: float) -> Crash:
    return Crash(node=node, at_s=rng.uniform(0.0, duration_s * 0.6), down_s=rng.uniform(0.01, 0.15) * duration_s)
