"""Training from Python: what `swarm train` does, with records and a function of the caller's program.

Invariant: the run is that of `swarm train`: its directory holds everything, and every command works on it.
"""

import asyncio
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.train import train as run_training
from node.train_options import TrainOptions
from swarm.errors import ConfigError
from swarm.events import PolicyEvaluated
from swarm.telemetry import read_events

RECORDS: Final = "records.jsonl"
REWARD: Final = "reward.py"

Reward = Callable[..., float]
"""(question, answer, reference) or (question, answer, reference, record) -> number."""


@dataclass(frozen=True, slots=True)
class Training:
    """A training in its directory, for `swarm samples`, `eval`, `chat` and `export`."""

    directory: Path

    def held_out(self, env: str = "own") -> list[tuple[int, float]]:
        """(step, success on held-out problems) of each evaluation, in order."""
        found = {
            event.step: event.accuracy
            for event in read_events(self.directory / "events.jsonl")
            if isinstance(event, PolicyEvaluated) and (event.env, event.split) == (env, "held_out")
        }
        return sorted(found.items())


def train(
    model: str,
    tasks: Iterable[Mapping[str, Any]] | str | Path,
    reward: Reward | str | None = None,
    *,
    directory: str | Path = "swarm-train",
    steps: int = 100,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Training:
    """Trains a model on this machine alone (blocking); the same call goes on from its directory.

    Args:
        model: `smollm2`, a folder, or a hub id; `tiny` for a try.
        tasks: records with `question` (or `messages`) and `answer`, or a .jsonl file of them.
        reward: what an answer is worth; a function is copied as source, so what it uses is imported inside of it. A
            text names one as `my_file.py:score`. None: the answer must be the same text or number.
        directory: of the training.
        steps: optimizer steps in all.
        say: where lines for people go.
        **options: further ones of `node.train_options.TrainOptions`, such as `learning_rate` or `reward_range`.

    Raises:
        ConfigError: it cannot begin, or nothing can be learned; with the reason.

    Example:
        run = swarm.train("tiny", [{"question": "sort:cab=", "answer": "abc"}, ...], steps=40)
        print(run.held_out())
    """
    folder = Path(directory)
    if not isinstance(tasks, str | Path):
        text = "".join(json.dumps(dict(record)) + "\n" for record in tasks)
        tasks = _written(folder / RECORDS, text)
    spec = reward or ""
    if callable(spec):
        spec = f"{_written(folder / REWARD, _source(spec))}:{spec.__name__}"
    asyncio.run(
        run_training(
            TrainOptions(directory=folder, model=model, data=Path(tasks), reward=spec, steps=steps, **options),
            say,
        )
    )
    return Training(folder)


def _written(path: Path, text: str) -> Path:
    """A file with that text; one that is there stays. Raises ConfigError where it has another text."""
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{path} is of another training: name another directory, or give what this one was begun with"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _source(reward: Reward) -> str:
    """The source of a plain function. Raises ConfigError for what has none, or needs what is around it."""
    if not inspect.isfunction(reward) or reward.__name__ == "<lambda>" or reward.__closure__:
        raise ConfigError(
            f"reward {getattr(reward, '__name__', reward)!r}: give a plain function, defined with def and without "
            "variables of another function, or a text like 'my_file.py:score'"
        )
    try:
        return textwrap.dedent(inspect.getsource(reward))
    except OSError:
        raise ConfigError(
            f"reward {reward.__name__!r}: its source cannot be read; write it into a file and give 'my_file.py:"
            f"{reward.__name__}'"
        ) from None
