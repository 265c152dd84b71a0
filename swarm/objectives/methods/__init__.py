"""Published methods, one file for each paper, named by its acronym; and loading of recipes, also of the user's own.

Invariant: a file contains its recipe, the parts that no other method uses, and their sources; every `Recipe` at the top
level of a file is built in under the recipe's name. Importing this package loads no recipe and no torch.
Shape letters in every file here: N rollouts, L longest response in tokens, M groups, G members of a group.
"""

import difflib
import functools
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
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
    return tuple(sorted(_files()))


def built_in_name(spec: str) -> str | None:
    """Returns the name of the built-in recipe with this name or acronym ("Dr.GRPO" is `dr_grpo`); None if unknown."""
    return _plain_names().get(_plain(spec))


def load_recipe(spec: str, params: Mapping[str, Any] | None = None, key: str = "learner.recipe") -> "Recipe":
    """Loads a recipe and replaces some of its constants.

    Args:
        spec: a built-in name or its acronym, `my_file.py:NAME`, or `package.module:NAME`.
        params: overrides of constants by address, such as {"weight.high": 0.28}.
        key: configuration key that names the recipe, for error messages.

    Raises:
        ConfigError: the name is unknown (the message suggests similar names), the object cannot be loaded or is not a
            recipe, or a constant is unknown or has an illegal value.
    """
    from swarm.objectives.recipe import Recipe

    if ":" in spec:
        recipe = load_object(spec)
    elif (name := built_in_name(spec)) is not None:
        known = vars(import_module(source_of(spec))).values()
        recipe = next(each for each in known if isinstance(each, Recipe) and each.name == name)
    else:
        raise ConfigError(f"{key}: unknown recipe {spec!r}; {_similar(spec)}")
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"{key}: {spec} is a {type(recipe).__name__}, not a swarm.objectives.recipe.Recipe")
    return recipe.with_params(params or {})


def load_recipes(learner: LearnerConfig) -> "RecipeSet":
    """Loads the main recipe of a learner and its fallback recipes for other kinds of rollouts.

    Raises:
        ConfigError: as for `load_recipe`, or a fallback recipe does not accept its kind.
    """
    from swarm.objectives.fallbacks import KEYS, RecipeSet

    specs = {kind: getattr(learner, key) for kind, key in KEYS.items()}
    fallbacks = {kind: load_recipe(spec, key=f"learner.{KEYS[kind]}") for kind, spec in specs.items() if spec}
    return RecipeSet(main=load_recipe(learner.recipe, learner.recipe_params), fallbacks=fallbacks)


def recipes_of(config: NodeConfig) -> "RecipeSet":
    """Loads the recipes of a node and checks that its run supplies all their requirements.

    Raises:
        ConfigError: as for `load_recipes`, or a requirement is not supplied; the message names each gap and its fix.
    """
    from swarm.objectives.requirements import check_supply, supplied_by

    found, supplied = load_recipes(config.learner), supplied_by(config)
    for recipe in found.used.values():
        check_supply(recipe, supplied)
    return found


def source_of(spec: str) -> str:
    """Name in `sys.modules` of the module that a loaded recipe came from."""
    name = built_in_name(spec)
    return module_of(spec) if name is None else f"{__name__}.{_files()[name].stem}"


@functools.cache
def _files() -> dict[str, Path]:
    """Recipe name -> file, found in the text of the files: a coordinator checks names and cannot import torch."""
    paths = (path for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")
    return {name: path for path in paths for name in re.findall(r'(?m)^    name="(\w+)",$', path.read_text("utf-8"))}


@functools.cache
def _plain_names() -> dict[str, str]:
    return {_plain(name): name for name in list_recipes()}


def _plain(name: str) -> str:
    """Returns a name or acronym in lower case without separators, such as "reinforceplusplus" for "REINFORCE++"."""
    spelled = name.lower().replace("+", "plus").replace("*", "star").replace("@", "at")
    return re.sub(r"[^a-z0-9]", "", spelled)


def _similar(spec: str) -> str:
    """Text with suggestions for an unknown name: names that contain it, files that contain its words, close matches."""
    known, wanted = list_recipes(), spec.lower().replace("-", "_")
    found = [name for name in known if wanted and wanted in name]
    if words := re.findall(r"[a-z0-9]+", wanted):
        phrase = re.compile(r"[\W_]*".join(words))
        found += sorted(name for name, path in _files().items() if phrase.search(path.read_text("utf-8").lower()))
    found += difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    if not found:
        return "`swarm recipes` lists the built-in ones; your own is my_file.py:RECIPE"
    return f"did you mean {', '.join(dict.fromkeys(found[:5]))}? `swarm recipes` lists all; yours is my_file.py:RECIPE"
