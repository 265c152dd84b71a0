"""Published methods by name: one file each, or `my_pkg.my_file:RECIPE` of the user's own.

Invariant: a built-in recipe's name is its file's name; importing this package loads no recipe and no torch.
"""

import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarm.errors import ConfigError
from swarm.plugins import load_object

if TYPE_CHECKING:
    from swarm.learn.recipe import Recipe


def list_recipes() -> tuple[str, ...]:
    """Names of the built-in recipes, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_recipe(spec: str, params: Mapping[str, Any] | None = None) -> "Recipe":
    """A recipe with some of its constants replaced.

    Args:
        spec: a built-in name or `package.module:NAME`.
        params: overrides of constants by address, such as {"weight.high": 0.28}.

    Raises:
        ConfigError: unknown name, not a recipe, unknown constant.
    """
    from swarm.learn.recipe import Recipe

    known = list_recipes()
    if spec not in known and ":" not in spec:
        raise ConfigError(
            f"learner.recipe: unknown recipe {spec!r}; built in: {', '.join(known)}; your own is package.module:NAME"
        )
    recipe = load_object(f"{__name__}.{spec}:RECIPE" if spec in known else spec)
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"learner.recipe: {spec} is a {type(recipe).__name__}, not a swarm.learn.recipe.Recipe")
    return recipe.with_params(params or {})
