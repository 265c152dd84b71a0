"""A paper is one file: short, its formula at the top, named by its acronym."""

import ast
import re
import statistics
from pathlib import Path

import swarm.objectives.methods as methods
from swarm.objectives.methods import list_recipes, load_recipe, source_of

FILES = sorted(path for path in Path(methods.__file__).parent.glob("*.py") if path.stem != "__init__")
LONG = {
    "a2tgpo": "z-scores by turns, a sum of them that keeps its size, and a clip of its own for each turn",
    "bapo": "two searches for the bounds of a clip",
    "dcpo": "running moments of a prompt, bounds by probability, and an aggregate",
    "dcpo_distribution": "a tempered policy, and the pull towards it",
    "drpo": "a decoupled likelihood, an aggregate and a constraint",
    "epo": "the band of the entropy with the schedule of its weight, and a band that pulls",
    "fg_expo": "a distribution of prompts by accuracy, and a KL that follows accuracy",
    "global_episodic": "a bonus by two counts of states, and the table of one of them",
    "gtpo_turn": "a likeness of texts, and the returns of turns with a price on slips",
    "hapo": "a z-score over tokens, and bounds and advantages by the place of the entropy",
    "ipa": "a return over chunks, a likelihood for successes, and a tapered turn ratio for failures",
    "lead": "closeness to a target length, and the proportion of two scores",
    "poise": "a ridge regression on projected states, in running sums",
    "prompt_gdro": "multiplicative weights over bins of difficulty",
    "rec": "three gates",
    "reinforce_ada": "a balanced choice from a pool, and when a pool is enough",
    "remix": "a clip around another policy, and a mixture of two divergences",
    "riskpo": "tracked quantiles, the risk of bundles, and its shares",
    "rollout_correction": "a table: six variants of one formula, each in words",
    "rollout_gdro": "counts of least variance at a fixed total",
    "score": "the returns of two answers, a KL of the first, and two stages",
    "seeupo": "a z-score of a turn, the weights of the turns behind it, and their sum",
    "segment_ratio": "sums over segments of two tokenizers",
    "spear": "an advantage, a warm-up, a clip by covariance and an aggregate for two ages",
}
"""More than 80 lines, with the mathematics that fills them."""


def num_lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def test_a_method_file_has_at_most_eighty_lines_or_mathematics_that_fill_more() -> None:
    long = {path.stem for path in FILES if num_lines(path) > 80}
    assert long <= set(LONG), f"list them in LONG with what fills them: {sorted(long - set(LONG))}"
    assert set(LONG) <= long, f"no longer long: {sorted(set(LONG) - long)}"
    assert max(map(num_lines, FILES)) <= 170


def test_half_of_the_method_files_have_fewer_than_fifty_lines_docstring_and_imports_included() -> None:
    assert statistics.median_low(map(num_lines, FILES)) < 50


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
