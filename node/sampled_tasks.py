"""Sampled tasks of each environment as a node asks and scores them: the prompt as tokens, the reference, its reward.

Invariant: a task that cannot be built, read, asked or scored raises a ConfigError that names environment, key and fix,
before a model is loaded; answers are scored in the confined process that a node scores them in.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from node.training_watch import one_line
from swarm.config import EnvironmentConfig, NodeConfig
from swarm.environments.char_tasks import KINDS
from swarm.environments.curriculum import TaskMixture
from swarm.environments.given_answers import GivenAnswers
from swarm.environments.jsonl import RecordEnvironment
from swarm.environments.load import build_environments
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.episode import Actions
from swarm.errors import ConfigError, RolloutFailed
from swarm.interfaces import Environment, Tokenizer
from swarm.model.source import positions_of
from swarm.model.tokenizer import HfTokenizer, check_turns, text_ids
from swarm.types import Role, Task

MOST_AROUND_CHARS: Final = 60  # of a chat template before a question, and after it
MOST_SHOWN_CHARS: Final = 200
WRONG_ANSWERS: Final = ("", "no", "1")  # what a reward must be able to judge, too
TRIED_ANSWERS: Final = 64  # of a warm-up
LEAST_ANSWERS: Final = 8  # different ones: fewer would be learned by heart
MOST_READ: Final = 20_000  # records of a file that are looked at
_SHOWN_KINDS: Final = {"tiny": frozenset({"char"}), "tiny-agents": frozenset({"look_up", "grid_world"})}


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTask:
    """One task with its right answer. Example: `3 + 4 =`, as 31 tokens, whose reference `7` is worth 1."""

    task: Task
    prompt_ids: tuple[int, ...]  # empty without a tokenizer
    prompt: str  # their text: the chat as the template renders it
    reference: str  # "" where there is none
    actions: Actions  # that earn the reward; () where nobody knows any
    num_action_tokens: int  # of the longest action; 0 without a tokenizer
    reward: float | None  # of these actions, in [0, 1]; None where there are none
    empty_reward: float | None  # of an empty answer; None for several turns


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledEnvironment:
    """An environment with the tasks that were tried."""

    section: EnvironmentConfig
    verifier: str  # its version: questions, reward and weights
    num_tasks: int
    max_turns: int
    tasks: tuple[SampledTask, ...]


async def sample_environments(
    config: NodeConfig, tokenizer: Tokenizer | None, num_tasks: int = 3
) -> list[SampledEnvironment]:
    """Builds every environment, asks some tasks of each, spread over all, and scores right and wrong answers.

    Args:
        config: configuration of the node.
        tokenizer: tokenizer of its model; None: prompts are not encoded.
        num_tasks: most tasks of each environment.

    Raises:
        ConfigError: an environment cannot be built, a record cannot be used, the model cannot read a text, or a reward
            fails.
    """
    environments = await asyncio.to_thread(_build, config, tokenizer)
    verifier = SandboxVerifier(config.environments, config.sandbox)
    try:
        sampled: list[SampledEnvironment] = []
        for section in config.environments:
            environment, last = environments[section.name], environments[section.name].num_tasks - 1
            numbers = sorted({last * number // max(num_tasks - 1, 1) for number in range(num_tasks)})
            tasks = [await _sample(environment, number, tokenizer, verifier) for number in numbers]
            sampled.append(
                SampledEnvironment(
                    section=section,
                    verifier=environment.verifier,
                    num_tasks=last + 1,
                    max_turns=environment.max_turns,
                    tasks=tuple(tasks),
                )
            )
        return sampled
    finally:
        await verifier.close()


def doubts(config: NodeConfig, sampled: SampledEnvironment) -> list[str]:
    """Likely mistakes, in at most three sentences: right answers that are missing, too long, or worth too little."""
    found: list[str] = []
    section = sampled.section
    if section.kind == "function" and not any(each.reference for each in sampled.tasks):
        found.append(
            f"environment {section.name}: no record that was tried has anything in its field "
            f"{section.params.get('answer', 'answer')!r}, so the reward gets '' as reference; where right answers are "
            "in another field, name it with params.answer (--answer)"
        )
    for each in sampled.tasks:
        where = f"environment {section.name}, task {each.task.task_id}"
        if each.reward is not None and each.reward <= (each.empty_reward or 0.0):
            beside = "" if each.empty_reward is None else f", an empty answer {each.empty_reward:g}"
            found.append(f"{where}: the reference {one_line(each.reference)!r} is worth {each.reward:g}{beside}")
        if each.num_action_tokens > config.generator.max_new_tokens:
            found.append(
                f"{where}: the reference has {each.num_action_tokens} tokens, generator.max_new_tokens allows "
                f"{config.generator.max_new_tokens}"
            )
    return found[:3]


def is_upside_down(sampled: SampledEnvironment) -> bool:
    """True if each right answer that was tried is worth less than an empty one."""
    pairs = [(each.reward, each.empty_reward) for each in sampled.tasks]
    return bool(pairs) and all(right is not None and none is not None and right < none for right, none in pairs)


def task_lines(sampled: SampledEnvironment) -> list[str]:
    """Two lines for each task: the prompt, and the reference with its reward."""
    lines: list[str] = []
    for each in sampled.tasks:
        tokens = _tokens(len(each.prompt_ids))
        question = next((said.content for said in reversed(each.task.messages) if said.role == "user"), "")
        asked = f"{tokens}, {_around(each.prompt, question)}" if each.prompt_ids else _chat(each.task)
        lines.append(f"  task {each.task.task_id}: {asked}")
        length = f" ({_tokens(each.num_action_tokens)})" if each.num_action_tokens else ""
        turns = f" in {len(each.actions)} turns" if sampled.max_turns > 1 and each.actions else ""
        worth = ", not scored: nobody knows its actions" if each.reward is None else f", worth {each.reward:g}{turns}"
        lines.append(
            f"    reference {one_line(each.reference)!r}{length}{worth}" if each.reference else "    no reference"
        )
    return lines


def model_notes(config: NodeConfig, tokenizer: Tokenizer | None) -> list[str]:
    """Sentences on what the model lacks for these tasks: an end token that its template writes, or any knowledge."""
    found = [shown] if (shown := _shown_tasks_note(config)) else []
    if isinstance(tokenizer, HfTokenizer) and (end := tokenizer.undeclared_end):
        found.append(
            f"the chat template ends an answer with {end!r}, which is no end token of {config.model.source!a}: answers "
            "run on behind it up to generator.max_new_tokens; add its id to eos_token_id in generation_config.json"
        )
    return found


def _shown_tasks_note(config: NodeConfig) -> str:
    known = _SHOWN_KINDS.get(config.model.source, frozenset())
    if not known or {each.kind for each in config.environments} <= known:
        return ""
    what = f"the char tasks {', '.join(KINDS)}" if "char" in known else ", ".join(sorted(known))
    warm_up = "" if config.warm_up.answers else ", or begin with --warm-up references"
    return (
        f"{config.model.source} was shown only {what}: for another task it serves to try the wiring; to see it learn, "
        f"take --env char:sort; for a task of your own --model smollm2{warm_up}"
    )


def warm_up_plan(config: NodeConfig, sampled: Sequence[SampledEnvironment]) -> list[str]:
    """A line on the warm-up that is configured, or on the one that could be; none where nobody gives right answers."""
    source = config.warm_up.answers
    if source:
        most = config.warm_up.num_steps
        until = "until rewards differ in half of the groups"
        return [f"at most {most} updates on right answers ({source}) before step 1, {until}"]
    single = [each for sample in sampled if sample.max_turns == 1 for each in sample.tasks if each.reward]
    if not single or Role.TRAINER not in config.roles or config.learner.num_processes > 1:
        return []
    hint = 'warm_up.answers = "references", or `swarm train --warm-up references`'
    return [f"none; where the model's own answers earn nothing, right ones can be shown first: {hint}"]


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count > 1)}"


def _around(prompt: str, question: str) -> str:
    """The prompt as one line; of a long one the question, and the beginning and the end of what stands around it."""
    whole, asked = _escaped(prompt), _escaped(question)
    if len(whole) <= MOST_SHOWN_CHARS or not asked or asked not in whole:
        return _cut(whole)
    before, _, after = whole.rpartition(asked)
    head = before if len(before) <= MOST_AROUND_CHARS else f"{before[:MOST_AROUND_CHARS]} ... "
    tail = after if len(after) <= MOST_AROUND_CHARS else f" ... {after[-MOST_AROUND_CHARS:]}"
    return f"{head}{_cut(asked)}{tail}"


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode() if text.isascii() else repr(text)[1:-1]


def _cut(text: str) -> str:
    half = MOST_SHOWN_CHARS // 2
    return text if len(text) <= MOST_SHOWN_CHARS else f"{text[:half]} ... {text[-half:]}"


def _chat(task: Task) -> str:
    return " | ".join(f"{each.role}: {one_line(each.content)}" for each in task.messages)


def _build(config: NodeConfig, tokenizer: Tokenizer | None) -> dict[str, Environment]:
    environments = build_environments(config.environments)
    positions = positions_of(config.model) if tokenizer is not None else 0
    if tokenizer is not None:
        check_turns(tokenizer, environments.values())
    try:
        for section in config.environments:
            if section.kind in ("jsonl", "function", "python"):
                _read_records(environments[section.name], tokenizer, positions, config.generator.max_new_tokens)
        if config.warm_up.answers:
            given = GivenAnswers(config, environments, held_out=(), tokenizer=tokenizer)
            usable = len(set(given.pairs(0, TRIED_ANSWERS)))
            if usable < LEAST_ANSWERS:
                raise ConfigError(
                    f"warm_up.answers = {config.warm_up.answers!r}: {usable} different answers can be shown, and "
                    f"{LEAST_ANSWERS} are needed at least; others are missing, held out, longer than "
                    f"generator.max_new_tokens = {config.generator.max_new_tokens}, or have characters that the model "
                    "lacks; name a .jsonl file of right answers (--warm-up FILE)"
                )
        if environments:
            TaskMixture(environments, config.generator.env_weights, config.seed, spacing=1).task(0)
    except LookupError as error:
        raise ConfigError(str(error)) from None
    return environments


def _read_records(environment: Environment, tokenizer: Tokenizer | None, positions: int, max_new_tokens: int) -> None:
    """Reads the first records of a file once, each as the model would.

    Args:
        tokenizer: of the model; None: prompts are not encoded.
        positions: most tokens of a prompt with its answer; 0 if unknown.
        max_new_tokens: of an answer; other nodes refuse one that was cut off before.

    Raises:
        LookupError: a record cannot be used.
        ConfigError: the model cannot read a record, or only some of them have answers.
    """
    count = min(environment.num_tasks, MOST_READ)
    lacking: list[int] = []
    for number in range(count):
        task = environment.task(number)
        if not environment.reference(number):
            lacking.append(number)
        if tokenizer is None:
            continue
        num_tokens = len(tokenizer.encode_prompt(task))
        if 0 < positions < num_tokens + max_new_tokens:
            fewer = positions - num_tokens
            fix = f"allow {fewer} tokens an answer (generator.max_new_tokens, --max-new-tokens), " if fewer > 0 else ""
            raise ConfigError(
                f"environment {environment.name}: record {number} is a prompt of {num_tokens:,} tokens, and the model "
                f"has {positions:,} positions for it and its answer, which may have {max_new_tokens:,}; {fix}shorten "
                "or drop it, or take a model with more"
            )
    if 0 < len(lacking) < count:
        raise ConfigError(
            f"environment {environment.name}: {len(lacking)} of the first {count} records have no answer, record "
            f"{lacking[0]} first: give them one, or leave the answers out of all"
        )
    named = environment.config.params.get("answer", "answer") if isinstance(environment, RecordEnvironment) else ""
    if lacking and named not in ("", "answer"):  # somebody chose that field
        raise ConfigError(
            f"environment {environment.name}: none of the first {count} records has an answer in the field {named!r}; "
            "name the field that has it with params.answer (--answer), or leave that out where there are no answers"
        )


async def _sample(
    environment: Environment, task_id: int, tokenizer: Tokenizer | None, verifier: SandboxVerifier
) -> SampledTask:
    task, reference, actions = await asyncio.to_thread(_ask, environment, task_id)
    prompt_ids = () if tokenizer is None else tuple(tokenizer.encode_prompt(task))
    longest = max((len(text_ids(tokenizer, action)) for action in actions), default=0) if tokenizer else 0
    reward = await _worth(verifier, task, actions) if actions else None
    wrong = [await _worth(verifier, task, (answer,)) for answer in WRONG_ANSWERS] if environment.max_turns == 1 else []
    return SampledTask(
        task=task,
        prompt_ids=prompt_ids,
        prompt="" if tokenizer is None else tokenizer.decode(prompt_ids),
        reference=reference,
        actions=actions,
        num_action_tokens=longest,
        reward=reward,
        empty_reward=wrong[0] if wrong else None,
    )


def _ask(environment: Environment, task_id: int) -> tuple[Task, str, Actions]:
    """A task, its reference, and actions that earn the reward, () if none are known. Raises ConfigError."""
    try:
        task, reference = environment.task(task_id), environment.reference(task_id)
        if environment.max_turns == 1:
            return task, reference, (reference,) if reference else ()
        demonstrate = getattr(environment, "demonstration", None)
        return task, reference, tuple(demonstrate(task_id)) if demonstrate is not None else ()
    except LookupError as error:
        raise ConfigError(str(error)) from None


async def _worth(verifier: SandboxVerifier, task: Task, actions: Sequence[str]) -> float:
    """The reward of an episode. Raises ConfigError if it cannot be scored."""
    try:
        return float((await verifier.verify(task.env, task.task_id, [tuple(actions)])).rewards[0])
    except (RolloutFailed, LookupError) as error:
        raise ConfigError(
            f"the reward failed on the answer {one_line(' | '.join(actions))!r}: {error}. Rewards run confined: with "
            "the installed packages, but no network, and no other files or modules than the one that they are in"
        ) from None
