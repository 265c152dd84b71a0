"""Hostile answers against every dataset of reasoning-gym: what is paid, and how much CPU time an answer takes.

python -m benchmarks.verifiers                       # all x 1,000 answers, 10 seconds
python -m benchmarks.verifiers --datasets chain_sum,sokoban --answers 200
"""

import argparse
import gc
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from swarm.config import EnvironmentConfig
from swarm.environments.answer_forms import FORM, JUDGED
from swarm.environments.reasoning_gym import ReasoningGymEnvironment
from swarm.environments.replay import answer_reward
from swarm.errors import ConfigError
from tests.attacks.hostile_answers import TEXT, hostile_answers, is_excused

NUM_TASKS = 10
# Puzzles with many solutions, of which a mutated one may be another.
MANY = frozenset({*FORM, *JUDGED})


@dataclass(slots=True)
class Outcome:
    """Rewards of hostile and right answers to one dataset, and the time of scoring them."""

    dataset: str
    num_answers: int = 0
    num_excused: int = 0  # paid: another spelling of the right answer
    num_other: int = 0  # paid: another solution of a puzzle with many, without a word of the attacker's
    worst_s: float = 0.0  # CPU time of an answer
    worst_right_s: float = 0.0  # of a right one
    unpaid: list[str] = field(default_factory=list[str])  # right answers
    paid: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])  # (task, answer) wrong ones


def datasets() -> list[str]:
    """Names of the datasets that can be built here, in order."""
    ReasoningGymEnvironment(EnvironmentConfig(name="first", kind="reasoning_gym", dataset="gcd"))  # imports the library
    known = cast("Any", importlib.import_module("reasoning_gym.factory")).DATASETS
    return sorted(known)


def attack(environment: ReasoningGymEnvironment, num_answers: int, num_tasks: int = NUM_TASKS) -> Outcome:
    """Scores hostile answers to the first tasks of an environment in this process, and the right ones."""
    outcome = Outcome(environment.config.dataset)
    problems = [environment.problem(task_id) for task_id in range(num_tasks)]
    rights = [known_answer(problem.reference, problem.entry) for problem in problems]
    gc.collect()
    gc.freeze()  # as in a scoring process: what the library holds is no answer's time
    for task_id, (problem, right) in enumerate(zip(problems, rights, strict=True)):
        others = [other for other in rights if other != right]
        if not problem.reference:  # any valid answer counts, and an answer to another task may be one
            others = []
        seconds, reward = timed(environment, task_id, right)
        outcome.worst_right_s = max(outcome.worst_right_s, seconds)
        if right and reward != 1.0:
            outcome.unpaid.append(right)
        count = num_answers // num_tasks + (task_id < num_answers % num_tasks)
        for answer in hostile_answers(problem.question, right, others, seed=task_id, count=count):
            seconds, reward = timed(environment, task_id, answer)
            outcome.num_answers += 1
            outcome.worst_s = max(outcome.worst_s, seconds)
            if reward >= 1.0 and is_excused(answer, right, figures=3 if outcome.dataset == "power_function" else 15):
                outcome.num_excused += 1
            elif reward >= 1.0 and outcome.dataset in MANY and TEXT not in answer:
                outcome.num_other += 1
            elif reward >= 1.0:
                outcome.paid.append((task_id, answer))
    return outcome


def known_answer(reference: str, entry: dict[str, Any]) -> str:
    """The reference, or the example that some datasets without one keep; empty where there is neither."""
    metadata = entry["metadata"]
    return reference.strip() or str(metadata.get("example_answer") or metadata.get("example_correct_answer") or "")


def timed(environment: ReasoningGymEnvironment, task_id: int, answer: str) -> tuple[float, float]:
    """(CPU seconds, reward)"""
    began_s = time.process_time()
    reward = answer_reward(environment, task_id, answer)
    return time.process_time() - began_s, reward


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifiers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--datasets", default="", help="names with commas between them; default: all")
    parser.add_argument("--answers", type=int, default=1000, help="for each dataset")
    options = parser.parse_args(arguments)
    total, refused = Outcome("all"), list[str]()
    for name in options.datasets.split(",") if options.datasets else datasets():
        try:
            environment = ReasoningGymEnvironment(EnvironmentConfig(name=name, kind="reasoning_gym", dataset=name))
        except ConfigError as error:
            refused.append(str(error))
            continue
        outcome = attack(environment, options.answers)
        print(
            f"{name:26} {outcome.num_answers:5} answers, paid and wrong {len(outcome.paid)}, other spellings "
            f"{outcome.num_excused}, other solutions {outcome.num_other}, right and unpaid {len(outcome.unpaid)}, "
            f"worst {1000 * outcome.worst_s:.1f} ms, right {1000 * outcome.worst_right_s:.1f} ms",
            flush=True,
        )
        for task_id, answer in outcome.paid[:5]:
            print(f"    task {task_id}: {answer[:200]!r}")
        total.num_answers += outcome.num_answers
        total.paid += outcome.paid
        total.unpaid += outcome.unpaid
        total.worst_s = max(total.worst_s, outcome.worst_s)
    print("\n".join(refused))
    print(f"all: {total.num_answers} answers, {len(total.paid)} paid and wrong, worst {1000 * total.worst_s:.1f} ms")


if __name__ == "__main__":
    main()
