"""Published methods by name: one file each, or `my_file.py:RECIPE` of the user's own.

Invariant: a built-in recipe's name is its file's name; importing this package loads no recipe and no torch.
"""

import difflib
import functools
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarm.config import LearnerConfig, NodeConfig
from swarm.errors import ConfigError
from swarm.plugins import load_object, module_of

if TYPE_CHECKING:
    from swarm.objectives.fallbacks import RecipeSet
    from swarm.objectives.recipe import Recipe


@functools.cache
def list_recipes() -> tuple[str, ...]:
    """Names of the built-in recipes, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_recipe(spec: str, params: Mapping[str, Any] | None = None, key: str = "learner.recipe") -> "Recipe":
    """A recipe with some of its constants replaced.

    Args:
        spec: a built-in name, `my_file.py:NAME`, or `package.module:NAME`.
        params: overrides of constants by address, such as {"weight.high": 0.28}.
        key: of the configuration that names it, for messages.

    Raises:
        ConfigError: unknown name (with the names most like it), not a recipe, unknown constant.
    """
    from swarm.objectives.recipe import Recipe

    if spec not in list_recipes() and ":" not in spec:
        raise ConfigError(f"{key}: unknown recipe {spec!r}; {_similar(spec)}")
    recipe = load_object(_full(spec))
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{key}: {spec} is a {type(recipe).__name__}, not a swarm.objectives.recipe.Recipe")
    return recipe.with_params(params or {})


def load_recipes(learner: LearnerConfig) -> "RecipeSet":
    """The recipe of a learner, and those for the kinds of rollouts that it cannot learn from.

    Raises:
        ConfigError: as `load_recipe`, or a kind's recipe cannot learn from that kind.
    """
    from swarm.objectives.fallbacks import KEYS, RecipeSet

    specs = {kind: getattr(learner, key) for kind, key in KEYS.items()}
    fallbacks = {kind: load_recipe(spec, key=f"learner.{KEYS[kind]}") for kind, spec in specs.items() if spec}
    return RecipeSet(main=load_recipe(learner.recipe, learner.recipe_params), fallbacks=fallbacks)


def recipes_of(config: NodeConfig) -> "RecipeSet":
    """The recipes of a node, everything that they and the guard's need supplied by its run.

    Raises:
        ConfigError: names the key, and what is missing with its fix.
    """
    from swarm.objectives.requirements import check_safe, check_supply, supplied_by

    found, supplied = load_recipes(config.learner), supplied_by(config)
    for recipe in found.used.values():
        check_supply(recipe, supplied)
    if config.guard.enabled:
        check_safe(load_recipe(config.guard.safe_recipe, key="guard.safe_recipe"), found.needs, supplied)
    return found


def source_of(spec: str) -> str:
    """Name in `sys.modules` of the module that a loaded recipe came from."""
    return module_of(_full(spec))


def _full(spec: str) -> str:
    return f"{__name__}.{spec}:RECIPE" if spec in list_recipes() else spec


def _similar(spec: str) -> str:
    """What was probably meant: built-in names like it, names that contain it, or the recipe of that acronym."""
    known = list_recipes()
    wanted = spec.lower().replace("-", "_")
    found = [name for name in known if wanted and wanted in name]
    found += [name for name in known if load_recipe(name).acronym.lower() == spec.lower()]
    found += difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    if not found:
        return "`swarm recipes` lists the built-in ones; your own is my_file.py:RECIPE"
    return f"did you mean {', '.join(dict.fromkeys(found[:5]))}? `swarm recipes` lists all; yours is my_file.py:RECIPE"
