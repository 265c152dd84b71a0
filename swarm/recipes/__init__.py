"""Published methods by name: one file each, or `my_pkg.my_file:RECIPE` of the user's own.

Invariant: listing or importing this package loads no recipe and no torch.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarm.errors import ConfigError
from swarm.plugins import load_object

if TYPE_CHECKING:
    from swarm.learn.objective import Recipe

_BUILT_IN = {
    "balanced_clip": "swarm.recipes.balanced_clip:RECIPE",
    "balanced_clip_paper": "swarm.recipes.balanced_clip:PAPER",
    "grpo": "swarm.recipes.grpo:RECIPE",
    "min_prefix_ratio": "swarm.recipes.min_prefix_ratio:RECIPE",
    "swarm_sampling": "swarm.recipes.swarm_sampling:RECIPE",
}


def list_recipes() -> tuple[str, ...]:
    """Names of the built-in recipes, sorted."""
    return tuple(sorted(_BUILT_IN))


def load_recipe(spec: str, params: Mapping[str, Any] | None = None) -> "Recipe":
    """A recipe with some of its constants replaced.

    Args:
        spec: a built-in name or `package.module:NAME`.
        params: overrides of the recipe's named constants.

    Raises:
        ConfigError: unknown name, not a recipe, unknown constant.
    """
    from swarm.learn.objective import Recipe

    if spec not in _BUILT_IN and ":" not in spec:
        raise ConfigError(
            f"learner.recipe: unknown recipe {spec!r}; built in: {', '.join(list_recipes())}; "
            "your own is package.module:NAME"
        )
    recipe = load_object(_BUILT_IN.get(spec, spec))
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"learner.recipe: {spec} is a {type(recipe).__name__}, not a swarm.learn.objective.Recipe")
    return recipe.with_params(params or {})
