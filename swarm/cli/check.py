"""`swarm check`: tries the configuration of a node or a run, and shows some tasks of each environment.

Invariant: importing this file is cheap; nothing is written, and no peer is dialled. If the command prints "valid",
every environment was built, and a few of its tasks were made and scored as a node does it.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from typer import Argument, Option

from swarm.cli.shared_options import Trust
from swarm.command_line import waiting
from swarm.errors import ConfigError
from swarm.types import Correction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from node.sampled_tasks import SampledEnvironment
    from swarm.config import CoordinatorConfig, Model, NodeConfig
    from swarm.config.load_config import Key
    from swarm.environments.determinism import Examined
    from swarm.interfaces import Tokenizer
    from swarm.objectives.fallbacks import RecipeSet
    from swarm.wire.run_manifest import RunManifest

console = Console()


def check(
    directory: Annotated[
        Path | None, Argument(help="Directory of a node or coordinator. Default: swarm-node.", show_default=False)
    ] = None,
    config: Annotated[Path | None, Option("--config", "-c", help="node.toml or coordinator.toml")] = None,
    set_: Annotated[list[str] | None, Option("--set", help="Override one key.")] = None,
    prints: Annotated[bool, Option("--print", help="Only print every key as TOML, with its source.")] = False,
    measures: Annotated[
        bool, Option("--measure", help="Make two steps with the real model and print the seconds.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Try the configuration of a node or a run without starting it: recipes, environments, some tasks of each.

    Every environment is built, three of its tasks are shown as the model reads them, and their right answers scored.
    Memory, disk, and the bytes of groups and versions are estimated; seconds are printed with --measure alone.
    """
    from node.device_checks import machine_choice, with_choice
    from node.disk_budget import disk_line
    from node.expectations import expectation_lines, measure, measured_lines
    from swarm.config import CoordinatorConfig, NodeConfig, config_file, has_section, load_config
    from swarm.objectives.methods import recipes_of
    from swarm.objectives.requirements import Requirement
    from swarm.trained.own_directories import code_of_node, require_trusted
    from swarm.wire.run_manifest import kept_back, manifest_of

    config = config_file(directory, config)
    is_run = has_section(config, "node")  # coordinator.toml, with the nodes' configuration
    if prints:
        typer.echo(_resolved(CoordinatorConfig if is_run else NodeConfig, config, set_ or []), nl=False)
        return
    settings = load_config(CoordinatorConfig, config, set_).node if is_run else load_config(NodeConfig, config, set_)
    if is_run:  # a manifest names no code, whoever made the file
        manifest_of(settings, settings.run_id, "", 0.0)
    require_trusted(config.parent, code_of_node(settings), trust, set_ or ())
    recipes = recipes_of(settings)
    _say_packages(settings)
    tokenizer = _tokenizer(settings, is_run)
    with waiting("building the environments and scoring some answers"):
        lines, sampled = asyncio.run(_environments(settings, tokenizer))
        if not is_run:  # a coordinator scores nothing
            asyncio.run(_require_confinement(settings))
    if tokenizer is not None:
        has_reference = Requirement.REFERENCE_LOGPROBS in recipes.needs
        if choice := machine_choice(settings):
            lines.append(f"  computes in {choice.words}")
            lines += [f"  note: {choice.advice}"] if choice.advice else []
        lines += [f"  {line}" for line in expectation_lines(with_choice(settings, choice), sampled, has_reference)]
        lines.append(f"  {disk_line(settings)}")
    console.print(f"{config}: valid; recipe {recipes.main.name} ({recipes.main.acronym or recipes.main.verification})")
    _say_recipes(recipes)
    if is_run and (lost := kept_back(settings)):
        lines.append(f"  note: no node takes {', '.join(lost)} from a manifest: set it in each node's own node.toml")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if measures:
        with waiting("making two steps with the real model, which may take minutes"):
            measured = asyncio.run(measure(settings))
        for line in measured_lines(measured):
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _resolved(kind: "type[CoordinatorConfig] | type[NodeConfig]", path: Path, overrides: list[str]) -> str:
    """The configuration that a start would use, with the run's newest manifest, as TOML with the source of each key."""
    from swarm.config import NodeConfig, inline_value, load_config, sources_of, to_toml
    from swarm.wire.held_manifest import HELD, load_held, with_held

    settings, sources = load_config(kind, path, overrides), sources_of(kind, path, overrides)
    held = load_held(settings.dir, settings.run_id) if isinstance(settings, NodeConfig) else None
    if held is None or not isinstance(settings, NodeConfig):
        return to_toml(settings, sources)
    followed = with_held(settings, held)
    for section in ("entry", "coordinator"):
        before, after = getattr(settings, section), getattr(followed, section)
        sources |= {(section, name): HELD for name in _differing(before, after)}
    notes: dict[Key, str] = {}
    for key, own, asked in _recommended(followed, held.manifest):
        notes |= {(*key, name): f"{HELD} has {inline_value(getattr(asked, name))}" for name in _differing(own, asked)}
    return to_toml(followed, sources, notes)


def _recommended(node: "NodeConfig", run: "RunManifest") -> "Iterator[tuple[Key, Model, Model]]":
    """Yields (key, the node's own section, the manifest's section) for each section that a manifest recommends."""
    for section in ("model", "generator", "replay", "learner", "evaluation"):
        yield (section,), getattr(node, section), getattr(run, section)
    asked = {each.name: each for each in run.environments}
    for number, own in enumerate(node.environments):
        if own.name in asked:
            yield ("environments", number), own, asked[own.name]


def _differing(one: "Model", other: "Model") -> list[str]:
    return [name for name in type(one).model_fields if getattr(one, name) != getattr(other, name)]


def _say_packages(settings: "NodeConfig") -> None:
    """Prints package and digest of each installed environment, which a run's manifest needs."""
    from swarm.environments.load import ENTRY_POINTS
    from swarm.plugins import package_digest

    for each in settings.environments:
        if each.kind == "plugin" and ":" not in each.dataset:
            package, digest = package_digest(ENTRY_POINTS, each.dataset)
            console.print(f'environment {each.name}: {package}, digest = "{digest}"', markup=False, soft_wrap=True)


_KINDS: Final = {
    Correction.EXACT: "with log-probs, of this tokenizer",
    Correction.NO_LOGPROBS: "without log-probs",
    Correction.TEXT_ONLY: "of another tokenizer",
}


def _say_recipes(recipes: "RecipeSet") -> None:
    """Prints the recipe for each kind of groups, or one line if one recipe takes all kinds."""
    found = {kind: None if (of_kind := recipes.of(kind)) is None else of_kind[1].name for kind in _KINDS}
    if len(set(found.values())) == 1:
        console.print(
            "  from groups of every kind; without log-probs or of another tokenizer an eighth of others' places"
        )
        return
    for kind, name in found.items():
        console.print(f"  groups {_KINDS[kind]}: {name or 'refused'}")


def _tokenizer(settings: "NodeConfig", is_run: bool) -> "Tokenizer | None":
    """Tokenizer of the model. Raises ConfigError if there is none; for a run, prints the error and returns None."""
    from swarm.model.tokenizer import load_tokenizer

    try:
        return load_tokenizer(settings.model)
    except ConfigError as error:
        if not is_run:
            raise
        console.print(f"prompts are not shown as tokens: {error}", markup=False, soft_wrap=True)
        return None


async def _environments(
    settings: "NodeConfig", tokenizer: "Tokenizer | None"
) -> "tuple[list[str], list[SampledEnvironment]]":
    """Lines about each environment, and its sampled tasks. Raises ConfigError for one that no node could use."""
    from node.sampled_tasks import doubts, model_notes, sample_environments, task_lines, warm_up_plan
    from swarm.environments.determinism import examine, require_repeatable
    from swarm.environments.soundness import narrow_tokenizer

    look = examine if settings.is_alone else require_repeatable
    examined = await look(settings.environments, settings.sandbox, narrow_tokenizer(settings.model))
    lines: list[str] = []
    sampled = await sample_environments(settings, tokenizer)
    for each in sampled:
        name, section = each.section.name, each.section
        dataset = f" {section.dataset}" if section.dataset else ""
        what = f"{section.exchange}{_local(examined, name)}, {section.kind}{dataset}, {each.num_tasks:,} problems"
        lines.append(f"  environment {name}: {what}")
        if (local := examined.get(name)) and local.difference and settings.is_alone:
            lines.append(f"  environment {name}: {local.difference}; use it alone only")
        lines += [f"  {line}" for line in task_lines(each)]
        lines += [f"  note: {doubt}" for doubt in doubts(settings, each)]
    lines += [f"  model: {note}" for note in model_notes(settings, tokenizer)]
    lines += [f"  warm-up: {line}" for line in warm_up_plan(settings, sampled)]
    return lines, sampled


async def _require_confinement(settings: "NodeConfig") -> None:
    from swarm.environments.sandbox.confinement_check import require_confinement
    from swarm.environments.sandbox.verifier import SandboxVerifier

    verifier = SandboxVerifier(settings.environments, settings.sandbox)
    try:
        await require_confinement(settings, verifier.limits_in_force)
    finally:
        await verifier.close()


def _local(examined: "dict[str, Examined]", name: str) -> str:
    local = examined.get(name)
    return f", at most {local.max_turns} turn{'s' * (local.max_turns > 1)} (max_turns)" if local else ""
