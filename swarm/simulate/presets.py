"""What `swarm simulate` runs: named sets of environments, nodes and hyper-parameters.

Invariant: a preset is plain data; every node of a simulation is an ordinary `NodeConfig`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from swarm.config import (
    CoordinatorLink,
    DirectoryConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ExchangeConfig,
    FaultConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    NodeConfig,
    ReplayConfig,
)
from swarm.errors import ConfigError
from swarm.tasks.char import KINDS

NAMES = ("ada", "bell", "curie", "dirac", "euler", "fermi", "gauss", "hopper")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A simulation before the command line's options."""

    name: str
    title: str
    environments: tuple[EnvironmentConfig, ...]
    num_nodes: int
    num_rounds: int
    model: ModelConfig
    learning_rate: float
    warmup_steps: int
    local_groups: int
    external_groups: int
    max_age_steps: int
    max_new_tokens: int
    evaluate_every: int
    num_problems: int
    worker: Literal["process", "inline"]
    max_minutes: float


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """What the command line may change."""

    preset: str = "smollm"
    nodes: int | None = None
    rounds: int | None = None
    minutes: float | None = None
    mix: tuple[int, int] | None = None  # local:external groups per step
    recipe: str = "swarm_sampling"
    seed: int = 0
    slow: dict[str, float] = field(default_factory=dict[str, float])  # node name -> factor
    kill: tuple[tuple[str, float], ...] = ()  # (node name or "coordinator", seconds after the first step)
    stop: tuple[tuple[str, float], ...] = ()  # SIGSTOP instead of SIGKILL
    restart: bool = False  # killed processes come back after 5 s
    latency_ms: float = 0.0
    barrier: bool = False
    deterministic: bool = False
    foreign: Literal["all", "positive"] = "positive"
    overrides: tuple[str, ...] = ()  # key.path=value for every node
    out: Path | None = None


def _arithmetic(name: str, dataset: str) -> EnvironmentConfig:
    return EnvironmentConfig(
        name=name,
        kind="reasoning_gym",
        dataset=dataset,
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "exact": True},
        seed=1,
        prefill="Answer:",
    )


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            name="smollm",
            title="SmolLM2-135M: one node asks only sums, the other only products",
            environments=(_arithmetic("sums", "chain_sum"), _arithmetic("products", "products")),
            num_nodes=2,
            num_rounds=36,
            model=ModelConfig(source="smollm2", dtype="bfloat16"),
            learning_rate=1e-5,
            warmup_steps=0,
            local_groups=4,
            external_groups=4,
            max_age_steps=2,
            max_new_tokens=6,
            evaluate_every=10,
            num_problems=64,
            worker="process",
            max_minutes=10.0,
        ),
        Preset(
            name="tiny",
            title="A 0.19M character model: every node asks only its own tasks",
            environments=tuple(EnvironmentConfig(name=task, kind="char", dataset=task, seed=1) for task in KINDS),
            num_nodes=8,
            num_rounds=30,
            model=ModelConfig(source="tiny", dtype="float32"),
            learning_rate=1e-4,
            warmup_steps=0,
            local_groups=2,
            external_groups=2,
            max_age_steps=4,
            max_new_tokens=9,
            evaluate_every=10,
            num_problems=40,
            worker="inline",
            max_minutes=3.0,
        ),
    )
}


def node_configs(options: SimulationOptions, directory: Path) -> list[NodeConfig]:
    """The nodes of a simulation: each owns an equal share of the environments and asks only those.

    Raises:
        ConfigError: unknown preset, or more nodes than environments can be shared among.
    """
    if options.preset not in PRESETS:
        raise ConfigError(f"--preset {options.preset}: unknown; choose one of {', '.join(PRESETS)}")
    preset = PRESETS[options.preset]
    num_nodes = options.nodes or preset.num_nodes
    names = [NAMES[i] if i < len(NAMES) else f"node{i}" for i in range(num_nodes)]
    for name in [*options.slow, *(name for name, _ in (*options.kill, *options.stop))]:
        if name not in (*names, "coordinator"):
            raise ConfigError(f"{name}: no such node; the nodes are {', '.join(names)}")
    all_environments = [environment.name for environment in preset.environments]
    local, external = options.mix or (preset.local_groups, preset.external_groups)
    configs: list[NodeConfig] = []
    for index, name in enumerate(names):
        owned = all_environments[index::num_nodes] or [all_environments[index % len(all_environments)]]
        configs.append(
            NodeConfig(
                dir=directory / name,
                name=name,
                run_id=f"simulate-{preset.name}",
                seed=options.seed * 1000 + index,
                worker=preset.worker,
                environments=preset.environments,
                model=preset.model,
                generator=GeneratorConfig(
                    asks=dict.fromkeys(owned, 1.0),
                    max_new_tokens=preset.max_new_tokens,
                    groups_per_batch=max(1, local),
                ),
                replay=ReplayConfig(
                    local_groups=local,
                    external_groups=external,
                    max_age_steps=0 if options.barrier else preset.max_age_steps,  # rounds are strictly on-policy
                    foreign=options.foreign,
                    barrier=options.barrier,
                ),
                learner=LearnerConfig(
                    recipe=options.recipe,
                    learning_rate=preset.learning_rate,
                    warmup_steps=preset.warmup_steps,
                    num_steps=options.rounds or (0 if options.minutes else preset.num_rounds),
                    deterministic=options.deterministic,
                ),
                exchange=ExchangeConfig(lookup_every_s=0.5, advert_every_s=10.0),
                directory=DirectoryConfig(rejoin_every_s=5.0),
                coordinator=CoordinatorLink(heartbeat_s=1.0),
                evaluation=EvaluationConfig(every_steps=preset.evaluate_every, num_problems=preset.num_problems),
                faults=FaultConfig(slow_factor=options.slow.get(name, 1.0), latency_ms=options.latency_ms),
            )
        )
    return configs
