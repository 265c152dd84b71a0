"""`swarm train`: trains a model on this machine alone, from questions and a reward, in one command.

Invariant: what runs is an ordinary node whose node.toml says all that was decided, so that the same directory can be
resumed, evaluated, exported, or take part in a run later. A run that cannot learn anything is ended with the reason.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from node.daemon import Daemon
from swarm.config import NodeConfig, apply_overrides, load_config, parse_config
from swarm.environments.load import build_environments
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.errors import ConfigError, RolloutFailed
from swarm.events import Event, GroupPut, GroupUnscored, PolicyEvaluated, StepMade, VersionPublished
from swarm.interfaces import Environment
from swarm.model.source import is_char_model
from swarm.model.tokenizer import load_tokenizer
from swarm.process import defer_gc, freeze_gc, run_until_signal
from swarm.telemetry import read_events
from swarm.types import JsonDict, Task
from swarm.wire.run_manifest import write_toml

FILE: Final = "node.toml"
MANY_GROUPS: Final = 64  # without any difference in reward: there is nothing to learn from
SOME_GROUPS: Final = 16  # the same once so much time has passed
PATIENCE_S: Final = 60.0
SAY_EVERY_S: Final = 5.0
WRONG_ANSWERS: Final = ("", "no", "1")  # what a reward must be able to judge, too
MOST_READ: Final = 20_000  # records of a file that are looked at before a training
_CHANGEABLE: Final = frozenset({"learner.num_steps", "telemetry.log_level"})  # of a directory that exists


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train, as the command line says it; None and "" leave a default, or what node.toml says."""

    directory: Path
    model: str = ""
    data: Path | None = None
    reward: str = ""  # file.py:function or module:function
    reward_range: tuple[float, float] | None = None  # of what it returns
    environments: tuple[str, ...] = ()  # kind, or kind:dataset
    question: str = "question"  # fields of a record
    answer: str = "answer"
    prompt: str = "{question}"
    system: str = ""
    steps: int | None = None
    max_new_tokens: int | None = None
    learning_rate: float | None = None
    lora_rank: int = 0
    recipe: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def names_task(self) -> bool:
        """Whether it says what to train on; else an existing directory does."""
        return self.data is not None or bool(self.environments)


def resolve(options: TrainOptions) -> NodeConfig:
    """The configuration of the node: of its directory where that has one, else from the options.

    Raises:
        ConfigError: an option is missing or wrong, or the directory is of another training.
    """
    path = options.directory / FILE
    if not path.is_file():
        if not options.names_task:
            raise ConfigError(
                f"{options.directory}: nothing to resume there; say what to train on: --data FILE.jsonl, with "
                "--reward my_file.py:function unless the answer must be the same, or --env KIND[:DATASET]"
            )
        return parse_config(NodeConfig, _data(options), "swarm train")
    if not options.names_task and (given := _given(options)):
        raise ConfigError(
            f"{path} exists, and {', '.join(given)} cannot change a training that has begun: leave that out to go on "
            "with this one, or say what to train on and name another --dir"
        )
    changes = list(options.overrides)
    changes += [] if options.steps is None else [f"learner.num_steps={options.steps}"]
    # `dir` in the file is seen from where the training was begun, which need not be here.
    here = {"dir": options.directory}
    kept = load_config(NodeConfig, path).model_copy(update=here)
    config = load_config(NodeConfig, path, changes).model_copy(update=here)
    asked = parse_config(NodeConfig, _data(options), "swarm train") if options.names_task else config
    differing = [key for key in _differences(kept.model_dump(), asked.model_dump()) if key not in _CHANGEABLE]
    if differing:
        raise ConfigError(
            f"{path} exists and says otherwise for {', '.join(sorted(differing)[:5])}: name another --dir for another "
            f"training, or delete this one; `swarm train --dir {options.directory}` alone goes on with it"
        )
    return config


async def prepare(options: TrainOptions, say: Callable[[str], None]) -> NodeConfig:
    """Tries what can be tried before a model is loaded, says it, and writes node.toml. Raises ConfigError."""
    config = await asyncio.to_thread(resolve, options)
    for line in await describe(config):
        say(line)
    try:
        await asyncio.to_thread(write_toml, config.model_dump(mode="json"), config.dir / FILE)
    except OSError as error:
        raise ConfigError(f"--dir {config.dir}: cannot be written: {error.strerror}; name another directory") from None
    return config


async def train(
    options: TrainOptions,
    say: Callable[[str], None],
    is_patient: bool = False,
    set_up_logging: Callable[[str, str, str], None] = lambda *_: None,
) -> None:
    """Trains until every step is made, or Ctrl-C.

    Args:
        say: where lines for people go.
        is_patient: goes on although nothing can be learned yet.
        set_up_logging: called with level, format and name; logging of the process stays as it is without.

    Raises:
        ConfigError: it cannot begin, or nothing can be learned; with the reason and an example.
    """
    set_up_logging("WARNING", "console", options.directory.name)
    config = await prepare(options, say)
    set_up_logging(config.telemetry.log_level, config.telemetry.log_format, config.name)
    watch = TrainingWatch(config, say, is_patient)
    watch.remember(await asyncio.to_thread(read_events, config.dir / "events.jsonl"))
    defer_gc()
    os.umask(0o077)
    try:
        was_stopped = await run_until_signal(_run(config, watch))
    finally:
        freeze_gc()
    if watch.is_hopeless:
        raise ConfigError(await asyncio.to_thread(watch.explain))
    for line in watch.summary(was_stopped):
        say(line)


async def describe(config: NodeConfig) -> list[str]:
    """What is about to be trained; answers to the first question of each environment are scored, right and wrong.

    Raises:
        ConfigError: the model cannot be had or cannot read the question, an environment cannot be built, a record
            cannot be used, or a reward fails.
    """
    lines = [f"model      {config.model.source}, {config.model.dtype}{_adapters(config)}"]
    verifier = SandboxVerifier(config.environments, config.sandbox)
    try:
        for environment, task, reference in await asyncio.to_thread(_first_tasks, config):
            lines.append(f"{task.env:<10} {environment.num_tasks:,} problems, about a quarter held out; the first:")
            lines += [f"           {each.role}: {_short(each.content)}" for each in task.messages]
            worth = ""
            if environment.max_turns == 1:
                tried = [await _worth(verifier, task, answer) for answer in (reference, *WRONG_ANSWERS)]
                worth = f", worth {tried[0]:g}"
            lines.append(f"           reference: {_short(reference)!r}{worth}")
    finally:
        await verifier.close()
    steps = f"{config.learner.num_steps} steps" if config.learner.num_steps else "until Ctrl-C"
    lines.append(f"recipe     {config.learner.recipe}, learning rate {config.learner.learning_rate:g}, {steps}")
    lines.append(f"directory  {config.dir}: Ctrl-C saves and stops, `swarm train --dir {config.dir}` goes on")
    return lines


async def _worth(verifier: SandboxVerifier, task: Task, answer: str) -> float:
    """What an answer is worth. Raises ConfigError where that cannot be told."""
    try:
        return float((await verifier.verify(task.env, task.task_id, [(answer,)])).rewards[0])
    except RolloutFailed as error:
        raise ConfigError(
            f"the reward failed on the answer {_short(answer)!r}: {error}. Rewards run confined: with the installed "
            "packages, but no network, and no other files or modules than the one that they are in"
        ) from None


def _first_tasks(config: NodeConfig) -> list[tuple[Environment, Task, str]]:
    """The first task of each environment and its right answer (blocking). Raises ConfigError."""
    tokenizer = load_tokenizer(config.model)
    found: list[tuple[Environment, Task, str]] = []
    try:
        for section, environment in zip(
            config.environments, build_environments(config.environments).values(), strict=True
        ):
            first = environment.task(0)
            tokenizer.encode_prompt(first)
            found.append((environment, first, environment.reference(0)))
            if section.kind in ("jsonl", "function"):
                _read_records(environment)
    except LookupError as error:
        raise ConfigError(str(error)) from None
    return found


def _read_records(environment: Environment) -> None:
    """Reads the first records of a file once. Raises LookupError for one that cannot be used, ConfigError for answers
    that only some of them have."""
    count = min(environment.num_tasks, MOST_READ)
    lacking = [number for number in range(count) if not environment.reference(number)]
    if 0 < len(lacking) < count:
        raise ConfigError(
            f"environment {environment.name}: {len(lacking)} of the first {count} records have no answer, record "
            f"{lacking[0]} first: give them one, or leave the answers out of all"
        )


@dataclass
class TrainingWatch:
    """What happens, in lines for people; and whether there is anything to learn from."""

    config: NodeConfig
    say: Callable[[str], None]
    is_patient: bool
    step: int = 0
    is_hopeless: bool = False
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    first: dict[tuple[str, str], PolicyEvaluated] = field(default_factory=dict[tuple[str, str], PolicyEvaluated])
    newest: dict[tuple[str, str], PolicyEvaluated] = field(default_factory=dict[tuple[str, str], PolicyEvaluated])
    num_groups: int = 0  # since the newest step, or the start
    num_unscored: int = 0  # of them
    best_reward: float = 0.0  # highest mean of a group, since the start
    error: str = ""
    num_with_signal: Callable[[], int] = lambda: 0  # groups since the newest step that the learner can learn from

    def __post_init__(self) -> None:
        self._said_s = time.monotonic()
        self._first_group_s = 0.0
        self._has_stepped = False
        self._rewards: list[float] = []
        self._tokens = 0

    def remember(self, events: Iterable[Event]) -> None:
        """Takes what happened before this start: the first evaluation stays the first."""
        for event in events:
            if isinstance(event, PolicyEvaluated):
                self.first.setdefault((event.env, event.split), event)
            elif isinstance(event, StepMade):
                self.step = max(self.step, event.step)

    def see(self, event: Event) -> None:
        """Takes an event of the node."""
        match event:
            case GroupPut():
                self.num_groups += 1
                self.best_reward = max(self.best_reward, event.reward_mean)
                self._rewards.append(event.reward_mean)
                self._tokens += event.num_tokens
                self._look()
            case GroupUnscored():
                self.num_groups += 1
                self.num_unscored += 1
                self.error = event.error
                self._look()
            case StepMade():
                self.step = event.step
                self.num_groups = self.num_unscored = 0
                self._has_stepped = True
                self._say_step(event)
            case VersionPublished():
                self.step = event.step  # the first one tells where a training goes on
            case PolicyEvaluated():
                key = event.env, event.split
                self.first.setdefault(key, event)
                self.newest[key] = event
                if event.split == "held_out":
                    before = self.first[key]
                    since = f" (step {before.step}: {before.accuracy:.2f})" if before is not event else ""
                    self.say(f"step {event.step:<5} {event.env}: {event.accuracy:.2f} of {event.num_problems} held-out "
                             f"problems right{since}")  # fmt: skip
            case _:
                pass

    def summary(self, was_stopped: bool) -> list[str]:
        """Where it ended, held-out success before and after, and what to do next."""
        stopped = [f"stopped at step {self.step}; the same command goes on from there"] if was_stopped else []
        if was_stopped and not self.step:
            return stopped  # no checkpoint yet: nothing to chat with
        if not was_stopped and not self._has_stepped and not self.newest:
            return [f"nothing to do: all {self.config.learner.num_steps} steps were made; --steps N makes more"]
        lines = [
            f"{env:<10} held out: {self.first[env, split].accuracy:.2f} at step {self.first[env, split].step}, "
            f"{now.accuracy:.2f} at step {now.step}"
            for (env, split), now in self.newest.items()
            if split == "held_out"
        ]
        where = self.config.dir
        return [
            *stopped,
            *lines,
            f"next: swarm chat {where} | swarm samples {where} | swarm eval {where} | swarm export {where} OUT",
        ]

    def explain(self) -> str:
        """Why nothing could be learned, with an example (blocking)."""
        from swarm.trained.samples import read_samples

        if self.num_unscored == self.num_groups:
            return f"none of {self.num_groups} groups could be scored: {self.error}"
        reason = (
            f"{self.num_groups} groups of {self.config.generator.group_size} answers, and in none did rewards differ: "
            f"there is nothing to learn from (highest mean reward {self.best_reward:g})."
        )
        if self.num_unscored:
            reason += f" {self.num_unscored} could not be scored: {self.error}"
        shown: list[str] = []
        for group in read_samples(self.config.dir, 1, "own"):
            sample = group.samples[0]
            cut = ", cut off" if sample.finish == "length" else ""
            shown += [f"{each.role}: {_short(each.content)}" for each in group.messages]
            shown.append(f"answer (reward {sample.reward:g}{cut}): {' | '.join(map(_short, sample.actions))}")
            shown.append(f"reference: {_short(group.reference)}")
        example = "\n  ".join(["", *shown])
        return (
            f"{reason} An example:{example}\nMake the reward graded, the task easier, or answers longer "
            f"(--max-new-tokens, now {self.config.generator.max_new_tokens}); --patient goes on all the same."
        )

    def _look(self) -> None:
        now_s = time.monotonic()
        self._first_group_s = self._first_group_s or now_s
        has_waited = now_s - self._first_group_s > PATIENCE_S
        if self.is_patient or self._has_stepped or self.is_hopeless or self.num_with_signal():
            return
        if self.num_groups >= (SOME_GROUPS if has_waited else MANY_GROUPS):
            self.is_hopeless = True
            self.ends.set()

    def _say_step(self, event: StepMade) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_EVERY_S and event.step != self.config.learner.num_steps:
            return
        rewards, tokens, seconds = self._rewards, self._tokens, now_s - self._said_s
        self._rewards, self._tokens, self._said_s = [], 0, now_s
        total = self.config.learner.num_steps
        of = f"/{total}" if total else ""
        mean = f"reward {sum(rewards) / len(rewards):.3f}" if rewards else "reward -"
        self.say(f"step {event.step}{of}  {mean} of {len(rewards)} groups  {tokens / max(seconds, 1e-9):,.0f} tokens/s")


async def _run(config: NodeConfig, watch: TrainingWatch) -> None:
    async with Daemon(config, watch.see) as daemon:
        watch.num_with_signal = lambda: daemon.agent.own_groups.since_step.num_with_signal
        running = asyncio.ensure_future(daemon.run())
        ending = asyncio.ensure_future(watch.ends.wait())
        try:
            await asyncio.wait({running, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            running.cancel()
            await asyncio.wait({running})
        if not running.cancelled():
            running.result()


def _data(options: TrainOptions) -> JsonDict:
    """Plain data of node.toml. Raises ConfigError."""
    if not options.model:
        raise ConfigError(
            "--model: name one: smollm2, a folder, or a hub id; tiny and tiny-agents know little tasks only"
        )
    is_tiny = is_char_model(options.model)
    longest = options.max_new_tokens or (16 if is_tiny else 256)
    data: JsonDict = {
        "dir": str(options.directory),
        "name": options.directory.name[:40],
        "run_id": "train",
        "worker": "inline" if is_tiny else "process",
        "environments": _environments(options),
        "model": {
            "source": _absolute(options.model),
            "dtype": "float32" if is_tiny else "bfloat16",
            "lora_rank": options.lora_rank,
        },
        "generator": {"max_new_tokens": longest, "groups_per_batch": 8},
        "replay": {"local_groups": 8, "external_groups": 0},
        "learner": {
            "learning_rate": (1e-4 if is_tiny or options.lora_rank else 1e-5)
            if options.learning_rate is None
            else options.learning_rate,
            "num_steps": 100 if options.steps is None else options.steps,
        }
        | ({"recipe": _own_file(options.recipe)} if options.recipe else {}),
        "evaluation": {"every_steps": 20, "num_problems": 32},
        "directory": {"kind": "none"},
        "telemetry": {"log_level": "WARNING"},
    }
    apply_overrides(NodeConfig, data, list(options.overrides))
    return data


def _environments(options: TrainOptions) -> list[JsonDict]:
    style: JsonDict = {"prompt": options.prompt, "system": options.system}
    found: list[JsonDict] = []
    if options.data is not None:
        fields: JsonDict = {
            "path": _absolute(str(options.data)),
            "question": options.question,
            "answer": options.answer,
        }
        kind = "function" if options.reward else "jsonl"
        dataset = _own_file(options.reward) if options.reward else fields["path"]
        scale: JsonDict = {} if options.reward_range is None else {"reward_range": list(options.reward_range)}
        found.append({"name": "own", "kind": kind, "dataset": dataset, "params": fields, **style, **scale})
    elif options.reward:
        raise ConfigError(f"--reward {options.reward}: needs the questions, --data FILE.jsonl")
    for text in options.environments:
        kind, _, dataset = text.partition(":")
        name = "".join(c if c.isalnum() else "_" for c in (dataset or kind).lower()).strip("_")[:40]
        found.append({"name": name, "kind": kind, "dataset": dataset, **style})
    return found


def _absolute(source: str) -> str:
    """A path that is found from any working directory; other names as they are."""
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def _own_file(spec: str) -> str:
    path, colon, name = spec.rpartition(":")
    return f"{_absolute(path)}{colon}{name}" if path.endswith(".py") else spec


def _given(options: TrainOptions) -> list[str]:
    """Options that say how to train, by their names on the command line."""
    unsaid = TrainOptions(directory=options.directory, steps=options.steps, overrides=options.overrides)
    names = [each.name for each in fields(options) if getattr(options, each.name) != getattr(unsaid, each.name)]
    return ["--lr" if name == "learning_rate" else f"--{name.replace('_', '-')}" for name in names]


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key in one.keys() | other.keys():
        left, right = one.get(key), other.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            keys += _differences(left, right, f"{prefix}{key}.")
        elif left != right:
            keys.append(f"{prefix}{key}")
    return keys


def _adapters(config: NodeConfig) -> str:
    return f", adapters of rank {config.model.lora_rank}" if config.model.lora_rank else ", all weights"


def _short(text: str) -> str:
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= 200 else f"{flat[:197]}..."
