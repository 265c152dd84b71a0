"""Part of one hostile group among eight in AdamW's update, with and without the clip of its mass.

Invariant: the runs of a pair differ in the rewards of the eighth group only: all equal (it moves nothing) or its own.

One tiny node; every step learns from seven own groups and one of a stranger, without the guard. The part is
|W - W'| / |W - W0| of the weights W with and W' without what the eighth group says; an honest one is the yardstick.
Beside it: held-out greedy accuracy of both at the end, and how much less likely than own ones the stranger's tokens
were in the first step, by which the guard would set it aside.

    python -m benchmarks.hostile_mass            # about 10 minutes on one core
"""

import argparse
import asyncio
import math
import tempfile
import unittest.mock
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch

from benchmarks._sharing_start import warm_weights
from benchmarks._trained_policy import GROUP_SIZE, MAX_NEW_TOKENS, char_policy, draw_of
from swarm.config import LearnerConfig, ReplayConfig
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives import mass_clip
from swarm.objectives.methods import load_recipe
from swarm.types import Correction, Rollout, ScoredGroup, TokenTrace, VersionSpan

NUM_OWN: Final = 7
OWN, STRANGER = "a" * 64, "b" * 64
HORIZONS: Final = (1, 8, 32)  # steps after which the part is measured
ATTACKS: Final = ("honest", "rare tokens", "trained end")
NUM_PROBLEMS: Final = 20  # held out, of each task


def rollout_of(like: Rollout, token_ids: Sequence[int]) -> Rollout:
    """A rollout of these tokens without log-probs."""
    assert like.trace is not None
    count = len(token_ids)
    trace = TokenTrace(
        token_ids=np.array(token_ids, np.int32),
        action_mask=np.ones(count, bool),
        logprobs=None,
        turn_ids=np.zeros(count, np.int16),
        spans=(VersionSpan(start=0, version=like.trace.spans[0].version),),
    )
    return replace(like, actions=("",), trace=trace)


def strangers(attack: str, honest: ScoredGroup, reference: str, rng: np.random.Generator) -> ScoredGroup:
    """The eighth group: the honest one, or one with the same task whose first half is rewarded."""
    tokenizer = CharTokenizer()
    group, rewards = honest.group, honest.rewards
    if attack != "honest":
        right = tokenizer.encode_response(reference)
        wrong = [list(rng.integers(3, tokenizer.vocab_size, MAX_NEW_TOKENS)) for _ in range(GROUP_SIZE // 2)]
        rewarded = [right[-1:] + right if attack == "trained end" else right] * (GROUP_SIZE // 2)
        tokens = [*rewarded, *wrong]
        rollouts = tuple(rollout_of(like, each) for like, each in zip(group.rollouts, tokens, strict=True))
        group, rewards = replace(group, rollouts=rollouts), np.array([1.0, 0.0], np.float32).repeat(GROUP_SIZE // 2)
    group = replace(group, producer=STRANGER, policy_id=STRANGER)
    return replace(honest, group=group, rewards=rewards, correction=Correction.NO_LOGPROBS, is_made_here=False)


class Run:
    """One course of steps from a warm start; `is_silent` takes away what the eighth group says."""

    def __init__(self, attack: str, is_silent: bool, replay: ReplayConfig, seed: int, folder: Path) -> None:
        self._attack, self._is_silent = attack, is_silent
        recipe, learner = load_recipe("sapo_swarm"), LearnerConfig(learning_rate=1e-4)
        self.policy = char_policy(OWN, warm_weights(seed % 3), recipe, learner, replay, folder, seed=seed)
        self._rng = np.random.default_rng(seed)

    async def step(self, number: int) -> torch.Tensor:
        """The weights after one more step, as one vector."""
        made = await self.policy.make(4 * (NUM_OWN + 1), str(number))
        own = [group for group in made if group.has_signal][: NUM_OWN + 1]
        last = own.pop()
        reference = self.policy.environments[last.group.env].reference(last.group.task_id)
        hostile = strangers(self._attack, last, reference, self._rng)
        if self._is_silent:
            hostile = replace(hostile, rewards=np.full_like(hostile.rewards, 0.5))
        self.policy.learner.step(draw_of(number, [*own, hostile]))
        self.policy.follow()
        return self.weights()

    def weights(self) -> torch.Tensor:
        """All published tensors as one vector."""
        return torch.cat([tensor.flatten().float() for tensor in self.policy.learner.snapshot()[1].values()])

    @property
    def excess_nll(self) -> float:
        """Nats per token by which the stranger's tokens were less likely than own ones in the newest step."""
        nll = {each.is_made_here: each.nll for each in self.policy.learner.likelihood_stats}
        return nll.get(False, nll[True]) - nll[True]

    def accuracy(self) -> float:
        """Held-out greedy accuracy over all tasks."""
        return float(np.mean(list(self.policy.accuracies(NUM_PROBLEMS).values())))


async def course(attack: str, replay: ReplayConfig, seed: int) -> list[float]:
    """Part of the stranger at each horizon, accuracies with and without it, excess of the first step."""
    with tempfile.TemporaryDirectory() as folder:
        pair = [Run(attack, is_silent, replay, seed, Path(folder) / str(is_silent)) for is_silent in (False, True)]
        start, found, excess = pair[0].weights(), list[float](), 0.0
        for number in range(1, max(HORIZONS) + 1):
            heard, silent = [await run.step(number) for run in pair]
            excess = excess if number > 1 else pair[0].excess_nll
            if number in HORIZONS:
                found.append(float((heard - silent).norm() / (heard - start).norm()))
        return [*found, *(run.accuracy() for run in pair), excess]


def main() -> None:
    """Prints one line for each attack, filter and clip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"attack, replay.external, factor: part after {HORIZONS} steps; accuracy with, without; excess [nats/token]")
    externals: tuple[Literal["all", "positive"], ...] = ("positive", "all")
    for attack in ATTACKS:
        for external in externals:
            replay = ReplayConfig(local_groups=NUM_OWN, external_groups=1, external=external)
            for factor in (math.inf, mass_clip.MASS_FACTOR, 1.0):
                with unittest.mock.patch.object(mass_clip, "MASS_FACTOR", factor):
                    found = np.array([asyncio.run(course(attack, replay, seed)) for seed in range(args.seeds)])
                means = " ".join(f"{mean:.2f}" for mean in found.mean(axis=0))
                print(f"{attack:12} {external:8} {factor:4}: {means}", flush=True)


if __name__ == "__main__":
    main()
