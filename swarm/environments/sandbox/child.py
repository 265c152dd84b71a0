"""The processes that score answers: `python -I -m swarm.environments.sandbox.child MEMORY_BYTES`.

The first process imports the libraries of the environments, reads no answer, and forks a scoring process for each
socket that it receives: a few milliseconds instead of the seconds of the imports, so that killing a fork is cheap.

Invariant: a scoring process gives up its rights before it reads the first answer, and only frames written here reach
the parent: file descriptors 0, 1 and 2 are /dev/null. A request gets one reply, which repeats its nonce, also if a
verifier raises; but if an answer exceeds its CPU time or crashes the process, the process ends without a reply.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Never

from swarm.environments.replay import LiveEpisodes, Play, replay
from swarm.environments.sandbox.confine import (
    forbid_system_calls,
    hide_files,
    leave_readable,
    limit_process,
    limit_scoring,
    python_places,
)
from swarm.environments.sandbox.confinement_check import FIX, file_outside, missing_limits, refusals
from swarm.environments.sandbox.plain_values import read_frame, write_frame
from swarm.environments.sandbox.programs import take_cpu_s, use_host
from swarm.episode import outcome_to_json
from swarm.errors import ConfigError, described

if TYPE_CHECKING:
    from swarm.episode import Actions
    from swarm.interfaces import Environment

COMMAND_BYTES: Final = 5  # one letter and a number: F, fork a scoring process with budget_s, or K, kill that process
FORK, KILL = b"F", b"K"
LEAST_SHARE_S: Final = 0.005  # CPU time of the first answers after a fork, which copy pages
# for a reader of the message of an OSError
FILES_HINT: Final = (
    "; while it plays, code of an environment opens no file but below params.path, writes none, starts no process and "
    "has no network: read what it needs in __init__, or name its file or folder in params.path"
)
_HOST_COMMAND: Final = (sys.executable, "-P", "-s", "-B", "-m", "swarm.environments.sandbox.program_host")
_HOST_ENVIRONMENT: Final = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
_LOOK_AGAIN_S: Final = 0.0005  # least wait between two looks at the CPU time of a first try
_FIRST_HANG_S: Final = 60.0  # between two checks of a first answer, which ends if it used under _LEAST_CPU_S
_LEAST_CPU_S: Final = 0.05  # between two checks: an answer with less waits
_FIRST_CPU_S: Final = 300.0  # of a first answer, with its imports


def main() -> None:
    """Builds the environments, then forks and kills scoring processes as the parent commands, until end of file."""
    in_force = limit_process(int(sys.argv[1]))
    control = _take_standard_streams()
    hello, environments, data_paths = _build(read_frame(control.fileno()))
    host, problem = _host_programs(hello.get("program_cpu_s", {}))
    if problem:
        hello: dict[str, Any] = {"error": "config", "detail": problem}
    places = [*python_places(), *data_paths]
    outside = file_outside(places)
    in_force["other_files_hidden"] = hide_files(places)
    scorer = Scorer(environments, hello.get("answer_cpu_s", {}))
    gc.collect()
    gc.freeze()  # the pages of imported modules stay shared
    write_frame(control.fileno(), json.dumps(hello).encode())
    while True:
        command, descriptors, *_ = socket.recv_fds(control, COMMAND_BYTES, 1)
        if len(command) < COMMAND_BYTES:
            return
        number = int.from_bytes(command[1:])
        if command[:1] == KILL:
            reply = {"status": _kill(number)}
        else:
            parent = os.getpid()
            ends = socket.socketpair() if host else ()
            pid = os.fork()
            if pid == 0:
                control.close()
                if host and ends:
                    host.close()
                    ends[1].close()
                    use_host(ends[0].detach())
                in_force |= limit_scoring(number, parent)
                _serve(descriptors[0], scorer, in_force, places, outside)
            os.close(descriptors[0])
            if host and ends:
                socket.send_fds(host, [FORK], [ends[1].fileno()])
                for end in ends:
                    end.close()
            reply = {"pid": pid}
        write_frame(control.fileno(), json.dumps(reply).encode())


def _build(frame: bytes) -> tuple[dict[str, Any], "dict[str, Environment]", list[Path]]:
    """Builds the environments of the first frame; returns reply, environments, and paths that they go on reading."""
    # Imported here: pydantic, numpy and the environments' libraries load under the limits.
    from swarm.config import EnvironmentConfig
    from swarm.environments.environment import ANSWER_CPU_S
    from swarm.environments.load import build_environments, record_paths

    try:
        request = json.loads(frame)
        configs = [EnvironmentConfig.model_validate(data) for data in request["environments"]]
        environments = build_environments(configs)
        budgets = {name: float(getattr(env, "answer_cpu_s", ANSWER_CPU_S)) for name, env in environments.items()}
        most_s = request["most_cpu_s"]
        for name, budget_s in budgets.items():
            if not 0 < budget_s <= most_s:
                raise ConfigError(
                    f"environment {name}: answer_cpu_s {budget_s:g} must be above 0 and at most sandbox.timeout_s "
                    f"{most_s:g}"
                )
    except ConfigError as error:
        return {"error": "config", "detail": str(error)}, {}, []
    for environment in environments.values() if request["is_warm"] else ():
        _answer_first(environment)
    program_cpu_s = {name: float(getattr(env, "program_cpu_s", 0.0)) for name, env in environments.items()}
    shapes = {name: (env.verifier, env.max_turns) for name, env in environments.items()}
    return (
        {"answer_cpu_s": budgets, "program_cpu_s": program_cpu_s, "shapes": shapes},
        environments,
        [path for config in configs for path in record_paths(config)],
    )


def _answer_first(environment: "Environment") -> None:
    """Scores a first answer, so that no later answer pays for imports and caches; gives up if it loops or waits."""
    began_s = seen_s = time.process_time()

    def look(*_: object) -> None:
        nonlocal seen_s
        before_s, seen_s = seen_s, time.process_time()
        if seen_s - before_s < _LEAST_CPU_S or seen_s - began_s > _FIRST_CPU_S:
            raise TimeoutError

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, _FIRST_HANG_S, _FIRST_HANG_S)
    with suppress(BaseException):  # whatever a reward raises: the answer that is asked for names it
        replay(environment, 0, (environment.reference(0),))
    signal.setitimer(signal.ITIMER_REAL, 0)


def _host_programs(cpu_s: Mapping[str, float]) -> tuple[socket.socket | None, str]:
    """Starts the interpreter that carries out programs, if an environment has any.

    Args:
        cpu_s: name of each environment -> CPU seconds that the programs of an action may take; 0: it has none.

    Returns:
        The socket to that interpreter, or None; and the reason why programs cannot be carried out here, else "".
    """
    names = [name for name, most_s in cpu_s.items() if most_s > 0]
    if not names:
        return None, ""
    ours, theirs = socket.socketpair()
    with theirs:
        subprocess.Popen((*_HOST_COMMAND, sys.argv[1]), stdin=theirs.fileno(), cwd="/", env=_HOST_ENVIRONMENT)
    if not (missing := missing_limits(json.loads(read_frame(ours.fileno()) or b"{}"))):
        return ours, ""
    return None, (
        f"environments {', '.join(names)}: no program is carried out here, whoever wrote it, as the process for it is "
        f"not confined: {', '.join(missing)} were tried and not refused. {FIX.partition('. ')[0]}."
    )


def _kill(pid: int) -> int:
    """Kills and reaps a process; returns the signal that ended it, 0 if it had exited by itself."""
    os.kill(pid, signal.SIGKILL)  # not reaped before: nobody else has the number
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _serve(sink: int, scorer: "Scorer", in_force: dict[str, bool], places: list[Path], outside: str) -> Never:
    """Confines this process, tests the confinement, then answers one request after the other until end of file."""
    try:
        in_force["file_reads"] = leave_readable(places)
        in_force["system_calls"] = forbid_system_calls()
        in_force |= refusals(outside)  # an accepted limit need not be an effective one
        write_frame(sink, scorer.encode({"limits": in_force, "cpu_s": time.process_time()}))
        while frame := read_frame(sink):
            write_frame(sink, scorer.answer(frame))
    finally:
        os._exit(0)


class Scorer:
    """Scorer of answers with the environments of one scoring process."""

    def __init__(self, environments: "Mapping[str, Environment]", answer_cpu_s: Mapping[str, float]) -> None:
        """`answer_cpu_s`: name of each environment -> CPU seconds that one action may take."""
        self._environments = environments
        self._answer_cpu_s = answer_cpu_s
        self._live = LiveEpisodes()  # episodes of this node: each request adds an action to one episode

    def answer(self, frame: bytes) -> bytes:
        """The reply to one request frame."""
        request = json.loads(frame)
        try:
            episodes = [tuple(actions) for actions in request["episodes"]]
            play = self._live.step if request["is_live"] else replay
            limits = request["share"], request["least_s"], request["first_s"]
            reply = self._replay(request["env"], request["task_id"], episodes, play, *limits)
        except LookupError as error:
            reply = {"error": "lookup", "detail": str(error)}
        except _TaskFailed as error:
            reply = {"error": "task", "detail": f"{error}{_hint(error.__cause__)}"}
        except BaseException as error:  # a verifier may raise anything on hostile text, or end the program
            reply = {"error": "failed", "detail": described(error) + _hint(error)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        used = {"cpu_s": time.process_time(), "programs_cpu_s": take_cpu_s()}
        return self.encode({**reply, "nonce": request["nonce"], **used})

    def encode(self, reply: dict[str, Any]) -> bytes:
        """A reply as the bytes of a frame."""
        return json.dumps(reply).encode()

    def _replay(
        self,
        env: str,
        task_id: int,
        episodes: "Sequence[Actions]",
        play: Play,
        share: float,
        least_s: float,
        first_s: float,
    ) -> dict[str, Any]:
        """Replays the episodes; a `share` below 1 bounds their CPU time in all, between `least_s` and `first_s`."""
        environment = self._environments[env]
        if share < 1 and getattr(environment, "program_cpu_s", 0.0):
            return {"error": "share"}  # a program alone takes more than a first try
        try:
            task, reference = environment.task(task_id), environment.reference(task_id)
        except ConfigError as error:
            raise _TaskFailed(str(error)) from error.__cause__
        outcomes, most_s = list[Any](), self._answer_cpu_s[env]
        num_actions = [min(len(actions), environment.max_turns) for actions in episodes]  # it takes no others
        ends_s = time.process_time() + min(max(least_s, share * most_s * sum(num_actions)), first_s)
        if share < 1:
            end_at(ends_s)
        try:
            for actions, count in zip(episodes, num_actions, strict=True):
                left_s = most_s * max(1, count)
                if share < 1:
                    left_s = min(left_s, ends_s - time.process_time())
                if left_s <= 0:
                    return {"error": "share"}
                # SIGPROF ends this process, also inside of a loop in C that never returns to Python.
                signal.setitimer(signal.ITIMER_PROF, left_s)
                outcomes.append(outcome_to_json(play(environment, task_id, actions)))
        except LookupError as error:  # of the verifier, not of the task: that exists
            return {"error": "failed", "detail": described(error)}
        return {"task": asdict(task), "reference": reference, "verifier": environment.verifier, "outcomes": outcomes}


class _TaskFailed(Exception):
    """The task cannot be built, whatever the answers are."""


def _hint(error: BaseException | None) -> str:
    return FILES_HINT if isinstance(error, OSError) else ""


def end_at(ends_s: float) -> None:
    """Ends this process once it has used `ends_s` seconds of CPU time in all, as soon as Python code runs.

    This uses a wall-clock timer, since the kernel checks CPU timers only at its ticks, of 4 ms or more. Code that hangs
    in C is ended by the CPU timer, a few milliseconds later. `setitimer(ITIMER_REAL, 0)` cancels the end.
    """

    def look(*_: object) -> None:
        left_s = ends_s - time.process_time()
        if left_s <= 0:
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, max(left_s, _LOOK_AGAIN_S))

    signal.signal(signal.SIGALRM, look)
    look()


def _take_standard_streams() -> socket.socket:
    """Takes over standard input, a socket to the parent, and returns it; all standard streams become /dev/null."""
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return control


if __name__ == "__main__":
    main()
