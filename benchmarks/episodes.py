"""Gain of keeping the cache of parked episodes in action tokens per CPU second, and cost of slow environments.

    python -m benchmarks.episodes                       # SmolLM2-135M, float32: minutes
    python -m benchmarks.episodes --source tiny --rows 8
    python -m benchmarks.episodes --replay             # replay at admission, of every shipped environment

Each case makes the same episodes: a prompt, then turns of an action and an observation, all of fixed lengths. `kept`:
rows are parked with their cache. `dropped`: the conversation is computed again before each
turn. `prompt per turn`: each turn is a call of its own, as engines that take prompts do. With `--step-s` the
environment takes so many seconds for a step, with twice as many episodes in flight as rows, against 0 s; time is then
that of a machine of its own: CPU time, and what the engine waits for with nothing to do.
The floor is one pass over each token: what `kept` computes beyond it is padding.

`--replay` samples groups of episodes, admits them as another node does, and compares the CPU time of both, the confined
processes included.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from benchmarks._replay_cost import ReplayCost, measure_replay_costs
from swarm.config import ModelConfig
from swarm.generation.continuous_batching import MAX_PARKED_BYTES, Decoding
from swarm.generation.sampling import Row
from swarm.interfaces import Observation
from swarm.model.network import load_model
from swarm.types import PolicyVersion, Sampling

VERSION: Final = PolicyVersion(policy_id="benchmark", step=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Lengths in tokens, and how many of each."""

    rows: int = 32
    prompt: int = 100
    turns: int = 5
    action: int = 20
    observation: int = 40

    @property
    def num_action_tokens(self) -> int:
        """Of one episode."""
        return self.turns * self.action

    def row(self, prompt_ids: Sequence[int], index: int, seed: int) -> Row:
        """To be made."""
        sampling = Sampling(max_new_tokens=self.action)
        return Row(prompt_ids=prompt_ids, sampling=sampling, prompt=index, index=index, seed=seed)


@dataclass(slots=True)
class Cost:
    """The cost of a case."""

    cpu_s: float
    waited_s: float  # for environments, with nothing to do; no time passed
    num_computed: int  # tokens that passed through the network, padding included


class Environments:
    """Observations of fixed length after some seconds; an episode is over after its last turn.

    Seconds are CPU time of this process and those that were waited, in which no CPU time passes.
    """

    def __init__(self, shape: Shape, step_s: float) -> None:
        self._shape = shape
        self._step_s = step_s
        self._num_turns: dict[int, int] = {}
        self._due: deque[tuple[float, Callable[[], None]]] = deque()  # in order: every step takes as long
        self.waited_s = 0.0

    def observe(self, rollout: int, action_ids: Sequence[int], is_ended: bool) -> "Future[Observation | None]":
        """As `interfaces.Observe`."""
        turn = self._num_turns[rollout] = self._num_turns.get(rollout, 0) + 1
        ids = [2 + (rollout + turn + k) % 40 for k in range(self._shape.observation)]
        future: Future[Observation | None] = Future()
        answer: Callable[[], None] = lambda: future.set_result(Observation(ids) if turn < self._shape.turns else None)  # noqa: E731
        if self._step_s:
            self._due.append((self._now_s + self._step_s, answer))
        else:
            answer()
        return future

    def answer_due(self) -> None:
        """Gives the answers whose time has come."""
        while self._due and self._due[0][0] <= self._now_s:
            self._due.popleft()[1]()

    def wait(self) -> None:
        """Lets time pass until the next answer."""
        self.waited_s += max(0.0, self._due[0][0] - self._now_s)
        self.answer_due()

    @property
    def _now_s(self) -> float:
        return time.process_time() + self.waited_s


def play(
    network: nn.Module, shape: Shape, episodes: int, *, max_parked_bytes: int = MAX_PARKED_BYTES, step_s: float = 0.0
) -> Cost:
    """Whole episodes in one call."""
    prompts = [[2 + (i + k) % 40 for k in range(shape.prompt)] for i in range(episodes)]
    rows = [shape.row(prompt, i, seed=i) for i, prompt in enumerate(prompts)]
    return _timed(network, rows, shape, Environments(shape, step_s), max_parked_bytes)


def play_prompts(network: nn.Module, shape: Shape, episodes: int) -> Cost:
    """Each turn a call of its own over the whole conversation."""
    conversations = [[2 + (i + k) % 40 for k in range(shape.prompt)] for i in range(episodes)]
    total = Cost(0.0, 0.0, 0)
    environments = Environments(shape, 0.0)
    for turn in range(shape.turns):
        rows = [shape.row(ids, i, seed=turn * episodes + i) for i, ids in enumerate(conversations)]
        cost = _timed(network, rows, shape, None, 0)
        total = Cost(total.cpu_s + cost.cpu_s, 0.0, total.num_computed + cost.num_computed)
        for i, row in enumerate(rows):
            observed = environments.observe(i, row.tokens, False).result()
            conversations[i] = [*conversations[i], *row.tokens, *(observed.token_ids if observed else ())]
    return total


def _timed(
    network: nn.Module,
    rows: Sequence[Row],
    shape: Shape,
    environments: Environments | None,
    max_parked_bytes: int,
) -> Cost:
    computed: list[int] = []

    def note(_module: nn.Module, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        computed.append(kwargs["input_ids"].numel())

    handle = network.register_forward_pre_hook(note, with_kwargs=True)
    decoding = Decoding(
        network,
        rows,
        max_rows=shape.rows,
        eos_ids=(),
        observe=None if environments is None else environments.observe,
        max_parked_bytes=max_parked_bytes,
    )
    began_s = time.process_time()
    while decoding.goes_on:
        if environments is not None:
            environments.answer_due()
            if decoding.is_stalled:
                environments.wait()
        decoding.step(VERSION)
    waited_s = 0.0 if environments is None else environments.waited_s
    cost = Cost(time.process_time() - began_s, waited_s, sum(computed))
    handle.remove()
    assert all(len(row.tokens) >= shape.action for row in rows)
    return cost


def print_replay_costs(costs: Iterable[ReplayCost]) -> None:
    """A row for each environment."""
    print(
        "| environment | episodes | turns | action tokens | generated, CPU ms | admitted | confined | of generation |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for cost in costs:
        ms = [1000 * each / cost.num_episodes for each in (cost.generation_s, cost.admission_s, cost.confined_s)]
        print(
            f"| {cost.env} | {cost.num_episodes} | {cost.turns:.1f} | {cost.action_tokens:.0f} "
            f"| {ms[0]:.0f} | {ms[1]:.2f} | {ms[2]:.2f} | {cost.share:.2%} |",
            flush=True,
        )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="smollm2", help="smollm2, tiny, or a folder")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds that a step of a slow environment takes")
    parser.add_argument("--replay", action="store_true", help="what replay at admission costs, of a generated episode")
    parser.add_argument("--groups", type=int, default=2, help="with --replay: groups of 8 episodes of each environment")
    parser.add_argument("--tokens", type=int, default=24, help="with --replay: most tokens of an action")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(ModelConfig(source=arguments.source, dtype="float32"))
    if arguments.replay:
        print_replay_costs(measure_replay_costs(model, arguments.groups, arguments.tokens, arguments.repeats))
        return
    network = model.network.eval()
    shape = Shape(rows=arguments.rows, turns=arguments.turns)
    cases: dict[str, tuple[int, Callable[[int], Cost]]] = {
        "kept": (shape.rows, lambda n: play(network, shape, n)),
        "dropped": (shape.rows, lambda n: play(network, shape, n, max_parked_bytes=0)),
        "prompt per turn": (shape.rows, lambda n: play_prompts(network, shape, n)),
    }
    if arguments.step_s:
        cases = {
            "0 s steps": (2 * shape.rows, lambda n: play(network, shape, n)),
            f"{arguments.step_s:g} s steps": (
                2 * shape.rows,
                lambda n: play(network, shape, n, step_s=arguments.step_s),
            ),
        }
    costs: dict[str, list[Cost]] = {name: [] for name in cases}
    for _ in range(arguments.repeats):  # in turn: the machine's speed varies
        for name, (episodes, run) in cases.items():
            costs[name].append(run(episodes))
    first = next(iter(cases))
    print("| case | episodes | action tokens per CPU second | waited, s | per second of both | tokens computed | CPU |")
    print("|---|---|---|---|---|---|---|")
    for name, (episodes, _) in cases.items():
        tokens = episodes * shape.num_action_tokens
        cpu_s = float(np.median([cost.cpu_s for cost in costs[name]]))
        waited_s = float(np.median([cost.waited_s for cost in costs[name]]))
        ratio = float(np.median([a.cpu_s / b.cpu_s for a, b in zip(costs[name], costs[first], strict=True)]))
        cells = (f"{tokens / cpu_s:.1f}", f"{waited_s:.1f}", f"{tokens / (cpu_s + waited_s):.1f}")
        print(f"| {name} | {episodes} | {' | '.join(cells)} | {costs[name][0].num_computed:,} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
