"""Presets of `swarm simulate`: named sets of environments, nodes and hyper-parameters.

Invariant: a preset is plain data; every node of a simulation is an ordinary `NodeConfig`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from swarm.config import (
    CoordinatorLink,
    DiskConfig,
    EngineConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ExchangeConfig,
    FaultConfig,
    FollowConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    NodeConfig,
    ReplayConfig,
    WeightsConfig,
    apply_overrides,
    explained,
    parse_config,
)
from swarm.environments.char_tasks import KINDS
from swarm.errors import ConfigError
from swarm.types import Role

Engine = Literal["transformers", "vllm"]
GROUPS_PER_BATCH = 2  # of a node that generates for a trainer: small batches are fresh ones
NAMES = ("ada", "bell", "curie", "dirac", "euler", "fermi", "gauss", "hopper")

Mode = Literal["push", "pull", "synchronous"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Defaults of a simulation, which the command line's options change."""

    name: str
    title: str
    environments: tuple[EnvironmentConfig, ...]
    num_nodes: int
    num_rounds: int
    model: ModelConfig
    learning_rate: float
    local_groups: int
    external_groups: int
    max_age_steps: int
    max_new_tokens: int
    evaluate_every: int
    num_problems: int
    worker: Literal["process", "inline"]
    generators: tuple[Engine, ...] = ()  # not empty: the first node only trains, these generate for it
    recipe: str = "sapo_swarm"
    keep_turn_signal: bool = False
    max_episode_tokens: int = 2048
    token_budget: int = 4096  # of a micro-batch; what SmolLM2 keeps for the backward pass is 1.1 MB a token
    num_tries: int = 0  # of each problem at an evaluation, sampled; 0: one greedy try
    lists_members: bool = False  # the run admits its own nodes only, by a list of their ids
    work_gflop: float = 0.0  # seconds it took on two idle cores, times their measured GFLOP/s; 0: not measured


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Options of `swarm simulate`; None and empty values leave the preset as it is."""

    preset: str = "smollm"
    nodes: int | None = None
    rounds: int | None = None
    minutes: float | None = None
    mix: tuple[int, int] | None = None  # local:external groups per step
    recipe: str = ""  # empty: the preset's
    seed: int = 0
    slow: dict[str, float] = field(default_factory=dict[str, float])  # node name -> factor
    kill: tuple[tuple[str, float], ...] = ()  # (node name or "coordinator", seconds after the first step)
    stop: tuple[tuple[str, float], ...] = ()  # SIGSTOP instead of SIGKILL
    restart: bool = False  # killed processes come back after 5 s
    latency_ms: float = 0.0
    barrier: bool = False
    deterministic: bool = False
    external: Literal["all", "positive"] = "positive"
    mode: Mode = "push"  # of the generators that follow a trainer
    has_vllm: bool = False  # else its generators use transformers, too
    colocated: bool = False  # the trainer of an echo preset generates for itself, alone
    overrides: tuple[str, ...] = ()  # key.path=value for every node, or NODE:key.path=value for one
    keep_checkpoints: bool = False  # after the end, with everything else that only a restart would read


_ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "exact": True}


def _arithmetic(name: str, dataset: str) -> EnvironmentConfig:
    return EnvironmentConfig(
        name=name,
        kind="reasoning_gym",
        dataset=dataset,
        params=_ONE_DIGIT,
        seed=1,
        prefill="Answer:",
    )


_SMOLLM = Preset(
    name="smollm",
    title="SmolLM2-135M: one node trains on sums only, the other on products only",
    environments=(_arithmetic("sums", "chain_sum"), _arithmetic("products", "products")),
    num_nodes=2,
    num_rounds=36,
    model=ModelConfig(source="smollm2", dtype="bfloat16"),
    learning_rate=1e-5,
    local_groups=4,
    external_groups=4,
    max_age_steps=2,
    max_new_tokens=6,
    evaluate_every=10,
    num_problems=64,
    worker="process",
    work_gflop=13_750.0,
)
_TINY = Preset(
    name="tiny",
    title="A 0.19M character model: every node trains on tasks of its own",
    environments=tuple(EnvironmentConfig(name=task, kind="char", dataset=task, seed=1) for task in KINDS),
    num_nodes=8,
    num_rounds=30,
    model=ModelConfig(source="tiny", dtype="float32"),
    learning_rate=1e-4,
    local_groups=2,
    external_groups=2,
    max_age_steps=4,
    max_new_tokens=9,
    evaluate_every=10,
    num_problems=40,
    worker="inline",
)
_ECHO = replace(
    _SMOLLM,
    name="echo",
    title="SmolLM2-135M: one node only trains, others only generate with its newest weights",
    num_nodes=4,
    local_groups=8,
    external_groups=0,
    evaluate_every=12,
    generators=("transformers", "transformers", "vllm"),
)
_ECHO_TINY = replace(
    _TINY,
    name="echo-tiny",
    title="A 0.19M character model: one node only trains, others only generate",
    num_nodes=4,
    local_groups=8,
    external_groups=0,
    max_age_steps=2,
    generators=("transformers", "transformers", "transformers"),
)
_TINY_AGENTS = replace(
    _TINY,
    name="tiny-agents",
    title="A 0.19M character model: two nodes look things up, two walk a grid, and each learns the other's task",
    environments=(
        EnvironmentConfig(name="look_up", kind="look_up", params={"style": "char"}, seed=1),
        EnvironmentConfig(name="grid", kind="grid_world", params={"style": "char", "max_turns": 6, "steps": 3}, seed=1),
    ),
    num_nodes=4,
    num_rounds=60,
    model=ModelConfig(source="tiny-agents", dtype="float32"),
    learning_rate=3e-4,
    local_groups=4,
    external_groups=4,
    evaluate_every=20,
    recipe="turn_reward_to_go",
    keep_turn_signal=True,
    max_new_tokens=6,
    max_episode_tokens=110,
    num_tries=4,
    lists_members=True,
)
_AGENTS = replace(
    _SMOLLM,
    name="agents",
    title="SmolLM2-135M over several turns: one node calls a calculator only, the other tries again only",
    environments=(
        EnvironmentConfig(name="calculator", kind="calculator", params={"call": "line", "max_turns": 3}, seed=1),
        EnvironmentConfig(
            name="retry",
            kind="retry",
            params={
                "inner": {"kind": "reasoning_gym", "dataset": "chain_sum", "params": _ONE_DIGIT},
                "hint": "order",
                "example": "chat",
            },
            seed=1,
        ),
    ),
    num_rounds=24,
    learning_rate=2e-5,
    recipe="grpo",  # a mean over rollouts: failures have more turns, and more weight in a mean over tokens
    max_new_tokens=12,  # CALC(12 * 34) and the end
    max_episode_tokens=160,
    token_budget=1024,
    evaluate_every=0,  # at the beginning and the end
    num_problems=16,
    num_tries=8,  # greedy it calls the calculator right from the beginning
    lists_members=True,
)
PRESETS = {preset.name: preset for preset in (_SMOLLM, _TINY, _ECHO, _ECHO_TINY, _TINY_AGENTS, _AGENTS)}


def node_configs(options: SimulationOptions, directory: Path) -> list[NodeConfig]:
    """The configurations of the nodes of a simulation, with their directories below `directory`; writes nothing.

    Each peer gets an equal share of the environments as its curriculum. Under an echo preset the first node trains, the
    others generate for it, and the curriculum of each is all environments.

    Raises:
        ConfigError: an unknown preset or node, or a configuration that cannot work.
    """
    preset = _with_environments(preset_of(options), options.overrides)
    names = _names(options, preset)
    with explained("simulate"):
        nodes = [_node(options, preset, index, names, directory) for index in range(len(names))]
        nodes = _echo(options, preset, nodes) if preset.generators else nodes
    overrides = [_of_node(each, [node.name for node in nodes]) for each in options.overrides]
    return [_overridden(node, overrides) for node in nodes]


def preset_of(options: SimulationOptions) -> Preset:
    """The preset that the options name. Raises ConfigError for an unknown one."""
    if options.preset not in PRESETS:
        raise ConfigError(f"--preset {options.preset}: unknown; choose one of {', '.join(PRESETS)}")
    return PRESETS[options.preset]


def _with_environments(preset: Preset, overrides: tuple[str, ...]) -> Preset:
    """The preset, with its environments replaced by those of `--set environments=...` if there are any."""
    data: dict[str, Any] = {"environments": [each.model_dump(mode="json") for each in preset.environments]}
    apply_overrides(NodeConfig, data, [each for each in overrides if each.startswith("environments")])
    return replace(preset, environments=parse_config(NodeConfig, data, "simulate").environments)


def _names(options: SimulationOptions, preset: Preset) -> list[str]:
    num_nodes = preset.num_nodes if options.nodes is None else options.nodes
    if preset.generators and num_nodes < 2:
        raise ConfigError(f"--nodes {num_nodes}: --preset {preset.name} needs a trainer and a generator at least")
    num_nodes = 1 if options.colocated else num_nodes
    names = [NAMES[i] if i < len(NAMES) else f"node{i}" for i in range(num_nodes)]
    hit = [name for name, _ in (*options.kill, *options.stop) if name != "coordinator"]
    for name in (*options.slow, *hit):
        if name not in names:
            raise ConfigError(f"{name}: no such node; the nodes are {', '.join(names)}")
    return names


def _of_node(override: str, names: Sequence[str]) -> tuple[str, str]:
    """Node (empty: every node) and `key=value` of an override. Raises ConfigError for an unknown node."""
    name, colon, own = override.partition(":")
    if not colon or "=" in name:
        return "", override
    if name not in names:
        raise ConfigError(f"--set {override}: no node {name!r}; the nodes are {', '.join(names)}")
    return name, own


def _overridden(node: NodeConfig, overrides: Sequence[tuple[str, str]]) -> NodeConfig:
    data = node.model_dump(mode="json")
    apply_overrides(NodeConfig, data, [override for name, override in overrides if name in ("", node.name)])
    changed = parse_config(NodeConfig, data, f"node {node.name}")
    if (changed.dir, changed.name) != (node.dir, node.name):
        raise ConfigError("--set dir, --set name: a simulation gives each node its own")
    return changed


def _node(options: SimulationOptions, preset: Preset, index: int, names: list[str], directory: Path) -> NodeConfig:
    """Configuration of one peer of a preset, which trains and generates."""
    name, all_environments = names[index], [environment.name for environment in preset.environments]
    owned = all_environments[index :: len(names)] or [all_environments[index % len(all_environments)]]
    local, external = options.mix or (preset.local_groups, preset.external_groups)
    is_synchronous = options.barrier or options.mode == "synchronous"
    return NodeConfig(
        dir=directory / name,
        name=name,
        run_id=f"simulate-{preset.name}",
        seed=options.seed * 1000 + index,
        worker=preset.worker,
        environments=preset.environments,
        model=preset.model,
        generator=GeneratorConfig(
            env_weights=dict.fromkeys(all_environments if preset.generators else owned, 1.0),
            max_new_tokens=preset.max_new_tokens,
            max_episode_tokens=preset.max_episode_tokens,
            groups_per_batch=max(1, local),
        ),
        replay=ReplayConfig(
            local_groups=local,
            external_groups=external,
            max_age_steps=0 if is_synchronous else preset.max_age_steps,  # rounds are strictly on-policy
            external=options.external,
            keep_turn_signal=preset.keep_turn_signal,
            barrier=is_synchronous,
        ),
        learner=LearnerConfig(
            recipe=options.recipe or preset.recipe,
            learning_rate=preset.learning_rate,
            num_steps=_num_steps(options, preset),
            at_end="serve",  # the others may not be done
            deterministic=options.deterministic,
            token_budget=preset.token_budget,
        ),
        disk=DiskConfig(checkpoint_at_end=options.keep_checkpoints),  # else it would be written to be deleted
        exchange=ExchangeConfig(lookup_every_s=0.5, advert_every_s=10.0),
        coordinator=CoordinatorLink(heartbeat_s=1.0),
        evaluation=EvaluationConfig(
            every_steps=preset.evaluate_every, num_problems=preset.num_problems, num_tries=preset.num_tries
        ),
        faults=FaultConfig(slow_factor=options.slow.get(name, 1.0), latency_ms=options.latency_ms),
    )


def _num_steps(options: SimulationOptions, preset: Preset) -> int:
    """Steps of each trainer; 0 (no limit) if only the minutes are limited."""
    if options.rounds is not None:
        return options.rounds
    return preset.num_rounds if options.minutes is None else 0


def _echo(options: SimulationOptions, preset: Preset, nodes: list[NodeConfig]) -> list[NodeConfig]:
    """The nodes in the roles of an echo preset: a trainer and its generators; colocated: the first node alone."""
    first, *others = nodes
    if options.colocated:
        return [first]
    trainer = first.model_copy(update={"roles": (Role.TRAINER,), "weights": WeightsConfig(publish=True)})
    mode: Literal["pull", "push"] = "push" if options.mode == "push" else "pull"
    followers: list[NodeConfig] = []
    for index, node in enumerate(others):
        engine = preset.generators[index % len(preset.generators)] if options.has_vllm else "transformers"
        roles = {
            "roles": (Role.GENERATOR,),
            "engine": EngineConfig(kind=engine),
            "follow": FollowConfig(mode=mode),
            "generator": node.generator.model_copy(update={"groups_per_batch": GROUPS_PER_BATCH}),
        }
        followers.append(node.model_copy(update=roles))
    return [trainer, *followers]
