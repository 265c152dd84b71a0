"""`swarm recipes`: lists the recipes, and shows equation, constants and file of one.

Invariant: importing this file is cheap; recipes (and torch with them) are loaded when a command runs. The
output of `--json` has the fields of `swarm.cli.recipe_description.summary`.
"""

import inspect
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from swarm.types import JsonDict

if TYPE_CHECKING:
    from swarm.objectives.recipe import Recipe

recipes_app = typer.Typer(help="Objectives that a learner can use.", invoke_without_command=True)
console = Console() if sys.stdout.isatty() else Console(width=160)  # a pipe has no width of its own

_WIDE = 130  # columns of a terminal that shows everything

JsonOption = Annotated[bool, Option("--json", help="Machine-readable.")]
MarkdownOption = Annotated[bool, Option("--markdown", help="As docs/recipes_table.md.")]
NameArgument = Annotated[str, Argument(help="A built-in recipe, or my_file.py:RECIPE.")]


@recipes_app.callback()
def recipes(context: typer.Context, as_json: JsonOption = False) -> None:
    """List the built-in objectives; `swarm recipes show NAME` explains one."""
    if context.invoked_subcommand is None:
        _list(as_json)


@recipes_app.command("list")
def recipes_list(as_json: JsonOption = False, as_markdown: MarkdownOption = False) -> None:
    """List the built-in objectives."""
    if as_markdown:
        from swarm.cli.recipe_description import markdown_table

        typer.echo(markdown_table(_built_in()), nl=False)
        return
    _list(as_json)


@recipes_app.command("show")
def recipes_show(name: NameArgument, as_json: JsonOption = False) -> None:
    """Explain an objective: its equation, its constants and how to change them, its needs, the rollouts it accepts."""
    from swarm.cli.recipe_description import details
    from swarm.objectives.methods import load_recipe, source_of

    recipe = load_recipe(name)
    module = sys.modules[source_of(name)]
    about = recipe.about or inspect.cleandoc(module.__doc__ or "")
    file = os.path.relpath(module.__file__ or "")
    if as_json:
        typer.echo(json.dumps(details(recipe, about) | {"file": file}, indent=2))
    else:
        console.print(_page(recipe, about, file))


def _list(as_json: bool) -> None:
    from swarm.cli.recipe_description import summary

    rows = [summary(recipe) for recipe in _built_in()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        console.print(_table(rows))


def _built_in() -> "list[Recipe]":
    from swarm.objectives.methods import list_recipes, load_recipe

    return [load_recipe(name) for name in list_recipes()]


# --- for people --------------------------------------------------------------------------------


def _table(rows: list[JsonDict]) -> RenderableType:
    """A table with one line per recipe; a narrow terminal gets fewer columns, never half a name."""
    columns = ["name", "acronym", "paper", "scope"]
    if console.width >= _WIDE:
        columns += ["formula", "needs"]
    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column != "needs", style="cyan" if column == "name" else "")
    for row in rows:
        cells = {
            **row,
            "paper": row["arxiv"] or "see show",
            "formula": row["verification"],
            "needs": ", ".join(f"{need} (not yet)" if need in row["not_yet"] else need for need in row["needs"]) or "-",
        }
        table.add_row(*(Text(cells[column]) for column in columns))
    note = f"{len(rows)} recipes; `swarm recipes show NAME` explains one, `--json` gives every part and constant."
    idle = [f"  {row['name']} ({', '.join(row['not_yet'])})" for row in rows if row["not_yet"]]
    if idle:
        idle.insert(0, f"{len(idle)} cannot run yet: no run supplies what stands behind them.")
    return Group(table, Text("\n".join([*idle, note]), style="dim"))


def _page(recipe: "Recipe", about: str, file: str) -> RenderableType:
    from swarm.cli.recipe_description import KINDS, VERIFICATION, loss_line, parts_of, summary
    from swarm.objectives.requirements import how_to_supply

    plain = summary(recipe)
    facts = [
        ("paper", recipe.title),
        ("link", plain["url"] or "-"),
        ("formula", f"{recipe.verification}: {VERIFICATION[recipe.verification]}"),
        ("file", file),
        ("runs", f"not yet: nothing supplies {', '.join(plain['not_yet'])}" if plain["not_yet"] else "yes"),
    ]
    equations = [
        (each.address, Text.assemble(each.equation, "\n", (f"{each.part}: {each.summary}", "dim")))
        for each in parts_of(recipe)
    ]
    sets = [f"--set learner.recipe_params.{address}={_toml(value)}" for address, value in recipe.constants.items()]
    scope = Text(f"scope {recipe.scope}: {_SCOPES[str(recipe.scope)]}", style="dim")
    marks = {True: "yes", False: "no, it needs behaviour log-probs"}
    kinds = [(kind.name, f"{marks[recipe.accepts(kind)]} ({what})") for kind, what in KINDS.items()]
    parts: list[RenderableType] = [
        Text.assemble((recipe.name, "bold cyan"), f"  {recipe.acronym}" if recipe.acronym else ""),
        Padding(Text(about), (1, 0)),
        _pairs(facts),
    ]
    for heading, content in (
        ("Equation", (Text(loss_line(recipe)), _pairs(equations))),
        ("Constants", (Text("\n".join(sets) or "none"),)),
        ("Needs", (_pairs([(str(need), how_to_supply(need)) for need in sorted(recipe.needs)]), scope)),
        ("Rollouts it accepts", (_pairs(kinds),)),
    ):
        parts.append(Text(f"\n{heading}", style="bold"))
        parts += [Padding(each, (0, 0, 0, 2)) if isinstance(each, Text) else each for each in content]
    return Group(*parts)


_SCOPES = {
    "token": "a token's coefficient depends on that token alone",
    "rollout": "a token's coefficient depends on its whole response",
    "group": "a token's coefficient depends on its whole group",
    "step": "a token's coefficient depends on the whole step, which is scored before its first backward pass "
    "where it does not fit into one",
}


def _pairs(rows: Sequence[tuple[str, str | Text]]) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for name, value in rows:
        table.add_row(Text(name), Text(value) if isinstance(value, str) else value)
    return table


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)
