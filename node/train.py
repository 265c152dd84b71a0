"""`swarm train`: trains a model on this machine alone, from questions and a reward, in one command.

Invariant: the training is an ordinary node whose node.toml holds all that was decided, so that the same directory can
be resumed, evaluated, exported, or take part in a run later. A run that cannot learn anything is ended with the reason.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final

from node.daemon import Daemon, node_process, note_end
from node.device_checks import machine_choice, with_choice
from node.disk_budget import recipe_words, takes_line
from node.local_nodes import LocalNodes
from node.sampled_tasks import (
    SampledEnvironment,
    doubts,
    is_upside_down,
    model_notes,
    sample_environments,
    task_lines,
    warm_up_plan,
)
from node.train_options import TrainOptions, resolve
from node.training_watch import TrainingWatch
from swarm.command_line import waiting
from swarm.config import NODE_FILE, NodeConfig
from swarm.errors import ConfigError
from swarm.events import Event
from swarm.model.tokenizer import load_tokenizer
from swarm.printable import as_argument
from swarm.process import run_until_signal
from swarm.telemetry import note_warning, read_events
from swarm.telemetry.warning_log import DOUBT, UPSIDE_DOWN
from swarm.trained.newest_groups import newest_groups
from swarm.trained.own_directories import record_own
from swarm.trained.samples import STORE
from swarm.wire.run_manifest import write_node_toml

MANY_TIMES: Final = 16  # longer than the right answer an answer may be, without a note
LOOK_S: Final = 1.0  # the worker tells its activity as often


async def prepare(options: TrainOptions, say: Callable[[str], None]) -> NodeConfig:
    """Tries questions, reward and machine before a model is loaded, describes them, and writes node.toml.

    Raises:
        ConfigError: an option is wrong, a part cannot be used, or node.toml cannot be written.
    """
    config = await asyncio.to_thread(resolve, options)
    lines, sampled = await _describe(config)
    for line in lines:
        say(line)
    try:
        await asyncio.to_thread(write_node_toml, config, config.dir / NODE_FILE)
    except OSError as error:
        raise ConfigError(f"--dir {config.dir}: cannot be written: {error.strerror}; name another directory") from None
    await asyncio.to_thread(record_own, config.dir)
    for each in sampled:
        message = UPSIDE_DOWN if is_upside_down(each) else DOUBT
        for doubt in doubts(config, each)[:1]:
            await asyncio.to_thread(note_warning, config.dir, message, doubt)
    return config


async def train(
    options: TrainOptions,
    say: Callable[[str], None],
    is_patient: bool = False,
    set_up_logging: Callable[[str, str, str], None] = lambda *_: None,
    *,
    on_event: Callable[[Event], None] | None = None,
    until: Callable[[Coroutine[Any, Any, None]], Awaitable[bool]] | None = None,
) -> None:
    """Trains until every step is made, or Ctrl-C.

    Args:
        options: the task and how to train on it; with `nodes` or `generators` other nodes run beside this one.
        say: function that takes lines for people.
        is_patient: True: the training goes on although nothing can be learned yet.
        set_up_logging: called with level, format and name; by default the logging of the process stays as it is.
        on_event: called with each event of the node, in its event loop.
        until: awaits the training; returns True if it was stopped before its end. None: a signal stops it.

    Raises:
        ConfigError: the training cannot begin, or nothing can be learned; the message has the reason and an example.
    """
    set_up_logging("WARNING", "console", options.directory.name)
    looking = "looking at the questions, the reward and this machine"
    say(looking)
    with waiting(looking, say=say):
        config = await prepare(options, say)
    set_up_logging(config.telemetry.log_level, config.telemetry.log_format, config.shown_name)
    watch = TrainingWatch(config, say, is_patient)
    watch.remember(await asyncio.to_thread(read_events, config.dir / "events.jsonl"))

    def see(event: Event) -> None:
        watch.see(event)
        if on_event is not None:
            on_event(event)

    others = LocalNodes(config=config, num_trainers=options.nodes - 1, num_generators=options.generators, say=say)
    with node_process(config):
        was_stopped = await (until or partial(run_until_signal, say=say))(_run(config, watch, see, others))
    if watch.is_hopeless and not watch.is_learned_out:
        reason = await asyncio.to_thread(watch.explain)
        await asyncio.to_thread(note_end, config.dir, ConfigError(reason))
        raise ConfigError(reason)
    for line in watch.summary(was_stopped):
        say(line)


async def describe(config: NodeConfig) -> list[str]:
    """Lines on the coming training; right and wrong answers to the first question of each environment are scored.

    Raises:
        ConfigError: the model cannot be had or cannot read the question, an environment cannot be built, a record
            cannot be used, a reward fails, or the recipe or a constant of it does not exist.
    """
    return (await _describe(config))[0]


async def _describe(config: NodeConfig) -> tuple[list[str], list[SampledEnvironment]]:
    from swarm.objectives.methods import recipes_of  # torch is loaded here, not by `import node.train`

    await asyncio.to_thread(recipes_of, config)
    choice = await asyncio.to_thread(machine_choice, config)
    computed = "" if choice is None else f", computed in {choice.words}"
    lines = [f"model      {config.model.source}, published in {config.model.dtype}{computed}{_adapters(config)}"]
    lines += [f"note: {choice.advice}"] if choice is not None and choice.advice else []
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
    sampled = await sample_environments(config, tokenizer, num_tasks=1)
    for each in sampled:
        if await asyncio.to_thread(_has_changed, config, each):
            lines.append(f"note: the questions or the reward of {each.section.name} are others than those that this "
                         "training went on with before; the new ones count from here on")  # fmt: skip
        problems = f"{each.num_tasks:,} problems, about a quarter held out; the first"
        problems = "1 problem, and so none held out" if each.num_tasks == 1 else problems
        lines.append(f"{each.section.name:<10} {problems}:")
        lines += [f"         {line}" for line in task_lines(each)]
        lines += [f"note: {doubt}" for doubt in doubts(config, each)]
        lines += [f"note: {note}" for note in _length_notes(config, each)]
    lines += [f"warm-up    {line}" for line in warm_up_plan(config, sampled) if config.warm_up.answers]
    lines += [f"note: {note}" for note in model_notes(config, tokenizer)]
    lines.append(f"recipe     {recipe_words(config.learner)}")
    lines.append(await asyncio.to_thread(takes_line, with_choice(config, choice)))
    lines.append(f"directory  {config.dir}: Ctrl-C saves and stops, `swarm train {as_argument(config.dir)}` goes on")
    return lines, sampled


def _length_notes(config: NodeConfig, sampled: SampledEnvironment) -> list[str]:
    longest, right = config.generator.max_new_tokens, max((each.num_action_tokens for each in sampled.tasks), default=0)
    if sampled.max_turns > 1 or not 0 < right * MANY_TIMES < longest:
        return []
    begun = "" if sampled.section.prefill else ", and most models keep to a form if it is begun for them (--prefill)"
    return [
        f"an answer may have {longest} tokens, and the right one has {right}: where nothing is to be worked out in "
        f"words first, --max-new-tokens {4 * right} saves most of the time{begun}"
    ]


def _has_changed(config: NodeConfig, sampled: SampledEnvironment) -> bool:
    """True if the newest own group is of another version of the environment (blocking)."""
    path = config.dir / STORE
    newest = newest_groups(path, 1, "own", {sampled.section.name}) if path.exists() else []
    return any(scored.group.verifier != sampled.verifier for scored in newest)


async def _run(config: NodeConfig, watch: TrainingWatch, see: Callable[[Event], None], others: LocalNodes) -> None:
    daemon = Daemon(config, see)
    life = asyncio.ensure_future(_show_life(daemon, watch))  # from the first second on: the start takes some
    try:
        await _run_beside(daemon, watch, others, life)
    finally:
        life.cancel()
        await asyncio.wait({life})


async def _run_beside(daemon: Daemon, watch: TrainingWatch, others: LocalNodes, life: "asyncio.Future[None]") -> None:
    async with daemon, others.beside(daemon):
        watch.num_with_signal = lambda: daemon.agent.own_groups.since_step.num_with_signal
        running = asyncio.ensure_future(daemon.run())
        beside = [asyncio.ensure_future(watch.ends.wait()), life]
        try:
            await asyncio.wait({running, *beside}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (running, *beside):
                task.cancel()
            await asyncio.wait({running, *beside})
        for task in (running, *beside):
            if not task.cancelled():
                task.result()


async def _show_life(daemon: Daemon, watch: TrainingWatch) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        watch.tick(daemon.does)


def _adapters(config: NodeConfig) -> str:
    return f", adapters of rank {config.model.lora_rank}" if config.model.lora_rank else ", all weights"
