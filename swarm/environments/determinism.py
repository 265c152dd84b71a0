"""Check of local environments: whether their episodes come out the same in another process.

A few episodes are played in two fresh processes with other hash seeds, time zones, clocks and order of episodes; run
as `python -m swarm.environments.determinism`, this module is such a process.

Invariant: what this check calls different is different; it cannot show that everything is the same.
"""

import asyncio
import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from swarm.config import EnvironmentConfig
from swarm.environments.load import build_environments, signals_of
from swarm.environments.replay import replay, weights_of
from swarm.episode import OUTCOME, Actions, outcome_to_json
from swarm.errors import ConfigError, described

if TYPE_CHECKING:
    from swarm.interfaces import Environment

TIMEOUT_S: Final = 60.0
LOCAL_KINDS: Final = ("function", "plugin")  # code that no version number of ours stands for
_WORDS: Final = ("1", "up", "yes", "search a", '<tool_call>{"name": "a", "arguments": {}}</tool_call>', "<tool_call>{")
_MAX_TURNS: Final = 8
# hash seed, time zone, seconds that the clocks are ahead, whether the order is turned around
_SETTINGS: Final = (("1", "UTC", 0.0, False), ("2", "XXX-13:30", 1.1e8, True))
FIX: Final = (
    "draw randomness from the configured seed and the task id alone, and use no clock, id(), hash() or order of a set; "
    'or keep its episodes on this node: exchange = "own"'
)


async def differences(configs: Iterable[EnvironmentConfig]) -> dict[str, str]:
    """Name of each environment that is not repeatable -> what is wrong, as a sentence without its subject.

    Starts two processes where a configuration names local code, and none elsewhere.

    Raises:
        ConfigError: an environment cannot be built.
    """
    local = [config for config in configs if (config.inner or config).kind in LOCAL_KINDS]
    if not local:
        return {}
    plays = await asyncio.gather(*(_play_elsewhere(local, *setting) for setting in _SETTINGS))
    found: dict[str, str] = {}
    for config in local:
        one, other = (play.get(config.name, {}) for play in plays)
        differing = [part for part in one if one[part] != other.get(part)]
        if differing or not one or not other:
            found[config.name] = (
                f"{differing[0]} differs between two processes"
                if differing
                else f"a few of its episodes took longer than {TIMEOUT_S:g} s"
            )
    return found


async def require_repeatable(configs: Iterable[EnvironmentConfig]) -> None:
    """Raises ConfigError for an environment whose episodes leave the node, and no other node could replay or score."""
    for name, what in (await differences(each for each in configs if each.exchange != "own")).items():
        raise ConfigError(f"environment {name}: {what}; {FIX}")


async def _play_elsewhere(
    configs: Sequence[EnvironmentConfig], hash_seed: str, zone: str, ahead_s: float, is_reversed: bool
) -> dict[str, dict[str, str]]:
    """Digest of each part of each environment, as a fresh process has them; none where it took too long.

    Raises:
        ConfigError: an environment cannot be built there, or the process died; says what of.
    """
    # without PYTHONPATH, as the process that judges: what only it finds would be missed there
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
    request = {"environments": sections, "ahead_s": ahead_s, "is_reversed": is_reversed}
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, errors = await process.communicate(json.dumps(request).encode())
    except TimeoutError:
        return {}
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    try:
        reply = cast("dict[str, Any]", json.loads(output))
    except ValueError:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2][-400:]
        names = ", ".join(config.name for config in configs)
        raise ConfigError(
            f"environments {names}: the process that plays them again died with exit code {process.returncode}: {last}"
        ) from None
    if "error" in reply:
        raise ConfigError(str(reply["error"]))
    return reply


# --- in the fresh process ---------------------------------------------------------------------------


def main() -> None:
    """Plays what standard input names, and writes the digests as JSON."""
    request = json.loads(sys.stdin.buffer.read())
    ours = os.dup(1)
    os.dup2(2, 1)  # what local code prints is no reply
    shift_clocks(request["ahead_s"])
    try:
        environments = build_environments(EnvironmentConfig.model_validate(each) for each in request["environments"])
        reply: dict[str, Any] = {
            name: played(environment, is_reversed=request["is_reversed"]) for name, environment in environments.items()
        }
        for environment in environments.values():  # last: what it plays must not make up for the order of episodes
            require_sound(environment)
    except ConfigError as error:
        reply = {"error": str(error)}
    with os.fdopen(ours, "w", encoding="utf-8") as output:
        json.dump(reply, output)


def played(environment: "Environment", *, is_reversed: bool) -> dict[str, str]:
    """Digest of each task, reference and episode by name, made in one order or the other; the others' twice."""
    last = environment.num_tasks - 1
    task_ids = sorted({min(task_id, last) for task_id in (0, 1, 2, last // 2, last - 1, last) if task_id >= 0})
    parts: dict[str, Callable[[], object]] = {"its verifier": lambda: environment.verifier}
    for task_id in task_ids:
        parts[f"the question of task {task_id}"] = lambda i=task_id: repr(environment.task(i))
        parts[f"the reference of task {task_id}"] = lambda i=task_id: environment.reference(i)
        for number in range(3):
            name = f"episode {number} of task {task_id}"
            parts[name] = lambda i=task_id, n=number: outcome_to_json(
                replay(environment, i, _actions(environment, i, n))
            )
    names = list(reversed(parts)) if is_reversed else list(parts)
    digests = {name: _digest(parts[name]) for name in names}
    if is_reversed:  # once more, as it is then
        for name in names:
            digests[name] += "" if _digest(parts[name]) == digests[name] else " another time"
    return {name: digests[name] for name in parts}


def require_sound(environment: "Environment") -> None:
    """Raises ConfigError where a step raises, an end has no reward that counts, or episodes say more than is named."""
    origin, said = f"environment {environment.name}", set[str]()
    for task_id in range(min(3, environment.num_tasks)):
        for actions in _several(environment, task_id):
            try:
                outcome = replay(environment, task_id, actions)
            except Exception as error:
                raise ConfigError(
                    f"{origin}: task {task_id} raised {described(error)} on the actions {list(actions)!r}; whatever a "
                    "model writes must have an answer"
                ) from error
            if outcome.rewards and not weights_of(environment).keys() & outcome.rewards.keys():
                wanted = " or ".join(map(repr, weights_of(environment)))
                raise ConfigError(
                    f"{origin}: an episode of task {task_id} ended with the rewards {dict(outcome.rewards)!r}, of "
                    f"which none counts: give it {wanted}, or set reward_weights"
                )
            if not 0.0 <= outcome.rewards.get(OUTCOME, 0.0) <= 1.0:
                raise ConfigError(
                    f"{origin}: the reward {OUTCOME!r} of task {task_id} is {outcome.rewards[OUTCOME]:g} and would be "
                    "clipped to [0, 1]; scale it"
                )
            turns = outcome.transitions
            said |= {"turn_rewards"} if any(turn.reward for turn in turns) else set()
            said |= {"state_keys"} if any(turn.state_key and not turn.is_end for turn in turns) else set()
            said |= {"tool_calls"} if any(turn.num_calls for turn in turns) else set()
            said |= {"reward_parts"} if set(outcome.rewards) - {OUTCOME} else set()
    if missing := sorted(said - signals_of(environment)):
        raise ConfigError(
            f"{origin}: its episodes have {', '.join(missing)}, which its attribute `signals` does not name, so that "
            f"no recipe could ask for it: add signals = frozenset({set(missing)!r})"
        )


def _several(environment: "Environment", task_id: int) -> list[Actions]:
    """Actions of a few episodes; none where the task, or the one whose answer is tried, cannot be built."""
    try:
        environment.task(task_id)
        longer = [_actions(environment, task_id, number) for number in range(3)]
    except LookupError:  # a record without its field, say: that task alone
        return []
    return [*longer, *((word,) for word in ("", *_WORDS))]


def _actions(environment: "Environment", task_id: int, number: int) -> Actions:
    right, other = environment.reference(task_id), environment.reference((task_id + 1) % environment.num_tasks)
    demonstrate = getattr(environment, "demonstration", None)
    mixed = (other, *_WORDS, right)
    made: tuple[Actions, ...] = ((right,) if demonstrate is None else demonstrate(task_id), mixed, mixed[::-1])
    return made[number][:_MAX_TURNS]


def _digest(part: Callable[[], object]) -> str:
    try:
        said = json.dumps(part(), sort_keys=True)
    except Exception as error:  # local code may raise anything, the same everywhere
        said = type(error).__name__
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()


def shift_clocks(ahead_s: float) -> None:
    """Lets the clocks of this process go ahead, for what asks them by `time` or `datetime` from now on."""
    for name, scale in (
        ("time", 1),
        ("monotonic", 1),
        ("perf_counter", 1),
        ("time_ns", 10**9),
        ("monotonic_ns", 10**9),
    ):
        clock = getattr(time, name)
        setattr(time, name, lambda clock=clock, by=type(clock())(ahead_s * scale): clock() + by)
    real_date, real_datetime, ahead = datetime.date, datetime.datetime, datetime.timedelta(seconds=ahead_s)

    class AnyKind(type):
        """Values that C code makes are of these classes, too."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, real_datetime if issubclass(cls, real_datetime) else real_date)

    def as_real(kind: type) -> Any:
        """What pydantic asks a class for that it does not know."""
        return classmethod(lambda cls, source, handler: handler(kind))

    class ShiftedDate(real_date, metaclass=AnyKind):
        __get_pydantic_core_schema__ = as_real(real_date)

        @classmethod
        def today(cls) -> datetime.date:
            return (real_datetime.now() + ahead).date()

    class ShiftedTime(real_datetime, metaclass=AnyKind):
        __get_pydantic_core_schema__ = as_real(real_datetime)

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return real_datetime.now(tz) + ahead

        @classmethod
        def utcnow(cls) -> datetime.datetime:
            return real_datetime.now(datetime.UTC).replace(tzinfo=None) + ahead

        @classmethod
        def today(cls) -> datetime.datetime:
            return real_datetime.now() + ahead

    for name, kind in {"date": ShiftedDate, "datetime": ShiftedTime}.items():
        setattr(datetime, name, kind)


if __name__ == "__main__":
    main()
