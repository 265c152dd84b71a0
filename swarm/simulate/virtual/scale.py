"""Scale of a virtual swarm: work per step, look-up intervals and store sizes by number of nodes.

Invariant: the number of nodes alone decides, so that nodes, rounds and seed name a whole run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from swarm.config import (
    CoordinatorLink,
    EnvironmentConfig,
    EvaluationConfig,
    ExchangeConfig,
    GeneratorConfig,
    LearnerConfig,
    NodeConfig,
    ReplayConfig,
    parse_config,
)
from swarm.config.load_config import apply_overrides
from swarm.simulate.virtual.episode_plan import EpisodePlan

LARGE_SWARM: Final = 100
"""Number of nodes from which a run is LARGE."""

NUM_TASKS: Final = 2048  # of each environment
CHECKPOINT_EVERY: Final = 5
VIRTUAL_ENVIRONMENTS: Final = tuple(
    EnvironmentConfig(name=task, kind="char", dataset=task, seed=1, num_tasks=NUM_TASKS) for task in ("reverse", "sort")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Sizes and intervals of every node of one virtual swarm."""

    name: str
    local_groups: int
    external_groups: int
    max_neighbours: int
    paces: tuple[float, ...]  # choices for a node's factor on every duration; 1 is middling
    lookup_every_s: float  # virtual seconds, as all here
    advert_every_s: float
    heartbeat_s: float
    store_bytes: int  # what a node keeps after tidying; its disk has room for more
    disk_bytes: int
    has_real_signatures: bool  # Ed25519; else a keyed hash, which anybody could forge
    ends_by_steps: bool  # a round is one step of every node, which then only serves; else it is a span of time


SMALL: Final = Scale(
    name="small",
    local_groups=2,
    external_groups=2,
    max_neighbours=4,
    paces=(0.5, 1.0, 1.0, 2.0),
    lookup_every_s=2.0,
    advert_every_s=10.0,
    heartbeat_s=5.0,
    store_bytes=2 * 2**30,
    disk_bytes=64 * 2**20,
    has_real_signatures=True,
    ends_by_steps=False,
)
"""Scale of small swarms: everything happens often, for many short runs under faults."""

LARGE: Final = Scale(
    name="large",
    local_groups=1,
    external_groups=1,
    max_neighbours=2,
    paces=(0.75, 1.0, 1.0, 1.25),
    lookup_every_s=180.0,
    advert_every_s=60.0,
    heartbeat_s=20.0,
    store_bytes=128 * 2**10,
    disk_bytes=1 * 2**20,
    has_real_signatures=False,
    ends_by_steps=True,
)
"""Scale of large swarms: few groups and look-ups, for hundreds of nodes over a thousand steps each."""


def scale_of(num_nodes: int) -> Scale:
    """LARGE from LARGE_SWARM nodes on, else SMALL."""
    return LARGE if num_nodes >= LARGE_SWARM else SMALL


def virtual_config(
    index: int,
    seed: int,
    scale: Scale = SMALL,
    num_steps: int = 0,
    settings: Sequence[str] = (),
    episodes: EpisodePlan | None = None,
) -> NodeConfig:
    """An ordinary node configuration with the sizes and intervals of `scale`.

    Args:
        index: number of the node.
        seed: seed of the run.
        num_steps: steps after which the node's worker ends; 0: it does not end.
        settings: overrides, `section.key=value`. Raises ConfigError for one that cannot work.
        episodes: plan of the episodes that are played in place of single answers; None: single answers.
    """
    config = _config(index, seed, scale, num_steps)
    if episodes is not None:
        config = config.model_copy(update={"environments": episodes.configs})
        settings = (*episodes.settings, *settings)
    if not settings:
        return config
    data = config.model_dump()
    apply_overrides(NodeConfig, data, list(settings))
    return parse_config(NodeConfig, data, "fault plan")


def _config(index: int, seed: int, scale: Scale, num_steps: int) -> NodeConfig:
    return NodeConfig(
        name=f"n{index}",
        run_id="virtual",
        seed=seed * 1000 + index,
        environments=VIRTUAL_ENVIRONMENTS,
        generator=GeneratorConfig(group_size=2, groups_per_batch=scale.local_groups, max_new_tokens=16),
        replay=ReplayConfig(local_groups=scale.local_groups, external_groups=scale.external_groups, max_groups=256),
        learner=LearnerConfig(checkpoint_every=CHECKPOINT_EVERY, num_steps=num_steps),
        exchange=ExchangeConfig(
            lookup_every_s=scale.lookup_every_s,
            advert_every_s=scale.advert_every_s,
            max_neighbours=scale.max_neighbours,
            store_bytes=scale.store_bytes,
        ),
        coordinator=CoordinatorLink(heartbeat_s=scale.heartbeat_s),
        evaluation=EvaluationConfig(every_steps=0),
    )
