"""Training from Python: the same as `swarm train`, with records and a reward function of the caller's program.

Invariant: the run is that of `swarm train`: its directory holds everything, and every command works on it.
"""

import asyncio
import inspect
import json
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Final

from node.python_api.background import Background, run_apart
from node.python_api.step_metrics import Metrics, evaluation_metrics, step_metrics
from node.train import train as run_training
from node.train_options import TrainOptions
from swarm.config import NODE_FILE, NodeConfig, load_config
from swarm.errors import ConfigError, missing_extra
from swarm.events import Event, PolicyEvaluated, StepMade
from swarm.telemetry import read_events
from swarm.trained.own_directories import code_of, require_trusted

if TYPE_CHECKING:
    from swarm.trained.hub import Pushed
    from swarm.trained.model import WhichStep
    from swarm.trained.newest_groups import Origin
    from swarm.trained.samples import SampledGroup

RECORDS: Final = "records.jsonl"
REWARD: Final = "reward.py"

_Message = str | dict[str, float]  # a line for people, or the figures of a step or an evaluation
Reward = Callable[..., float]
"""Function of (question, answer, reference) or (question, answer, reference, record) that returns a number."""


@dataclass(frozen=True, slots=True)
class Training:
    """A training in its directory, under way or over; the directory of any node can be given.

    Example:
        run = swarm.Training(Path("swarm-train"))
        run.save_pretrained("my-model")
    """

    directory: Path
    stop: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """Stops the training from a callback, with a checkpoint; does nothing once the training is over."""
    trust: bool = False
    """True: code that the directory names is loaded, though no command of this user made it."""

    @property
    def history(self) -> list[dict[str, float]]:
        """The figures of each step and evaluation, in order, as the callbacks get them, without skipped steps."""
        found: list[dict[str, float]] = []
        for event in read_events(self.directory / "events.jsonl"):
            if isinstance(event, StepMade) and not event.was_skipped:
                found.append(step_metrics(event))
            elif isinstance(event, PolicyEvaluated):
                is_more = found and "loss" not in found[-1] and found[-1]["step"] == event.step
                if not is_more:
                    found.append({})
                found[-1] |= evaluation_metrics([event])
        return found

    def held_out(self, env: str = "own") -> list[tuple[int, float]]:
        """(step, success on the held-out problems of `env`) for each evaluated step, in order of steps."""
        name = f"eval_{env}_accuracy"
        return sorted({int(each["step"]): each[name] for each in self.history if name in each}.items())

    def samples(self, count: int = 4, origin: "Origin" = "all", env: str = "") -> "list[SampledGroup]":
        """The newest groups, newest first: question, answers, rewards, and tokens with their log-probs."""
        from swarm.trained.samples import SampleReader

        return SampleReader(self.directory, self.trust).newest(count, origin, env)

    def evaluate(
        self,
        *,
        step: "WhichStep" = None,
        num_problems: int = 64,
        num_tries: int = 8,
        temperature: float = 1.0,
        device: str = "auto",
    ) -> dict[str, float]:
        """Evaluates on held-out problems of each environment (blocking, slow).

        Args:
            step: step of a checkpoint, or "best"; None: the newest.
            num_problems: number of problems of each environment.
            num_tries: sampled tries at each problem; 0: greedy answers only.
            temperature: temperature of the sampled tries.
            device: `auto`, `cpu`, `cuda:0` and so on.

        Returns:
            `eval_ENV_accuracy` (greedy), `eval_ENV_reward`, and with sampled tries `eval_ENV_pass@1` and
            `eval_ENV_pass@K`.
        """
        from swarm.trained.evaluation import EvaluationPlan, evaluate_model
        from swarm.trained.model import load_trained

        config = load_config(NodeConfig, self.directory / NODE_FILE)
        require_trusted(self.directory, code_of(config.environments), self.trust)
        model = load_trained(self.directory, step)
        plan = EvaluationPlan(
            environments=config.environments,
            limits=config.generator.episode_limits,
            split="held_out",
            num_problems=num_problems,
            num_tries=num_tries,
            temperature=temperature,
        )
        scores = run_apart(lambda: evaluate_model(model, plan, lambda *_: None, device))
        figures: dict[str, float] = {}
        for score in scores:
            of_env = {"accuracy": score.greedy.value, "reward": score.reward.value}
            of_env |= {f"pass@{k}": score.pass_at(k).value for k in {1, num_tries} if 0 < k <= num_tries}
            figures |= {f"eval_{score.env}_{name}": value for name, value in of_env.items()}
        return figures

    def save_pretrained(self, folder: str | Path, *, format: str = "hf", step: "WhichStep" = None) -> Path:
        """Writes the model as `swarm export` does, for transformers, vLLM, PEFT or llama.cpp; returns the folder.

        Args:
            folder: folder to create.
            format: `hf`, `peft` or `gguf`.
            step: step of a checkpoint, or "best"; None: the newest.
        """
        from swarm.trained.export import export_model
        from swarm.trained.formats import require_format

        return export_model(self.directory, Path(folder), require_format(format), step, time.time()).folder

    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool = True,
        dry_run: bool = False,
        format: str = "hf",
        step: "WhichStep" = None,
    ) -> "Pushed":
        """Exports the model and uploads it, with its signed card, as a new repository of a hub (blocking, slow).

        Args:
            repo: NAME or OWNER/NAME of the new repository.
            private: True: only its owner sees the repository.
            dry_run: True: the files are only listed, and nothing is sent.
            format: as in `save_pretrained`.
            step: step of a checkpoint, or "best"; None: the newest.
        """
        from swarm.trained.formats import require_format
        from swarm.trained.hub import export_to_hub

        return export_to_hub(self.directory, repo, require_format(format), step, is_private=private, is_dry=dry_run)


class Callback:
    """Callbacks of a training: derive from this class, and override the methods you need.

    All are called in the thread that called `swarm.train`, in order, while the training goes on. `run.stop()` ends the
    training, with a checkpoint; an exception in a callback ends it as well, and is raised by `swarm.train`.

    Example:
        class Until(swarm.Callback):
            def on_evaluation(self, run, metrics):
                if metrics["eval_own_accuracy"] > 0.9:
                    run.stop()
    """

    def on_step(self, run: Training, metrics: Metrics) -> None:
        """Called after each optimizer step, with `step`, `loss`, `reward` and so on."""

    def on_evaluation(self, run: Training, metrics: Metrics) -> None:
        """Called after each evaluation, with `step` and `eval_ENVIRONMENT_accuracy` (held-out problems)."""

    def on_end(self, run: Training) -> None:
        """Called once, after the training ended by itself or was stopped."""


def train(
    model: "str | Training",
    tasks: Iterable[Mapping[str, Any]] | str | Path | None = None,
    reward: Reward | str | None = None,
    *,
    recipe: str = "",
    directory: str | Path = "swarm-train",
    steps: int = 100,
    nodes: int = 1,
    generators: int = 0,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = print,
    **options: Any,
) -> Training:
    """Trains a model on this machine (blocking); the same call resumes the training in its directory.

    Ctrl-C saves, stops and returns; this works in a notebook as well.

    Args:
        model: `smollm2`, a folder, or a hub id; `tiny` for a try; or another training, whose model is the start.
        tasks: records with `question` (or `messages`) and `answer`, or a .jsonl file of them; None with `environments`.
        reward: worth of an answer; the source of a function is copied, so the function itself has to import what it
            uses. A text names a function as `my_file.py:score`. None: the answer must be the same text or number.
        recipe: the objective, a name of `swarm recipes list` or `my_file.py:RECIPE`.
        directory: directory of the training.
        steps: optimizer steps in all.
        nodes: number of nodes that train, each its own policy, and share their rollouts; the first one is returned, the
            others are in `<directory>/nodes` and end with it.
        generators: number of further nodes that only generate, with the weights of the first.
        callbacks: objects whose methods are called after steps and evaluations, and at the end.
        say: function that takes lines for people.
        **options: other fields of `node.train_options.TrainOptions`, such as `learning_rate`, `reward_range`,
            `environments=("reasoning_gym:gcd",)` or `overrides=("learner.schedule=cosine",)`.

    Raises:
        ConfigError: the training cannot begin, or nothing can be learned; the message gives the reason.

    Example:
        run = swarm.train("tiny", [{"question": "sort:cab=", "answer": "abc"}, ...], steps=40)
        print(run.held_out())
    """
    folder = Path(directory)
    if tasks is not None and not isinstance(tasks, str | Path):
        text = "".join(json.dumps(dict(record)) + "\n" for record in tasks)
        tasks = _written(folder / RECORDS, text)
    spec = reward or ""
    if callable(spec):
        spec = f"{_written(folder / REWARD, _source(spec))}:{spec.__name__}"
    settings = TrainOptions(
        directory=folder,
        model="" if isinstance(model, Training) else model,
        init_from=model.directory if isinstance(model, Training) else None,
        data=None if tasks is None else Path(tasks),
        reward=spec,
        recipe=recipe,
        steps=steps,
        nodes=nodes,
        generators=generators,
        **options,
    )

    async def work(send: Callable[[_Message], None]) -> None:
        await run_training(settings, send, on_event=_Figures(send).see, until=_until_cancelled)

    with Background[_Message](work) as background, background.stopped_by_signals():
        run = Training(folder, stop=background.stop, trust=True)  # it ran here, and this program named its code
        try:
            for message in background.messages():
                if isinstance(message, str):
                    say(message)
                    continue
                for callback in callbacks:
                    (callback.on_step if "loss" in message else callback.on_evaluation)(run, message)
        except ModuleNotFoundError as error:
            raise missing_extra(error) or error from None
    for callback in callbacks:
        callback.on_end(run)
    return run


class _Figures:
    """Sends the figures of steps and evaluations, those of one evaluation together."""

    def __init__(self, send: Callable[[_Message], None]) -> None:
        self._send = send
        self._evaluations: list[PolicyEvaluated] = []

    def see(self, event: Event) -> None:
        """Sends the figures of a step at once, those of evaluations once all of the same evaluation are there."""
        if isinstance(event, StepMade) and not event.was_skipped:
            self._send(step_metrics(event))
        elif isinstance(event, PolicyEvaluated):
            if not self._evaluations:  # the others of the same evaluation come before the loop goes on
                asyncio.get_running_loop().call_soon(self._send_evaluations)
            self._evaluations.append(event)

    def _send_evaluations(self) -> None:
        self._send(evaluation_metrics(self._evaluations))
        self._evaluations = []


async def _until_cancelled(training: Coroutine[Any, Any, None]) -> bool:
    task = asyncio.current_task()
    assert task is not None
    try:
        await training
    except asyncio.CancelledError:
        task.uncancel()
        return True
    return False


def _written(path: Path, text: str) -> Path:
    """Writes a text into a file; returns the path. Raises ConfigError if a begun training has another text there."""
    has_begun = (path.parent / NODE_FILE).exists()
    if has_begun and path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{path} is of another training: name another directory, or give what this one was begun with"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _source(reward: Reward) -> str:
    """Source of a plain function. Raises ConfigError for any other callable, and for a source that cannot be read."""
    if not inspect.isfunction(reward) or reward.__name__ == "<lambda>" or reward.__closure__:
        raise ConfigError(
            f"reward {getattr(reward, '__name__', reward)!r}: give a plain function, defined with def and without "
            "variables of another function, or a text like 'my_file.py:score'"
        )
    if outside := sorted(inspect.getclosurevars(reward).globals):
        raise ConfigError(
            f"reward {reward.__name__!r} uses {', '.join(outside[:5])} of the program around it, and its own source "
            "alone is copied: import or define that inside the function, or give a text like 'my_file.py:score'"
        )
    try:
        text = textwrap.dedent(inspect.getsource(reward))
    except OSError:
        raise ConfigError(
            f"reward {reward.__name__!r}: its source cannot be read; write it into a file and give 'my_file.py:"
            f"{reward.__name__}'"
        ) from None
    if not _is_source_of(text, reward.__code__):
        raise ConfigError(
            f"reward {reward.__name__!r}: its file was edited after the function was defined, and holds another now: "
            "define it again (start the program anew, or run the cell again)"
        )
    return text


def _is_source_of(text: str, code: CodeType) -> bool:
    """True if compiling the text gives a function with the same instructions and names."""
    try:
        written = [each for each in compile(text, "reward", "exec").co_consts if isinstance(each, CodeType)]
    except SyntaxError:
        return False
    same = [(each.co_name, each.co_code, each.co_names, _plain_constants(each)) for each in written]
    return (code.co_name, code.co_code, code.co_names, _plain_constants(code)) in same


def _plain_constants(code: CodeType) -> list[str]:
    return [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
