"""A paper is one file: short, its formula at the top, named by its acronym."""

import ast
import re
import statistics
from pathlib import Path

import swarm.objectives.methods as methods
from swarm.objectives.methods import list_recipes, load_recipe, source_of

FILES = sorted(path for path in Path(methods.__file__).parent.glob("*.py") if path.stem != "__init__")
LONG = {
    "bapo": "two published forms, and the search for its bounds",
    "capo": "second moments of a token's step in the last layer",
    "dapo": "its reward and overlong filtering beside the clip",
    "dcpo": "bounds by probability, an advantage with a history, and an aggregate",
    "dcpo_distribution": "a tempered policy and its target",
    "dhpo": "two mixtures of two surrogates",
    "drpo": "a weight, an aggregate and a constraint",
    "epo": "the released band and one that pulls, with their schedule",
    "fg_expo": "a KL that follows accuracy, and prompts by accuracy",
    "hapo": "bounds and advantages by entropy",
    "lead": "two scores and their proportion",
    "m2po": "the search for its bound",
    "minpro": "the exact prefix ratio beside the smallest",
    "nsr": "three recipes of one paper",
    "pipo": "its history of draws",
    "poise": "a probe fitted over steps",
    "prime_rl": "two losses of one trainer",
    "prompt_gdro": "bins of difficulty over steps",
    "r2vpo": "two levels of one paper",
    "rec": "three gates of one paper",
    "reinforce_ada": "prompts, advantage and aggregate",
    "remix": "a clip, and a mixture of two divergences",
    "riskpo": "bundles, quantiles and credit",
    "rl_plus": "a ratio and a shaper for external rollouts",
    "rollout_correction": "a table of eight variants",
    "rollout_gdro": "counts by bins of difficulty",
    "segment_ratio": "segments of two tokenizers",
    "spear": "an advantage, a warm-up and a clip for two kinds of tokens",
    "st_ppo": "two levels of one paper",
    "topr": "two published forms",
}
"""More than 80 lines, with what fills them."""


def test_a_method_file_has_at_most_eighty_lines_or_a_reason() -> None:
    long = {path.stem for path in FILES if len(path.read_text("utf-8").splitlines()) > 80}
    assert long <= set(LONG), f"list them in LONG with what fills them: {sorted(long - set(LONG))}"
    assert set(LONG) <= long, f"no longer long: {sorted(set(LONG) - long)}"


def test_half_of_the_methods_need_fewer_than_fifty_lines_beside_docstring_and_imports() -> None:
    assert statistics.median(map(num_lines, FILES)) < 50


def num_lines(path: Path) -> int:
    """Lines of a file's classes, functions and recipes, blank ones aside."""
    text = path.read_text("utf-8")
    lines, body = text.splitlines(), ast.parse(text).body
    kept = [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr)]
    return sum(bool(line.strip()) for node in kept for line in lines[node.lineno - 1 : node.end_lineno])


def test_every_method_states_its_formula_before_its_code() -> None:
    for name in list_recipes():
        recipe, path = load_recipe(name), Path(__import__(source_of(name), fromlist=["x"]).__file__ or "")
        doc = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        assert "Formula: " in recipe.about or re.search(r"(?m)^    \S", doc), f"{name}: {path.name}"


def test_a_recipe_stands_in_a_file_that_is_found_by_its_acronym() -> None:
    for name, file in {
        "dapo": "dapo",
        "grpo": "grpo",
        "gspo": "gspo",
        "tis": "tis",
        "ppo": "ppo",
        "rloo": "rloo",
    }.items():
        assert source_of(name) == f"swarm.objectives.methods.{file}"
