"""Check of local environments: their episodes must be sound, and the same in another process.

A few episodes are played in two fresh processes that differ in hash seed, time zone, clocks and order of episodes; each
of them runs this module as `python -m swarm.environments.determinism`. More episodes are played in the sandbox of a
node (`swarm.environments.soundness`).

Invariant: every reported difference is real; the check cannot show that there is none.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.environment import ANSWER_CPU_S
from swarm.environments.load import build_environments
from swarm.environments.replay import replay
from swarm.environments.sandbox.confine import limit_memory
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.environments.soundness import actions_of, read_tried, require_readable, require_sound, try_out
from swarm.episode import outcome_to_json
from swarm.errors import ConfigError, RolloutFailed

if TYPE_CHECKING:
    from swarm.interfaces import Environment, Tokenizer

HANG_S: Final = 600.0  # CPU is bounded in the process itself; this is for local code that sleeps
LOCAL_KINDS: Final = ("function", "plugin")  # their code is not part of this package
PLAYS_OF: Final = 5  # times answer_cpu_s that an action may take here, outside of the sandbox
LEAST_PART_S: Final = 2.0  # of CPU, for imports and caches
_SHOWN_CHARS: Final = 60  # of a value that differs
_SHOWN_BEFORE: Final = 15  # of these, before the first difference
# hash seed, time zone (date and hour differ), seconds that the clocks are ahead, whether the order is reversed
_SETTINGS: Final = (("1", "XXX24", 0.0, False), ("2", "XXX-13:30", 1.1e8, True))
FIX: Final = (
    "draw randomness from the configured seed and the task id alone, and use no clock, id(), hash() or order of a set; "
    'or keep its episodes on this node: exchange = "own"'
)
# of a transition, as `outcome_to_json` writes it
_FIELDS: Final = (
    *("the observation", "whether it ends", "the reward", "the named rewards", "the status", "the state_key"),
    *("the conversation", "the role", "the number of calls"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """Properties of a sound environment of local code."""

    max_turns: int
    difference: str  # between two processes, as a clause that names the part; "" if there is none


async def examine(
    configs: Iterable[EnvironmentConfig],
    sandbox: SandboxConfig | None = None,
    tokenizer: "Tokenizer | None" = None,
) -> dict[str, Examined]:
    """Plays a few episodes of each environment that is local code, in two fresh processes and in a node's sandbox.

    Starts no process if no section names local code.

    Args:
        configs: sections of environments.
        sandbox: limits of the sandbox; None: the default ones.
        tokenizer: tokenizer that must read every text of all played episodes; None: texts are not checked.

    Returns:
        Name of each environment of local code -> its properties.

    Raises:
        ConfigError: an environment cannot be built or played, or is unsound (`require_sound`).
    """
    local, shipped = list[EnvironmentConfig](), list[EnvironmentConfig]()
    for config in configs:
        (local if (config.inner or config).kind in LOCAL_KINDS else shipped).append(config)
    if tokenizer is not None:
        for environment in (await asyncio.to_thread(build_environments, shipped)).values():
            await asyncio.to_thread(require_readable, environment, tokenizer)
    if not local:
        return {}
    sandbox = sandbox or SandboxConfig()
    plays = await asyncio.gather(*(_play_elsewhere(local, sandbox.memory_bytes, *setting) for setting in _SETTINGS))
    try:
        async with SandboxVerifier(tuple(local), sandbox) as verifier:
            await verifier.limits_in_force()  # starts it
            for config in local:
                await require_sound(config.name, read_tried(plays[0][config.name]["tried"]), verifier, tokenizer)
            shapes = dict(verifier.shapes)
    except RolloutFailed as error:
        names = ", ".join(config.name for config in local)
        raise ConfigError(f"environments {names}: {error}; does one need more than sandbox.memory_bytes?") from None
    return {
        config.name: Examined(
            max_turns=shapes[config.name].max_turns,
            difference=_difference(config.name, *(play[config.name]["parts"] for play in plays)),
        )
        for config in local
    }


async def differences(
    configs: Iterable[EnvironmentConfig],
    sandbox: SandboxConfig | None = None,
    tokenizer: "Tokenizer | None" = None,
) -> dict[str, str]:
    """Name of each local environment that is not repeatable -> the first difference found. Raises as `examine`."""
    found = await examine(configs, sandbox, tokenizer)
    return {name: each.difference for name, each in found.items() if each.difference}


async def require_repeatable(
    configs: Sequence[EnvironmentConfig],
    sandbox: SandboxConfig | None = None,
    tokenizer: "Tokenizer | None" = None,
) -> dict[str, Examined]:
    """Result of `examine`. Raises as `examine`, and ConfigError if an environment for other nodes is unrepeatable."""
    found = await examine(configs, sandbox, tokenizer)
    for config in configs:
        if config.exchange != "own" and config.name in found and (what := found[config.name].difference):
            raise ConfigError(f"environment {config.name}: {what}; {FIX}")
    return found


def _difference(name: str, one: dict[str, list[str]], other: dict[str, list[str]]) -> str:
    """Description of the first part that differs, "" if none does. Raises ConfigError for a part that took too long."""
    for part, (text, *_) in (one | other).items():
        if text.startswith(_TOO_LONG):
            raise ConfigError(f"environment {name}: {part} took more CPU time than {text[len(_TOO_LONG) :]} s; a loop?")
    for part, (text, *_) in one.items():
        if apart := next((each for each in other[part] if each != text), None):
            return f"{part} differs between two processes: {_first_difference(json.loads(text), json.loads(apart))}"
    return ""


def _first_difference(one: Any, other: Any) -> str:
    """Description of the first place where two values of a part differ, with both values, shortened."""
    if not (isinstance(one, list) and isinstance(other, list)):
        return _both("it", one, other)
    (actions, (reward, turns)), (others_actions, (others_reward, others_turns)) = one, other
    if actions != others_actions:
        return _both("the actions of reference or demonstration", actions, others_actions)
    for number, (turn, others_turn) in enumerate(zip(turns, others_turns, strict=False), 1):
        where = f"after action {number}, {actions[number - 1][:_SHOWN_CHARS]!r},"
        for field, value, others_value in zip(_FIELDS, turn, others_turn, strict=True):
            if value != others_value:
                return _both(f"{field} {where}", value, others_value)
    return _both("its reward", reward, others_reward)


def _both(what: str, one: object, other: object) -> str:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in (one, other)]
    same = next((number for number, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
    begin = max(0, same - _SHOWN_BEFORE)
    shown = [text[begin : begin + _SHOWN_CHARS] for text in texts]
    return f"{what} is {shown[0]!r} in one and {shown[1]!r} in the other"


async def _play_elsewhere(
    configs: Sequence[EnvironmentConfig],
    memory_bytes: int,
    hash_seed: str,
    zone: str,
    ahead_s: float,
    is_reversed: bool,
) -> dict[str, Any]:
    """Plays the environments in a fresh process; returns the name of each -> its parts and tries.

    Raises:
        ConfigError: an environment cannot be built or tried out there, or the process died or took too long.
    """
    names = ", ".join(config.name for config in configs)
    # without PYTHONPATH, as in scoring processes: a module that is found only through it would be missing there
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-B",
        "-m",
        "swarm.environments.determinism",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=inherited | {"PYTHONHASHSEED": hash_seed, "TZ": zone, "OMP_NUM_THREADS": "1"},
    )
    sections = [config.model_dump(mode="json") for config in configs]
    request = {
        "environments": sections,
        "memory_bytes": memory_bytes,
        "ahead_s": ahead_s,
        "is_reversed": is_reversed,
    }
    try:
        async with asyncio.timeout(HANG_S):
            output, errors = await process.communicate(json.dumps(request).encode())
    except TimeoutError:
        raise ConfigError(
            f"environments {names}: a few tasks and episodes of theirs took longer than {HANG_S:g} s in a process"
        ) from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    try:
        reply = cast("dict[str, Any]", json.loads(output))
    except ValueError:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][-400:]
        raise ConfigError(
            f"environments {names}: the process that plays them again died with exit code {process.returncode}: {last}"
        ) from None
    if "error" in reply:
        raise ConfigError(str(reply["error"]))
    return reply


# --- in the fresh process ---------------------------------------------------------------------------


def main() -> None:
    """Plays the environments that standard input names, and writes the results to standard output as JSON."""
    request = json.loads(sys.stdin.buffer.read())
    ours = os.dup(1)
    os.dup2(2, 1)  # output of local code must not mix with the reply
    shift_clocks(request["ahead_s"])
    signal.signal(signal.SIGPROF, _take_long)
    limit_memory(request["memory_bytes"])  # where the system has such a limit: the code is this node's own
    try:
        environments = build_environments(EnvironmentConfig.model_validate(each) for each in request["environments"])
        reply: dict[str, Any] = {
            name: {"parts": played(environment, is_reversed=request["is_reversed"])}
            for name, environment in environments.items()
        }
        for name, environment in environments.items():  # last: it must not make up for the order of episodes
            with _limit(environment, 1):
                reply[name]["tried"] = try_out(environment).to_json()
    except ConfigError as error:
        reply = {"error": str(error)}
    with os.fdopen(ours, "w", encoding="utf-8") as output:
        json.dump(reply, output)


def played(environment: "Environment", *, is_reversed: bool) -> dict[str, list[str]]:
    """Name of each part (verifier, a few tasks, references and episodes) -> its values as JSON, one or two.

    `is_reversed` makes all parts in reverse order, and then once more, for two values each. A part that raises has the
    exception's name as its value. Parts after the first one that takes too long are left out.
    """
    last = environment.num_tasks - 1
    task_ids = sorted({min(task_id, last) for task_id in (0, 1, 2, last // 2, last - 1, last) if task_id >= 0})
    parts: dict[str, Callable[[], object]] = {"its verifier": lambda: environment.verifier}
    for task_id in task_ids:
        parts[f"the question of task {task_id}"] = lambda i=task_id: repr(environment.task(i))
        parts[f"the reference of task {task_id}"] = lambda i=task_id: environment.reference(i)
        for number in range(3):
            parts[f"episode {number} of task {task_id}"] = lambda i=task_id, n=number: _episode(environment, i, n)
    names = list(reversed(parts)) if is_reversed else list(parts)
    made: dict[str, list[str]] = {}
    for name in (*names, *(names if is_reversed else ())):  # once more, as it is then
        try:
            with _limit(environment, environment.max_turns):
                made.setdefault(name, []).append(_as_json(parts[name]))
        except _TookLong as error:
            made[name] = [_TOO_LONG + str(error)]
            break
    return made


def _episode(environment: "Environment", task_id: int, number: int) -> object:
    actions = actions_of(environment, task_id)[number]
    return actions, outcome_to_json(replay(environment, task_id, actions))


def _as_json(part: Callable[[], object]) -> str:
    try:
        return json.dumps(part(), sort_keys=True)
    except Exception as error:  # local code may raise anything, the same everywhere
        return json.dumps(type(error).__name__)


_TOO_LONG: Final = "took longer than "  # no JSON


class _TookLong(BaseException):
    """CPU time limit exceeded. A BaseException, so that `except Exception` in local code does not swallow it."""


def _take_long(*_: object) -> None:
    raise _TookLong


@contextmanager
def _limit(environment: "Environment", num_actions: int) -> Generator[None]:
    """Raises _TookLong once the block's Python code exceeds LEAST_PART_S + PLAYS_OF x the CPU bound of its actions."""
    most_s = LEAST_PART_S + PLAYS_OF * num_actions * getattr(environment, "answer_cpu_s", ANSWER_CPU_S)
    signal.setitimer(signal.ITIMER_PROF, most_s, most_s)
    try:
        yield
    except _TookLong:
        raise _TookLong(f"{most_s:g}") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def shift_clocks(ahead_s: float) -> None:
    """Sets the clocks of `time` ahead in this process, and with them `date.today`.

    `datetime.now` reads the system's clock, so that only the time zones make its date and hour differ.
    """
    for name, scale in (
        ("time", 1),
        ("monotonic", 1),
        ("perf_counter", 1),
        ("time_ns", 10**9),
        ("monotonic_ns", 10**9),
    ):
        clock = getattr(time, name)
        setattr(time, name, lambda clock=clock, by=type(clock())(ahead_s * scale): clock() + by)


if __name__ == "__main__":
    main()
