"""Environments from configuration: the built-in kinds, and a class of the user's own (kind `plugin`).

Invariant: libraries of a kind are imported only when an environment of that kind is built, and only this node's own
configuration names local code: a run manifest may name a plugin by entry point and digest of an installed package.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, cast

from swarm.config import EnvironmentConfig
from swarm.environments.replay import ConfiguredEnvironment, Score, replay
from swarm.environments.retry import RetryEnvironment
from swarm.errors import ConfigError
from swarm.interfaces import Environment
from swarm.plugins import EXTRAS, code_version, load_entry_point, load_extra, load_object, load_own, package_digest

_READS_FILES: Final = ("jsonl", "function", "plugin", "python")
ENTRY_POINTS: Final = "swarm.environments"  # group in which packages offer environments by name
# of interfaces.Environment
_MEMBERS: Final = ("name", "verifier", "num_tasks", "max_turns", "task", "episode", "reference")
# Strings, so that a char task never loads reasoning-gym, nor a JSONL file sympy.
_KINDS: Final[Mapping[str, str]] = {
    "calculator": "swarm.environments.calculator:CalculatorEnvironment",
    "char": "swarm.environments.char_tasks:CharEnvironment",
    "function": "swarm.environments.jsonl:FunctionEnvironment",
    "grid_world": "swarm.environments.grid_world:GridWorldEnvironment",
    "jsonl": "swarm.environments.jsonl:RecordEnvironment",
    "look_up": "swarm.environments.look_up:LookUpEnvironment",
    "reasoning_gym": "swarm.environments.reasoning_gym:ReasoningGymEnvironment",
}
SIGNALS: Final = ("turn_rewards", "state_keys", "tool_calls", "reward_parts")
"""Signals that an environment may give besides the outcome (its attribute `signals`): a reward for each turn, a key of
each state, calls of tools, several named rewards."""


def build_environment(config: EnvironmentConfig) -> Environment:
    """Builds the environment of one configuration section (blocking). Raises ConfigError, which names the fix."""
    made = _build(config)
    verifier, score = made.verifier, None
    if config.exchange != "replayable":
        method = getattr(made, "score", None)
        score = cast("Score", method) if callable(method) else None
        if config.exchange == "scored" and score is None:
            raise ConfigError(
                f'environment {config.name}: exchange "scored" judges the last action alone; give {config.dataset} a '
                "method score(task_id, text) that returns named rewards"
            )
        verifier += " scored" if score else ""
    if config.kind == "plugin":
        verifier += f" {code_version(type(made))}"
    if config.reward_weights and config.kind != "function":  # which adds up its own
        _check_weights(made, config.reward_weights)
        verifier += " " + ",".join(f"{name}={weight!r}" for name, weight in sorted(config.reward_weights.items()))
    if verifier == made.verifier:
        return made
    return ConfiguredEnvironment(made, verifier, config.reward_weights, score)


def _check_weights(environment: Environment, weights: Mapping[str, float]) -> None:
    """Raises ConfigError for a weight whose reward a played demonstration lacks, never without a demonstration."""
    demonstrate = getattr(environment, "demonstration", None)
    if demonstrate is None:
        return
    known = replay(environment, 0, demonstrate(0)).rewards
    if unknown := sorted(weights.keys() - known.keys()):
        raise ConfigError(
            f"environment {environment.name}: reward_weights names {', '.join(unknown)}; "
            f"its rewards: {', '.join(sorted(known))}"
        )


def _build(config: EnvironmentConfig) -> Environment:
    if config.kind == "retry":
        assert config.inner is not None
        return RetryEnvironment(config, build_environment(config.inner))
    if config.kind in EXTRAS:
        return load_extra(config.kind)(config)
    if config.kind in _KINDS:
        return load_own(_KINDS[config.kind])(config)
    return load_plugin(config)


def load_plugin(config: EnvironmentConfig) -> Environment:
    """Builds an instance of the class `config.dataset` ("module:Class", "path/file.py:Class", or an entry point).

    The class is called with the configuration section and must make an `interfaces.Environment`. Its code runs in the
    sandbox to score answers, and in the worker to ask questions. If the section has a digest, the installed package
    must have the same one, so that a manifest can name an environment whose code is equal on every node.

    Raises:
        ConfigError: there is no such class or its package has another digest, its constructor raised, or the instance
            lacks a member or has one of a wrong value; the message names the fix.

    Example:
        load_plugin(EnvironmentConfig(name="sums", kind="plugin", dataset="my_sums.py:Sums"))
    """
    origin = f"environment {config.name}: {config.dataset}"
    if config.digest:
        _check_package(origin, config)
    make = load_object(config.dataset) if ":" in config.dataset else load_entry_point(ENTRY_POINTS, config.dataset)
    if not isinstance(make, type):
        raise ConfigError(f"{origin} is not a class; kind `function` takes a function, kind `plugin` an Environment")
    is_of_openenv = any(base.__module__.startswith("openenv.") for base in make.__mro__)
    if is_of_openenv and not hasattr(make, "episode"):  # it is not made, which may start servers
        raise ConfigError(
            f"{origin} is an Environment of OpenEnv: it has no numbered tasks, and its actions are no texts; wrap it "
            "in a class with the members of Environment in swarm/interfaces.py (docs/environments.md, OpenEnv)"
        )
    try:
        made = cast("Callable[[EnvironmentConfig], Environment]", make)(config)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{origin} is made with the configuration section as its only argument and raised "
            f"{type(error).__name__}: {error}"
        ) from error
    missing = [member for member in _MEMBERS if not hasattr(made, member)]
    if missing:
        raise ConfigError(f"{origin} has no {', '.join(missing)}; see Environment in swarm/interfaces.py")
    for member in ("num_tasks", "max_turns"):
        count = getattr(made, member)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{origin}.{member} is {count!r}, and must be a whole number of at least 1")
    answer_cpu_s = getattr(made, "answer_cpu_s", 1.0)
    if isinstance(answer_cpu_s, bool) or not isinstance(answer_cpu_s, int | float) or not 0 < answer_cpu_s < math.inf:
        raise ConfigError(f"{origin}.answer_cpu_s is {answer_cpu_s!r}, and must be a number of seconds above 0")
    with suppress(LookupError):  # a record without its field, say: that task alone
        told = made.task(0).max_turns
        if told != made.max_turns:
            raise ConfigError(f"{origin}.task(0).max_turns is {told}, and .max_turns {made.max_turns}; say the same")
    if made.name != config.name:
        raise ConfigError(f"{origin}.name is {made.name!r}; take it from the configuration: config.name")
    return made


def _check_package(origin: str, config: EnvironmentConfig) -> None:
    """Raises ConfigError unless the installed package has the configured digest; imports nothing of the package."""
    if ":" in config.dataset:
        raise ConfigError(f"{origin} has a digest, which is of an installed package; name its entry point")
    package, digest = package_digest(ENTRY_POINTS, config.dataset)
    if digest != config.digest:
        raise ConfigError(
            f"{origin}: the installed {package} has digest {digest}, the run asks for {config.digest}; install that one"
        )


def signals_of(environment: Environment) -> frozenset[str]:
    """Names of the signals that an environment gives besides the outcome. Raises ConfigError for an unknown name."""
    signals: frozenset[str] = frozenset(getattr(environment, "signals", ()))
    if unknown := sorted(signals - set(SIGNALS)):
        raise ConfigError(f"environment {environment.name}: signals {', '.join(unknown)}; known: {', '.join(SIGNALS)}")
    return signals


def build_environments(configs: Iterable[EnvironmentConfig]) -> dict[str, Environment]:
    """Builds all environments: name -> environment. Raises as `build_environment`, and ConfigError for equal names."""
    environments: dict[str, Environment] = {}
    for config in configs:
        if config.name in environments:
            raise ConfigError(f"environments: the name {config.name!r} is used twice")
        environments[config.name] = build_environment(config)
    return environments


def reads_files(config: EnvironmentConfig) -> bool:
    """True if the environment of a section may read paths relative to the node's working directory."""
    return (config.inner or config).kind in _READS_FILES


def record_paths(config: EnvironmentConfig) -> list[Path]:
    """The existing file or folder that an environment still reads after it is built, as a list of at most one."""
    config = config.inner or config
    where = config.params.get("path") or (config.dataset if config.kind in ("jsonl", "python") else "")
    if config.kind not in _READS_FILES or not where:
        return []
    path = Path(str(where)).expanduser()
    return [path.resolve()] if path.exists() else []
