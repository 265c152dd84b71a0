"""Plan of the episodes that a virtual swarm plays in place of single answers: environments, limits, recipe, time.

Invariant: a plan is frozen and plain, and a random one follows from its seed alone; every configuration that it makes
is one that a node would start with.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from swarm.config import EnvironmentConfig
from swarm.environments.load import build_environment, build_environments, signals_of
from swarm.interfaces import Environment
from swarm.simulate.virtual.forged_episodes import EPISODE_ATTACKS

NUM_EPISODE_TASKS: Final = 2048  # of each environment
TOKEN_S: Final = 0.01  # virtual seconds per token at a node of pace 1

PARAMS: Final[Mapping[str, dict[str, Any]]] = {
    "reverse": {},  # single answers, among the others
    "retry": {"inner": {"kind": "char", "dataset": "sort"}},
    "look_up": {"style": "char"},
    "grid_world": {"style": "char"},
    "nim": {"style": "char", "heaps": 2, "stones": 4},
    "notes": {"style": "char", "parts": 2},
    "calculator": {"call": "line", "operations": "+-"},
    "apps": {},
    "dialogue": {"slots": 3, "missing": 1},
}
"""Environments of the virtual swarm by name, with parameters besides `max_turns`."""

LONG_ACTIONS: Final = frozenset({"apps", "dialogue"})  # environments whose calls have some hundred characters
RECIPES: Final[Mapping[str, frozenset[str]]] = {
    "sapo_swarm": frozenset(),
    "ufo": frozenset(),
    "malformed_turn_filter": frozenset(),
    "trloo": frozenset(),
    "turn_reward_to_go": frozenset(),
    "simpletir": frozenset({"tool_calls"}),
    "gigpo": frozenset({"state_keys"}),
    "matchtir": frozenset({"turn_rewards"}),
}
"""Recipes of a random plan, with the signals of environments that each needs."""
TURN_SIGNAL: Final = frozenset({"trloo", "turn_reward_to_go", "gigpo", "matchtir"})
"""Recipes that need groups of equal outcomes whose turns earned different rewards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePlan:
    """Environments, token limits, recipe and attacks of the episodes of one run."""

    environments: tuple[tuple[str, int], ...] = (("look_up", 5), ("calculator", 4))  # name, most turns
    max_new_tokens: int = 16
    max_episode_tokens: int = 256
    recipe: str = "turn_reward_to_go"
    step_s: float = 0.05  # most that an environment takes for an action, virtual seconds
    keep_turn_signal: bool = True
    loads_in_flight: bool = False  # new weights in the middle of a conversation
    attacks: tuple[str, ...] = ()  # of the turncoats in turn, in place of those that they have; empty: as they have

    @classmethod
    def random(cls, seed: int) -> "EpisodePlan":
        """A plan drawn from `seed`."""
        rng = random.Random(f"episode plan {seed}")
        names = rng.sample(sorted(PARAMS), rng.randint(1, 3))
        if all(name == "reverse" for name in names):
            names.append("calculator")
        environments = tuple((name, 1 if name == "reverse" else rng.randint(2, 8)) for name in sorted(names))
        is_long = bool(LONG_ACTIONS.intersection(names))
        supplied = frozenset[str]().union(*(signals_of(build_environment(_config(*each))) for each in environments))
        recipe = rng.choice([name for name, needed in RECIPES.items() if needed <= supplied])
        return cls(
            environments=environments,
            max_new_tokens=128 if is_long else rng.choice([14, 16, 24]),
            max_episode_tokens=rng.choice([256, 512, 1024] if is_long else [64, 256, 1024]),
            recipe=recipe,
            step_s=rng.choice([0.0, 0.05, 0.2]),
            keep_turn_signal=recipe in TURN_SIGNAL or rng.random() < 0.5,
            loads_in_flight=rng.random() < 0.5,
            attacks=tuple(rng.choice(["", *EPISODE_ATTACKS]) for _ in range(3)),
        )

    @property
    def configs(self) -> tuple[EnvironmentConfig, ...]:
        """Configurations of all environments."""
        return tuple(_config(name, max_turns) for name, max_turns in self.environments)

    @property
    def settings(self) -> tuple[str, ...]:
        """Overrides of every node's configuration, `section.key=value`, besides the environments."""
        return (
            f"generator.max_new_tokens={self.max_new_tokens}",
            f"generator.max_episode_tokens={self.max_episode_tokens}",
            f"learner.recipe={self.recipe}",
            f"replay.keep_turn_signal={str(self.keep_turn_signal).lower()}",
        )

    @property
    def longest_s(self) -> float:
        """Upper bound on the virtual seconds of one episode at a node of pace 1."""
        most_turns = max(max_turns for _, max_turns in self.environments)
        return most_turns * (self.max_new_tokens * TOKEN_S + self.step_s)


@lru_cache(maxsize=64)  # for all nodes, and all runs of a process
def episode_environments(plan: EpisodePlan) -> dict[str, Environment]:
    """The environments of a plan, by name; cached, so that all nodes share them."""
    return build_environments(plan.configs)


def _config(name: str, max_turns: int) -> EnvironmentConfig:
    section: dict[str, Any] = {"name": name, "seed": 1, "num_tasks": NUM_EPISODE_TASKS}
    if name == "reverse":
        section |= {"kind": "char", "dataset": name}
    else:
        section |= {"kind": name, "params": {**PARAMS[name], "max_turns": max_turns}}
    return EnvironmentConfig(**section)
