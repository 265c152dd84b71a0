"""Whether a run can give a recipe what it needs, decided before the run starts.

Invariant: every `Need` has an entry, which says what is missing and what to change.
"""

from collections.abc import Collection

from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.objectives.part import Need
from swarm.objectives.recipe import Recipe

MAX_REPEATED_TASKS = 10_000  # of one environment: with more, a prompt comes back too seldom for its history to help

_ALWAYS = frozenset({Need.BEHAVIOR_LOGPROBS, Need.PROXIMAL_LOGPROBS, Need.REFERENCE_LOGPROBS, Need.BASELINE_ROLLOUT})
NOT_YET = frozenset({Need.REFERENCE_REWARDS, Need.TURNS, Need.PREVIOUS_DRAW, Need.BUDGETS, Need.REWARD_PARTS})
"""What no run can supply yet, whatever its configuration."""

_NOT_BUILT = "no part of a run makes them yet; choose a recipe without this need (`swarm recipes list`)"
_FIXES = {
    Need.BEHAVIOR_LOGPROBS: "the generator must sample at a temperature above 0 without top_p, top_k or penalties",
    Need.PROXIMAL_LOGPROBS: "the learner scores them itself",
    Need.REFERENCE_LOGPROBS: "the learner scores them itself with the initial weights",
    Need.REFERENCE_REWARDS: f"rewards of the reference policy's own responses: {_NOT_BUILT}",
    Need.BASELINE_ROLLOUT: "the learner answers each prompt greedily itself",
    Need.SILENT_GROUPS: "groups whose rewards are all equal are left out: set replay.keep_silent = true",
    Need.SEVERAL_UPDATES: "with one update a draw its policy is always the proximal one: "
    "set learner.updates_per_step = 2 or more",
    Need.TURNS: "every environment of this run is single-turn: choose a recipe without this need, "
    "or an environment with several turns",
    Need.REPEATED_PROMPTS: "prompts hardly ever come back, so that their history means nothing: set num_tasks of each "
    f"environment that is asked to {MAX_REPEATED_TASKS} or less",
    Need.VARIED_GROUPS: "every group has generator.group_size rollouts: set generator.largest_group on every node",
    Need.PREVIOUS_DRAW: f"the draw before, once more: {_NOT_BUILT}",
    Need.SEGMENT_LOGPROBS: "nodes of another tokenizer must say what their tokens stand for: "
    "set generator.byte_lengths = true on every node",
    Need.BUDGETS: f"prompts that ask for a number of tokens: {_NOT_BUILT}",
    Need.REWARD_PARTS: "every environment of this run gives one reward: choose a recipe without this need, "
    "or an environment that names its rewards",
}


def check_supply(recipe: Recipe, supplied: Collection[Need]) -> None:
    """Refuses a recipe that the run cannot feed. Raises ConfigError: the message names what is missing and the fix."""
    missing = sorted(recipe.needs - set(supplied))
    if missing:
        reasons = "; ".join(f"{need}: {_FIXES[need]}" for need in missing)
        raise ConfigError(f"learner.recipe {recipe.name} needs what this run does not supply. {reasons}")


def how_to_supply(need: Need) -> str:
    """What a run has to do for a need."""
    return _FIXES[need]


def supplied_by(config: NodeConfig) -> frozenset[Need]:
    """What a node with this configuration supplies."""
    asked = [env for env in config.environments if not config.generator.asks or env.name in config.generator.asks]
    found = set(_ALWAYS)
    if config.replay.keep_silent:
        found.add(Need.SILENT_GROUPS)
    if config.generator.byte_lengths:
        found.add(Need.SEGMENT_LOGPROBS)
    if config.learner.updates_per_step > 1:
        found.add(Need.SEVERAL_UPDATES)
    if config.generator.largest_group > config.generator.group_size:
        found.add(Need.VARIED_GROUPS)
    if asked and all(env.num_tasks <= MAX_REPEATED_TASKS for env in asked):
        found.add(Need.REPEATED_PROMPTS)
    return frozenset(found)


def check_safe(safe: Recipe, needs: frozenset[Need], supplied: frozenset[Need]) -> None:
    """Refuses a safe recipe that the guard could not switch to in the middle of a run.

    Args:
        safe: the recipe of `guard.safe_recipe`.
        needs: of the configured recipes: what is prepared from the start.
        supplied: what the run can supply.

    Raises:
        ConfigError: names what is missing.
    """
    check_supply(safe, supplied)
    missing = safe.needs & {Need.REFERENCE_LOGPROBS, Need.BASELINE_ROLLOUT} - needs
    if missing:
        names = ", ".join(sorted(missing))
        raise ConfigError(
            f"guard.safe_recipe: {safe.name} needs {names}, which the configured recipe does not prepare; "
            "use sequence_ratio"
        )
