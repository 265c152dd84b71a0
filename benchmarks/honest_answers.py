"""Honest answers at another node's admission: how many are refused, and why. Resumable.

    python -m benchmarks.honest_answers --model smollm2 --answers 10000 --file runs/honest_smollm2.jsonl

Nodes sample at temperature 1, score, sign and send; one more node, which answers the same questions, admits. An answer
ends by itself or is cut off at `--tokens`. Each group is also judged as that of a run that allows 1, 2, 3 ... tokens,
where sampling would have stopped earlier: that cuts answers at every place, also inside a character. Each line of the
file is a batch; started again with the same file it goes on after those that are there.
"""

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch

from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, GeneratorConfig, ModelConfig, NodeConfig
from swarm.environments.load import build_environments
from swarm.exchange.agent import Agent
from swarm.exchange.checks.admission_checks import check_form
from swarm.exchange.checks.admission_limits import AdmissionLimits
from swarm.generation.produce import produce
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.network import LoadedModel, load_model
from swarm.simulate.presets import PRESETS
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import TOY_RUN_ID, InlineVerifier, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import FinishReason, PolicyVersion, Refused, Rollout, RolloutGroup, Sampling, SealedGroup

GROUP_SIZE: Final = 8
NUM_TASKS: Final = 64  # of each environment: nodes meet at the same questions
PRODUCERS: Final = 3
LOST: Final = "\ufffd"  # what bytes that are no character decode to

_QUESTIONS: Final = (
    "Write three emojis.",
    "Translate to Chinese: good morning",
    "Translate to Russian: thank you very much",
    "Translate to Hindi: water",
    "Write a line of Python that prints the square of x.",
    "Which marker ends a message? Write <|im_end|> and <|im_start|>.",
    "Draw a small table with dashes and bars.",
    "Write a word with accents in French.",
)


@dataclass(slots=True)
class Counts:
    """Answers of honest nodes, by how they ended and what became of them."""

    answers: int = 0
    ended: int = 0
    cut_off: int = 0
    inside_a_character: int = 0  # of those that were cut off
    refused: Counter[str] = field(default_factory=Counter[str])  # answers, by reason of their group
    prefixes: int = 0  # answers of runs that allow fewer tokens
    prefixes_inside: int = 0
    prefixes_refused: Counter[str] = field(default_factory=Counter[str])
    not_usual: int = 0  # answers whose tokens are not the usual cut of their text
    longer_usual: int = 0  # answers whose usual cut has more tokens
    most_longer: int = 0  # by so many at most


def environments_of(model: str, folder: Path) -> tuple[EnvironmentConfig, ...]:
    """The preset's environments; for SmolLM2 also questions that are answered in other scripts and in prose."""
    if model == "tiny":
        return PRESETS["tiny"].environments
    lines = [json.dumps({"question": question, "answer": "x"}) for question in _QUESTIONS]
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    prose = {"kind": "jsonl", "dataset": str(path)}
    return (
        *PRESETS["smollm"].environments,
        EnvironmentConfig(
            name="letters", kind="reasoning_gym", dataset="letter_counting", seed=1, prefill="The number is"
        ),
        EnvironmentConfig.model_validate({"name": "scripts", **prose}),
        EnvironmentConfig.model_validate({"name": "emojis", **prose, "prefill": "\U0001f600\U0001f680"}),
        EnvironmentConfig.model_validate({"name": "chinese", **prose, "prefill": "\u4f60\u597d\uff0c"}),
    )


class World:
    """Producers and one node that admits, with one model."""

    def __init__(self, model: LoadedModel, environments: Sequence[EnvironmentConfig], num_tokens: int):
        self.tokenizer = model.tokenizer
        self.environments = build_environments(environments)
        self.sampling = Sampling(max_new_tokens=num_tokens)
        generator_config = GeneratorConfig(group_size=GROUP_SIZE, max_new_tokens=num_tokens)
        self.config = NodeConfig(generator=generator_config, environments=tuple(environments))
        self.clock = ManualClock()
        self.stores = [MemoryGroupStore(self.clock, 10**9) for _ in range(PRODUCERS + 1)]
        self.agents = [self._agent(number) for number in range(PRODUCERS + 1)]  # the last one admits
        version = PolicyVersion(policy_id=make_identity(0).node_id, step=0)
        self.generator = TransformersGenerator(model.network, model.tokenizer, version, seed=0, max_rows=256)
        self.counts = Counts()

    def _agent(self, number: int) -> Agent:
        return make_agent(
            make_context(self.config, make_identity(number), clock=self.clock),
            self.stores[number],
            tokenizer=self.tokenizer,
            verifier=InlineVerifier(self.environments),
            environments=frozenset(self.environments),
        )

    async def play(self, numbers: Sequence[int]) -> Counts:
        """Each number of the sequence is a question that every producer answers; the node that admits, one of four."""
        self.counts = Counts()
        names = sorted(self.environments)
        chosen = [(self.environments[names[number % len(names)]], number // len(names)) for number in numbers]
        tasks = [environment.task(turn % min(NUM_TASKS, environment.num_tasks)) for environment, turn in chosen]
        tasks = [task for task in tasks if not task.is_held_out]
        for number, agent in enumerate(self.agents):
            is_judge = number == PRODUCERS
            asked = tasks[::4] if is_judge else tasks
            made = produce(
                self.generator,
                self.tokenizer,
                asked,
                GROUP_SIZE,
                self.sampling,
                run_id=TOY_RUN_ID,
                producer=agent.node_id,
                clock=self.clock,
                numbers=[1_000_003 * number + numbers[0] + index for index in range(len(asked))],
            )
            for group in made:
                own = as_own_lineage(group, agent.node_id)
                await agent.local.put(own)
                if not is_judge:
                    self.clock.advance(1.0)
                    await self._judge(own, await self._newest(number))
        return self.counts

    async def _newest(self, number: int) -> SealedGroup:
        store = self.stores[number]
        head = await store.head()
        ((_, sealed),) = await store.since(replace(head, sequence=head.sequence - 1), 1, own_only=True)
        return sealed

    async def _judge(self, group: RolloutGroup, sealed: SealedGroup) -> None:
        result = await self.agents[-1].admission.admit(sealed, sealed.producer)
        if isinstance(result, Refused):
            print(f"refused: {result.reason}: {result.detail}: {[each.text for each in group.rollouts]!r}", flush=True)
            self.counts.refused[str(result.reason)] += len(group.rollouts)
        for rollout in group.rollouts:
            self._count(rollout)
        for most in range(1, self.sampling.max_new_tokens):
            self._judge_shorter(group, most)

    def _count(self, rollout: Rollout) -> None:
        assert rollout.trace is not None
        ids, counts = rollout.trace.token_ids.tolist(), self.counts
        counts.answers += 1
        is_ended = rollout.finish is FinishReason.STOP
        counts.ended += is_ended
        counts.cut_off += not is_ended
        counts.inside_a_character += not is_ended and rollout.text.endswith(LOST)
        usual = self.tokenizer.encode_response(rollout.text)
        usual = usual if is_ended else usual[:-1]
        counts.not_usual += usual != ids
        counts.longer_usual += len(usual) > len(ids)
        counts.most_longer = max(counts.most_longer, len(usual) - len(ids))

    def _judge_shorter(self, group: RolloutGroup, most: int) -> None:
        """The group of a run that allows fewer tokens: the form is all that depends on it."""
        shorter = replace(group, rollouts=tuple(self._cut(rollout, most) for rollout in group.rollouts))
        limits = replace(AdmissionLimits.from_config(self.config), max_new_tokens=most)
        finding = check_form(shorter, self.tokenizer, limits)
        cut = [each for each in shorter.rollouts if each.finish is FinishReason.LENGTH]
        self.counts.prefixes += len(cut)
        self.counts.prefixes_inside += sum(each.text.endswith(LOST) for each in cut)
        if finding is not None:
            print(f"refused at {most} tokens: {finding}: {[each.text for each in shorter.rollouts]!r}", flush=True)
            self.counts.prefixes_refused[str(finding[0])] += len(cut)

    def _cut(self, rollout: Rollout, most: int) -> Rollout:
        trace, sampling = rollout.trace, replace(rollout.sampling, max_new_tokens=most)
        assert trace is not None and trace.logprobs is not None
        if trace.token_ids.size <= most:
            is_ended = rollout.finish is FinishReason.STOP
            return replace(rollout, sampling=sampling, finish=FinishReason.STOP if is_ended else FinishReason.LENGTH)
        ids = trace.token_ids[:most]
        cut = replace(
            trace,
            token_ids=ids,
            action_mask=trace.action_mask[:most],
            logprobs=trace.logprobs[:most],
            turn_ids=trace.turn_ids[:most],
        )
        text = self.tokenizer.decode(ids.tolist())
        return replace(rollout, actions=(text,), trace=cut, sampling=sampling, finish=FinishReason.LENGTH)


def as_own_lineage(group: RolloutGroup, node_id: str) -> RolloutGroup:
    """The group as its producer's own policy made it: one network stands for all."""
    version = PolicyVersion(policy_id=node_id, step=0)
    rollouts: list[Rollout] = []
    for rollout in group.rollouts:
        assert rollout.trace is not None
        spans = tuple(replace(span, version=version) for span in rollout.trace.spans)
        rollouts.append(replace(rollout, trace=replace(rollout.trace, spans=spans)))
    return replace(group, policy_id=node_id, rollouts=tuple(rollouts))


def total(lines: Sequence[dict[str, Any]]) -> Counts:
    """Sum of the lines."""
    found = Counts()
    for line in lines:
        for key in Counts.__slots__:
            value = getattr(found, key)
            if isinstance(value, Counter):
                value.update(line[key])
            else:
                setattr(found, key, max(value, line[key]) if key == "most_longer" else value + line[key])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing; exits with 1 where an honest answer was refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=0, help="at most, of an answer; 0: 5 of tiny, 16 of smollm2")
    parser.add_argument("--questions", type=int, default=8, help="of a batch")
    parser.add_argument("--file", type=Path, required=True, help="one line for each batch")
    options = parser.parse_args(arguments)
    num_tokens = options.tokens or {"tiny": 5, "smollm2": 16}[options.model]
    torch.set_num_threads(1)
    model = load_model(ModelConfig(source=options.model, dtype="float32" if options.model == "tiny" else "bfloat16"))
    options.file.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    if options.file.exists():
        lines = [json.loads(line) for line in options.file.read_text(encoding="utf-8").splitlines()]
    first = max((line["first"] + line["count"] for line in lines), default=0)
    with tempfile.TemporaryDirectory() as folder, options.file.open("a", encoding="utf-8") as file:
        world = World(model, environments_of(options.model, Path(folder)), num_tokens)
        while total(lines).answers < options.answers:
            counts = asyncio.run(world.play(range(first, first + options.questions)))
            lines.append(
                {
                    "first": first,
                    "count": options.questions,
                    "tokens": num_tokens,
                    **{name: getattr(counts, name) for name in Counts.__slots__},
                }
            )
            first += options.questions
            file.write(json.dumps(lines[-1]) + "\n")
            file.flush()
            print(total(lines), flush=True)
    found = total(lines)
    raise SystemExit(1 if found.refused or found.prefixes_refused else 0)


if __name__ == "__main__":
    main()
