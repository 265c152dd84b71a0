"""Check of an environment's episodes in the sandbox of a node: they can be played and scored, whatever a model writes.

Invariant: an environment that is refused here would fail, or have values clipped or ignored, in the groups of a node.
"""

import random
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from swarm.config import ModelConfig
from swarm.config.generation_config import is_char_model
from swarm.environments.load import signals_of
from swarm.environments.replay import MAX_REWARD, replay, weights_of
from swarm.episode import OUTCOME, Actions, EpisodeOutcome, Transition
from swarm.errors import ConfigError, RolloutFailed, described
from swarm.interfaces import Environment, Tokenizer, Verdict, Verifier
from swarm.model.conversations import Conversations
from swarm.model.tokenizer import CharTokenizer
from swarm.types import Task

_WORDS: Final = ("1", "up", "yes", "search a", '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "<tool_call>{")
_MAX_TURNS: Final = 8  # actions of an invented episode
_NUM_TASKS: Final = 3  # that are played
_NUM_VARIED: Final = 6  # episodes of each, of actions that look legal
_NUM_LEGAL: Final = 16  # tasks whose references may be legal actions
_NUM_BUILT: Final = 64  # tasks, over the whole range
_BUILD_S: Final = 3.0  # of CPU for these


@dataclass(frozen=True, kw_only=True, slots=True)
class Try:
    """Actions of one episode to play."""

    task_id: int
    actions: Actions
    is_demonstration: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedOut:
    """Facts about an environment that are collected outside of the sandbox: episodes to play, weights and signals."""

    tries: tuple[Try, ...]
    weights: Mapping[str, float]  # name of each reward that counts -> its weight
    signals: frozenset[str]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, as `read_tried` reads them."""
        return {"tries": [asdict(each) for each in self.tries], "weights": {**self.weights}, "signals": [*self.signals]}


def read_tried(data: Mapping[str, Any]) -> TriedOut:
    """The inverse of `TriedOut.to_json`."""
    tries = tuple(Try(**each | {"actions": tuple(each["actions"])}) for each in data["tries"])
    return TriedOut(tries=tries, weights=data["weights"], signals=frozenset(data["signals"]))


def try_out(environment: Environment) -> TriedOut:
    """Builds tasks of the whole range, for about _BUILD_S of CPU at most, and invents episodes of the first _NUM_TASKS.

    Raises:
        ConfigError: a task, reference or demonstration raises any error but LookupError, or a signal is unknown.
    """
    end_s, last = time.process_time() + _BUILD_S, environment.num_tasks - 1
    for task_id in sorted({last * number // (_NUM_BUILT - 1) for number in range(_NUM_BUILT)}, reverse=True):
        _ask(environment, "task", task_id)
        if time.process_time() > end_s:
            break
    shown = range(min(_NUM_TASKS, environment.num_tasks))
    made = {task_id: actions for task_id in shown if (actions := _known_actions(environment, task_id))}
    legal = {action for right, *_ in made.values() for action in right}
    legal |= {str(_ask(environment, "reference", task_id)) for task_id in range(min(_NUM_LEGAL, environment.num_tasks))}
    source = random.Random(environment.name)
    length = min(environment.max_turns, 2 * _MAX_TURNS)
    tries: list[Try] = []
    for task_id, (right, *mixed) in made.items():
        is_demonstration = getattr(environment, "demonstration", None) is not None
        tries.append(Try(task_id=task_id, actions=right, is_demonstration=is_demonstration))
        varied = [
            tuple(_varied(source.choice(sorted(legal)), source) for _ in range(length)) for _ in range(_NUM_VARIED)
        ]
        others = (*mixed, *((word,) for word in ("", *_WORDS)), *varied)
        tries += [Try(task_id=task_id, actions=actions) for actions in others]
    return TriedOut(tries=tuple(tries), weights=weights_of(environment), signals=signals_of(environment))


def actions_of(environment: Environment, task_id: int) -> tuple[Actions, ...]:
    """Actions of three episodes: the demonstration, or else the reference; then two mixtures of right and wrong."""
    right, other = environment.reference(task_id), environment.reference((task_id + 1) % environment.num_tasks)
    demonstrate = getattr(environment, "demonstration", None)
    mixed = (other, *_WORDS, right)
    shown = (right,) if demonstrate is None else tuple(demonstrate(task_id))
    return shown, mixed[:_MAX_TURNS], mixed[::-1][:_MAX_TURNS]


def _known_actions(environment: Environment, task_id: int) -> tuple[Actions, ...]:
    """Result of `actions_of`; () if the task or the following one does not exist, as for a record without its field."""
    following = (task_id + 1) % environment.num_tasks
    if any(_ask(environment, "reference", each) is None for each in (task_id, following)):
        return ()
    if getattr(environment, "demonstration", None) is not None and _ask(environment, "demonstration", task_id) is None:
        return ()
    return actions_of(environment, task_id)


def _ask(environment: Environment, method: str, task_id: int) -> object:
    """Result of a method for a task; None if it raises a plain LookupError. Raises ConfigError for any other error."""
    try:
        return getattr(environment, method)(task_id)
    except ConfigError:
        raise
    except Exception as error:
        if type(error) is LookupError:
            return None
        raise ConfigError(f"environment {environment.name}: {method}({task_id}) raised {described(error)}") from error


def _varied(action: str, source: random.Random) -> str:
    """The action; with probability 1/2, random digits replace its digits."""
    return re.sub(r"[0-9]", lambda _: str(source.randrange(10)), action) if source.random() < 0.5 else action


# --- in the sandbox ---------------------------------------------------------------------------------


async def require_sound(name: str, tried: TriedOut, verifier: Verifier, tokenizer: Tokenizer | None = None) -> None:
    """Plays the episodes of `tried` in the sandbox and refuses an environment that a node could not use as declared.

    Raises:
        ConfigError: an episode cannot be played, a reward would be clipped, an episode ends with rewards of which none
            counts, a demonstration earns nothing, the tokenizer cannot read a text, or `signals` lacks a signal.
    """
    said = set[str]()
    for each in tried.tries:
        verdict = await _play(name, each, verifier)
        outcome = verdict.outcomes[0]
        where = f"environment {name}: task {each.task_id} with the actions {list(each.actions)!r}"
        for number, turn in enumerate(outcome.transitions, 1):
            _check_rewards(f"{where}: action {number}", turn, tried.weights)
            said |= _signals_in(turn)
        if each.is_demonstration and not (outcome.is_ended and outcome.reward > 0):
            raise ConfigError(
                f"environment {name}: demonstration({each.task_id}) gives {list(each.actions)!r}, which earns "
                f"{outcome.reward:g}{'' if outcome.is_ended else ' and does not end the episode'}; give actions that "
                "earn the reward"
            )
        if tokenizer is not None:
            _check_texts(each, verdict.task, outcome, tokenizer)
    if missing := sorted(said - tried.signals):
        raise ConfigError(
            f"environment {name}: its episodes have {', '.join(missing)}, which its attribute `signals` does not name, "
            f"so that no recipe could ask for it: add signals = frozenset({set(missing)!r})"
        )


async def _play(name: str, each: Try, verifier: Verifier) -> Verdict:
    """Verdict of the sandbox on one episode. Raises ConfigError, which names the first action that fails."""
    try:
        return await verifier.verify(name, each.task_id, [each.actions])
    except (RolloutFailed, LookupError) as error:
        first, reason = len(each.actions), str(error)
    for number in range(first):  # the shortest beginning that fails
        try:
            await verifier.verify(name, each.task_id, [each.actions[:number]])
        except (RolloutFailed, LookupError) as error:
            first, reason = number, str(error)
            break
    where = f"action {first} of {list(each.actions[:first])!r}" if first else "its beginning"
    raise ConfigError(f"{reason}, at {where}; whatever a model writes must have an answer")


def _check_rewards(where: str, turn: Transition, weights: Mapping[str, float]) -> None:
    if turn.is_end and turn.rewards and not weights.keys() & turn.rewards.keys():
        wanted = " or ".join(map(repr, weights))
        raise ConfigError(
            f"{where} ended it with the rewards {dict(turn.rewards)!r}, of which none counts: give it {wanted}, or set "
            "reward_weights"
        )
    if not 0.0 <= (outcome := turn.rewards.get(OUTCOME, 0.0)) <= 1.0:
        raise ConfigError(
            f"{where} gave the reward {OUTCOME!r} {outcome:g}, which would be clipped to [0, 1]; scale it"
        )
    for what, value in (("of its turn", turn.reward), *((repr(key), value) for key, value in turn.rewards.items())):
        if abs(value) >= MAX_REWARD:
            raise ConfigError(f"{where} gave the reward {what} {value:g}, where {MAX_REWARD:g} cuts it; scale it")


def _signals_in(turn: Transition) -> set[str]:
    signals = {"turn_rewards"} if turn.reward else set[str]()
    signals |= {"state_keys"} if turn.state_key and not turn.is_end else set()
    signals |= {"tool_calls"} if turn.num_calls else set()
    return signals | ({"reward_parts"} if set(turn.rewards) - {OUTCOME} else set())


def require_readable(environment: Environment, tokenizer: Tokenizer) -> None:
    """Plays the episodes of `try_out` in this process. Raises ConfigError for a text that the tokenizer cannot read.

    Programs (`program_cpu_s`) are not carried out here: of environments with programs only the questions are checked.
    """
    has_programs = getattr(environment, "program_cpu_s", 0.0) > 0
    for each in try_out(environment).tries:
        nothing = EpisodeOutcome(reward=0.0, transitions=())
        outcome = nothing if has_programs else replay(environment, each.task_id, each.actions)
        _check_texts(each, environment.task(each.task_id), outcome, tokenizer)


def narrow_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a character model, which cannot read every text; None for other models."""
    return CharTokenizer() if is_char_model(config.source) else None


def _check_texts(each: Try, task: Task, outcome: EpisodeOutcome, tokenizer: Tokenizer) -> None:
    """Raises ConfigError for a question or an observation that the tokenizer cannot read."""
    tokenizer.encode_prompt(task)
    conversations = Conversations(tokenizer, task.env)
    for number, turn in enumerate(outcome.transitions, 1):
        try:
            if not turn.is_end:
                conversations.observe(turn, is_ended=True)
        except ConfigError as error:
            where = (
                f"environment {task.env!r}: task {each.task_id}, after action {number} ({each.actions[number - 1]!r})"
            )
            raise ConfigError(f"{where}: {error}") from None
