"""Eight tasks on short strings for a tiny character model, such as `rev:abcd=` -> `dcba`.

Invariant: a prompt has at most 14 characters and an answer 1 to 8, all of `ALPHABET`; the reward is a
plain string comparison, so scoring external text in these environments is safe in any process.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from swarm.config import EnvironmentConfig
from swarm.environments.environment import AnswerEnvironment, Problem
from swarm.environments.params import drawn_from
from swarm.errors import ConfigError

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789:=#>+-*? "
_LETTERS = ALPHABET[:26]
_DIGITS = ALPHABET[26:36]

Draw = Callable[[random.Random], str]
Solve = Callable[[str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    prefix: str  # names the task to the model
    draw: Draw  # the argument, from a seeded generator
    solve: Solve  # argument -> answer


def _text(alphabet: str, shortest: int, longest: int) -> Draw:
    def draw(source: random.Random) -> str:
        return "".join(source.choice(alphabet) for _ in range(source.randint(shortest, longest)))

    return draw


def _draw_countable(source: random.Random) -> str:
    # the count is uniform over 1..5, so that no constant answer pays
    letter, *others = source.sample(_LETTERS, 3)
    word = [letter] * source.randint(1, 5) + [source.choice(others) for _ in range(2)]
    source.shuffle(word)
    return letter + ">" + "".join(word)


def _draw_with_maximum(source: random.Random) -> str:
    # the maximum is uniform over 1..9: of independent digits it would be 9 in two of five questions
    largest = source.randint(1, 9)
    digits = [largest] + [source.randint(0, largest) for _ in range(source.randint(2, 5))]
    source.shuffle(digits)
    return "".join(str(digit) for digit in digits)


def _draw_repetitive(source: random.Random) -> str:
    pool = source.sample(_LETTERS, 4)
    return "".join(source.choice(pool) for _ in range(source.randint(4, 7)))


def _count(argument: str) -> str:
    letter, _, word = argument.partition(">")
    return str(word.count(letter))


KINDS: dict[str, _Kind] = {
    "reverse": _Kind(prefix="rev", draw=_text(_LETTERS, 3, 6), solve=lambda text: text[::-1]),
    "sort": _Kind(prefix="sort", draw=_text(_DIGITS, 3, 6), solve=lambda text: "".join(sorted(text))),
    "binary": _Kind(prefix="bin", draw=lambda source: str(source.randrange(256)), solve=lambda text: f"{int(text):b}"),
    "count": _Kind(prefix="cnt", draw=_draw_countable, solve=_count),
    "caesar": _Kind(
        prefix="next",
        draw=_text(_LETTERS, 3, 6),
        solve=lambda text: "".join(_LETTERS[(_LETTERS.index(letter) + 1) % 26] for letter in text),
    ),
    "unique": _Kind(prefix="uniq", draw=_draw_repetitive, solve=lambda text: "".join(dict.fromkeys(text))),
    "max": _Kind(prefix="max", draw=_draw_with_maximum, solve=max),
    "double": _Kind(
        prefix="dbl", draw=_text(_LETTERS, 2, 4), solve=lambda text: "".join(letter * 2 for letter in text)
    ),
}


class CharTask:
    """Generator of (question, answer) pairs of one of the eight tasks, for a warm start.

    Example:
        CharTask("reverse", seed=0).sample(5)  # ("rev:ydlk=", "kldy")
    """

    def __init__(self, kind: str, seed: int = 0) -> None:
        """Raises ConfigError when `kind` is not a key of KINDS."""
        if kind not in KINDS:
            raise ConfigError(f"char task {kind!r} is unknown; known: {', '.join(KINDS)}")
        self.kind = kind
        self.seed = seed

    def sample(self, task_id: int) -> tuple[str, str]:
        """The (question, answer) pair number `task_id`, drawn from a generator seeded by seed, kind and number."""
        kind = KINDS[self.kind]
        argument = kind.draw(random.Random(f"{self.seed}:{self.kind}:{task_id}"))
        return f"{kind.prefix}:{argument}=", kind.solve(argument)


class CharEnvironment(AnswerEnvironment):
    """One char task behind the Environment protocol: reward 1 for the exact answer, else 0."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Builds the task that `config.dataset` names. Raises ConfigError if it is unknown or there are params."""
        if config.params:
            raise ConfigError(f"environment {config.name}: char tasks take no params, got {sorted(config.params)}")
        if config.dataset not in KINDS:
            raise ConfigError(
                f"environment {config.name}: dataset {config.dataset!r} is unknown; known: {', '.join(KINDS)}"
            )
        super().__init__(config, f"char-{config.dataset}-{drawn_from(config, config.params)}/1")
        self._source = CharTask(config.dataset, config.seed)

    def build(self, task_id: int) -> Problem:
        question, answer = self._source.sample(task_id)
        return Problem(question=question, reference=answer)

    def judge(self, problem: Problem, answer: str) -> float:
        return 1.0 if answer == problem.reference else 0.0
