"""A recipe for people and programs: its parts with equations and constants, its needs, and the rollouts it accepts.

Invariant: everything is derived from the recipe itself, so that the description is of the code that runs.
"""

import inspect
from dataclasses import dataclass, fields
from typing import Any, cast

from swarm.objectives.part import Part
from swarm.objectives.recipe import Recipe
from swarm.objectives.requirements import NOT_YET, how_to_supply
from swarm.types import Correction, JsonDict

ORDER = ("prompts", "rewards", "advantage", "shapers", "ratio", "corrections", "weight", "aggregate", "terms")
"""Slots of a recipe in the order in which a rollout meets them."""

VERIFICATION = {
    "code": "formula read in the authors' or a framework's released code",
    "paper": "formula read in the paper's text; no code was compared",
    "secondary": "formula read in another paper's or a survey's account",
    "ours": "our own method, or a published one of which a core is ours: the text above says what",
}

KINDS = {
    Correction.EXACT: "same tokenizer, the generator's own log-probs at a known temperature",
    Correction.NO_LOGPROBS: "same tokenizer, no usable log-probs of the generator",
    Correction.TEXT_ONLY: "another tokenizer, or only the text travelled; it is re-encoded here",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PartDescription:
    """A part of a recipe with its equation and constants."""

    address: str  # such as "weight" or "terms.kl_penalty"
    part: str  # its class
    equation: str
    summary: str  # first paragraph of its docstring
    constants: dict[str, Any]  # field -> value; overridden as learner.recipe_params.<address>.<field>


def parts_of(recipe: Recipe) -> list[PartDescription]:
    """Every part of the recipe, in the order in which a rollout meets the parts."""
    found = dict(recipe.parts)
    if recipe.prompts is not None:
        found.setdefault("prompts", recipe.prompts)
    return [
        _described(address, part)
        for slot in ORDER
        for address, part in found.items()
        if address == slot or address.startswith(f"{slot}.")
    ]


def summary(recipe: Recipe) -> JsonDict:
    """The recipe as plain JSON data; the names of the fields are stable.

    Fields: name, acronym, title, arxiv, url (null if there is none), verification, scope, needs, not_yet (needs that no
    run can supply yet; a recipe with one cannot run), accepts, parts (address -> class, equation, constants).
    """
    return {
        "name": recipe.name,
        "acronym": recipe.acronym,
        "title": recipe.title,
        "arxiv": recipe.arxiv or None,
        "url": recipe.url or (f"https://arxiv.org/abs/{recipe.arxiv}" if recipe.arxiv else None),
        "verification": recipe.verification,
        "scope": str(recipe.scope),
        "needs": sorted(str(need) for need in recipe.needs),
        "not_yet": sorted(str(need) for need in recipe.needs & NOT_YET),
        "accepts": [str(kind) for kind in Correction if recipe.accepts(kind)],
        "parts": {
            each.address: {"part": each.part, "equation": each.equation, "constants": each.constants}
            for each in parts_of(recipe)
        },
    }


def details(recipe: Recipe, about: str) -> JsonDict:
    """`summary` with the description `about`, the way to supply each need, and the address of every constant."""
    return {
        **summary(recipe),
        "about": about,
        "supply": {str(need): how_to_supply(need) for need in sorted(recipe.needs)},
        "constants": {f"learner.recipe_params.{address}": value for address, value in recipe.constants.items()},
    }


def loss_line(recipe: Recipe) -> str:
    """The equation of the loss with the slots that this recipe fills."""
    corrections = "corrections * " if recipe.corrections else ""
    return f"loss = aggregate({corrections}L_t){' + terms' if recipe.terms else ''}"


def markdown_table(recipes: list[Recipe]) -> str:
    """The text of docs/recipes_table.md: one line per recipe."""
    return "\n".join([*_HEAD, *(_row(recipe) for recipe in recipes)]) + "\n"


_HEAD = (
    "# All recipes",
    "",
    "Made by `swarm recipes list --markdown`; a test fails when it is not current. *Takes*: which kinds of rollouts a",
    "recipe may learn from ([recipes.md](recipes.md) explains kinds, needs, scope and where formulas come from).",
    "*Runs*: yes, or the need that no run can supply yet.",
    "",
    "| name | acronym | paper | formula from | scope | needs | takes | runs |",
    "|---|---|---|---|---|---|---|---|",
)


def _row(recipe: Recipe) -> str:
    source = f"[{recipe.arxiv}](https://arxiv.org/abs/{recipe.arxiv})" if recipe.arxiv else ""
    if not source and recipe.url:
        source = f"[link]({recipe.url})"
    takes = "all" if all(map(recipe.accepts, Correction)) else "EXACT"
    needs = ", ".join(sorted(recipe.needs)) or "-"
    cells = (f"`{recipe.name}`", recipe.acronym or "-", source or "-", recipe.verification)
    missing = ", ".join(sorted(recipe.needs & NOT_YET))
    runs = f"not yet: nothing supplies {missing}" if missing else "yes"
    return f"| {' | '.join((*cells, str(recipe.scope), needs, takes, runs))} |"


def _described(address: str, part: Part) -> PartDescription:
    return PartDescription(
        address=address,
        part=type(part).__name__,
        equation=part.equation,
        summary=" ".join((inspect.getdoc(type(part)) or "").partition("\n\n")[0].split()),
        constants={field.name: getattr(part, field.name) for field in fields(cast(Any, part))},
    )
