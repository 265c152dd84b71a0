"""First problems of environments from somebody else's configuration, made and played in a process with limits.

Parameters within all bounds of a manifest may still demand unbounded work. Invariant: the node itself builds or plays
the problems (`require_readable`) only after the limited process did.
"""

import json
import sys
from collections.abc import Sequence
from typing import Final

from swarm.config import EnvironmentConfig
from swarm.errors import ConfigError, SwarmError
from swarm.process import run_bounded

CPU_S: Final = 60  # for the first problems of an environment, and episodes of them
MEMORY_BYTES: Final = 4 * 2**30  # of address space
MAX_QUESTION_CHARS: Final = 2**20
NUM_PROBLEMS: Final = 2  # of each environment


def require_first_problems(environments: Sequence[EnvironmentConfig]) -> None:
    """Makes the first problems of each environment that draws them by parameters (blocking, about two seconds each).

    Raises:
        ConfigError: the problems exceed CPU_S, MEMORY_BYTES or MAX_QUESTION_CHARS; the message names environment,
            parameters and bound.
    """
    asked = [each for each in environments if each.params and each.kind not in ("jsonl", "char", "function", "plugin")]
    for each in asked:
        request = json.dumps(each.model_dump(mode="json")).encode()
        try:
            reply = run_bounded("swarm.environments.first_problem:main", request, CPU_S, MEMORY_BYTES)
        except ValueError as error:
            raise ConfigError(f"{_named(each)}: its first problems {error}") from None
        if reply:
            raise ConfigError(f"{_named(each)}: {reply.decode(errors='replace')}")


def _named(each: EnvironmentConfig) -> str:
    return f"environment {each.name} ({each.kind} {each.dataset}, params {json.dumps(each.params):.200})"


def main() -> None:
    """Makes the problems of the environment on standard input; prints the reason why they cannot be used, if any."""
    from swarm.environments.load import build_environment
    from swarm.environments.replay import replay
    from swarm.environments.soundness import try_out

    try:
        environment = build_environment(EnvironmentConfig.model_validate_json(sys.stdin.buffer.read()))
        for task_id in range(min(NUM_PROBLEMS, environment.num_tasks)):
            longest = max(len(message.content) for message in environment.task(task_id).messages)
            if longest > MAX_QUESTION_CHARS:
                sys.stdout.write(f"a question has {longest:,} characters, at most {MAX_QUESTION_CHARS:,} are allowed")
                return
        if not getattr(environment, "program_cpu_s", 0.0):
            for each in try_out(environment).tries:
                replay(environment, each.task_id, each.actions)
    except (SwarmError, LookupError):  # the caller meets it as well
        return
