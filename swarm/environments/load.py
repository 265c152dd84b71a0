"""From configuration to environments.

Invariant: a loader's libraries are imported only when an environment of its kind is built.
"""

from collections.abc import Iterable

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment
from swarm.errors import ConfigError


def build_environment(config: EnvironmentConfig) -> NumberedEnvironment:
    """The environment of one configuration section. Raises ConfigError: the message names it and the fix."""
    # the imports are here so that a char task never loads reasoning-gym, nor a JSONL file sympy
    if config.kind == "char":
        from swarm.environments.char_tasks import CharEnvironment

        return CharEnvironment(config)
    if config.kind == "reasoning_gym":
        from swarm.environments.reasoning_gym import ReasoningGymEnvironment

        return ReasoningGymEnvironment(config)
    if config.kind == "jsonl":
        from swarm.environments.jsonl import RecordEnvironment

        return RecordEnvironment(config)
    from swarm.environments.reward_function import FunctionEnvironment

    return FunctionEnvironment(config)


def build_environments(configs: Iterable[EnvironmentConfig]) -> dict[str, NumberedEnvironment]:
    """Every environment by name, in order. Raises ConfigError when two share a name."""
    environments: dict[str, NumberedEnvironment] = {}
    for config in configs:
        if config.name in environments:
            raise ConfigError(f"environments: the name {config.name!r} is used twice")
        environments[config.name] = build_environment(config)
    return environments
