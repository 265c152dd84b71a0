"""Two processes that share a step over gloo do what one process does: losses, norms, weights, checkpoints.

The file is also the program of each process; it makes the steps of every case and leaves what they gave.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.config import LearnerConfig, ReplayConfig
from swarm.learn.learner import PolicyLearner
from swarm.learn.ranks import OneProcess, Ranks
from swarm.model.lora import add_adapters
from swarm.model.network import tiny_network
from swarm.model.published_dtype import widen
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import weights_digest
from swarm.objectives.methods import load_recipe
from swarm.objectives.part import AggregatePart, Scored
from swarm.objectives.recipe import Recipe
from swarm.testing.builders import make_group, make_scored
from swarm.testing.outcomes import make_outcome, make_turns
from swarm.types import Draw, DrawnGroup, ScoredGroup, StepReport

OWN, PEER = "a" * 64, "b" * 64
NUM_STEPS, SAVED_AT = 6, 3
TOKENIZER = CharTokenizer()


class Broken(AggregatePart):
    """A recipe whose loss, or one group's gradient alone, is not finite for a draw of `at` groups."""

    equation = "L = sum(l)"
    inner: AggregatePart
    at: int
    only_gradient: bool

    def __call__(self, losses: torch.Tensor, scored: Scored) -> torch.Tensor:
        loss = self.inner(losses, scored)
        if scored.batch.step_groups != self.at:
            return loss
        if not self.only_gradient:
            return loss * float("inf")
        first = torch.where(scored.batch.group_index[:, None] == 0, losses, 0.0).sum()
        return loss + (first - first.detach()).abs().sqrt()  # 0, with a slope that is not a number


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, a recipe and the way in which they are trained."""

    recipe: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    lora_rank: int = 0
    dtype: torch.dtype = torch.float32
    is_widened: bool = False  # computed in float32, whatever is published
    num_groups: int = 5
    most_turns: int = 1
    broken: bool | None = None  # a step whose loss (False), or whose gradient alone (True), is not finite

    @property
    def is_exact(self) -> bool:
        """Only the order of float32 sums differs."""
        return self.dtype is torch.float32

    @property
    def tolerance(self) -> float:
        """Relative and absolute, ten steps on. A bfloat16 weight has 0.4 %, and sums in another order round it the
        other way here and there."""
        return 1e-5 if self.is_exact else 1e-2


CASES = {
    "token": Case(recipe="grpo", settings={"token_budget": 64}),
    "step": Case(recipe="bapo", settings={"token_budget": 64}),
    "step_in_updates": Case(recipe="m2po_mask", settings={"updates_per_step": 3, "token_budget": 64}),
    "updates_by_turn": Case(recipe="seeupo", settings={"updates_per_step": 2, "token_budget": 64}, most_turns=3),
    "group_with_probes": Case(recipe="poise", settings={"token_budget": 64}),
    "entropy": Case(recipe="magic", settings={"weight_decay": 0.1, "max_grad_norm": 0.1}),
    "reference": Case(recipe="grpo_kl", settings={"updates_per_step": 2}),
    "adapters": Case(recipe="grpo_kl", settings={"token_budget": 64}, lora_rank=3),
    "checkpointed": Case(recipe="grpo", settings={"token_budget": 64, "gradient_checkpointing": True}, lora_rank=3),
    "idle_rank": Case(recipe="grpo", num_groups=1),
    "infinite_loss": Case(recipe="grpo", broken=False),
    "infinite_gradient": Case(recipe="grpo", broken=True),
    "bfloat16": Case(recipe="grpo", settings={"token_budget": 64}, dtype=torch.bfloat16),
    "widened": Case(recipe="grpo", settings={"token_budget": 64}, dtype=torch.bfloat16, is_widened=True),
    "widened_adapters": Case(recipe="grpo_kl", lora_rank=3, dtype=torch.bfloat16, is_widened=True),
}


def recipe(case: Case) -> Recipe:
    found = load_recipe(case.recipe)
    if case.broken is None:
        return found
    return replace(found, aggregate=Broken(inner=found.aggregate, at=case.num_groups - 2, only_gradient=case.broken))


def learner(
    case: Case, dir: Path, ranks: Ranks | None = None, kind: type[PolicyLearner] = PolicyLearner
) -> PolicyLearner:
    network = tiny_network(seed=1).to(case.dtype)
    if case.lora_rank:
        add_adapters(network, case.lora_rank)
    if case.is_widened:
        widen(network, torch.float32)
    settings = LearnerConfig.model_validate({"learning_rate": 1e-3, "warmup_steps": 2, **case.settings})
    return kind(network, TOKENIZER, recipe(case), settings, ReplayConfig(external="all"), OWN, dir, ranks)


def draw(case: Case, step: int) -> Draw:
    """Groups of both lineages, of any lengths; from the fourth step on a broken case has one draw with fewer."""
    rng = np.random.default_rng(step)
    num_groups = case.num_groups - 2 if case.broken is not None and step == 4 else case.num_groups
    groups: list[DrawnGroup] = []
    for index in range(num_groups):
        texts = ["".join(rng.choice(list("abcdefgh"), int(rng.integers(1, 9)))) for _ in range(4)]
        group = make_group(PEER if index % 2 else OWN, task_id=index, tokenizer=TOKENIZER, texts=texts, logprob=-3.5)
        rewards = [1.0, 0.0, 0.0, float(rng.integers(0, 2))]
        # One process scales a clipped group of a peer rollout by rollout, several scale it whole: turns are our own.
        scored = make_scored(group, rewards=rewards, is_made_here=index % 2 == 0 or case.most_turns > 1)
        if case.most_turns > 1:
            scored = with_turns(scored, [int(rng.integers(1, case.most_turns + 1)) for _ in texts])
        groups.append(DrawnGroup(scored=scored, age_steps=index % 3, use=1))
    return Draw(step=step, groups=tuple(groups), num_zero_variance=0, baselines=tuple(rng.random(num_groups)))


def with_turns(scored: ScoredGroup, counts: list[int]) -> ScoredGroup:
    """The group with episodes of so many turns, each with the text of the answer it had."""
    rollouts = tuple(
        make_turns(
            [(one.text, "ab")] * (count - 1) + [(one.text, "")], policy_id=scored.group.producer, tokenizer=TOKENIZER
        )
        for one, count in zip(scored.group.rollouts, counts, strict=True)
    )
    outcomes = tuple(
        make_outcome(float(reward), observations=["ab"] * (count - 1) + [""])
        for reward, count in zip(scored.rewards, counts, strict=True)
    )
    return replace(scored, group=replace(scored.group, rollouts=rollouts), outcomes=outcomes)


def steps(one: PolicyLearner, case: Case, first: int, last: int) -> list[StepReport]:
    return [one.step(draw(case, step)) for step in range(first, last + 1)]


def figures(case: Case, reports: list[StepReport]) -> list[dict[str, Any]]:
    """The figures that must be equal: no seconds, digests or costs, and in bfloat16 no counts of tokens at a bound."""
    costs = {"padding_share", "num_micro_batches"}
    return [
        {
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "step": report.version.step,
            **{name: value for name, value in report.diagnostics.items() if name not in costs and case.is_exact},
        }
        for report in reports
    ]


# --- the program of each process -------------------------------------------------------------------


def main(root: Path) -> None:
    from swarm.learn.data_parallel import ShardedRanks
    from swarm.learn.leader import LeadingLearner, obey_leader

    torch.set_num_threads(1)
    ranks = ShardedRanks.start(str(root / "store"))
    for name, case in CASES.items():
        kind = LeadingLearner if ranks.index == 0 else PolicyLearner
        one = learner(case, root / name, ranks, kind)
        resumed = learner(case, root / "alone" / name, ranks, kind).resume() if name == "token" else None
        if isinstance(one, LeadingLearner):
            found = lead(one, case, root / name)
            if resumed is not None:
                found["resumed"] = figures(case, steps(resumed, case, SAVED_AT + 1, NUM_STEPS))
                resumed.stop()
            (root / f"{name}.json").write_text(json.dumps(found))
        else:
            for each in (one, resumed):
                if each is not None:
                    obey_leader(each, ranks, load_recipe("gspo"))
    ranks.stop()


def lead(one: Any, case: Case, folder: Path) -> dict[str, Any]:
    """Ten steps with a checkpoint in the middle, then one that only measures and one with the safe recipe."""
    reports = steps(one, case, 1, SAVED_AT)
    one.save()
    reports += steps(one, case, SAVED_AT + 1, NUM_STEPS)
    save_file(one.snapshot()[1], folder / "published.safetensors")
    published = one.version.digest.hex()
    frozen = one.step(draw(case, NUM_STEPS + 1), is_frozen=True)
    safe = one.step(draw(case, NUM_STEPS + 1), load_recipe("gspo"), ratio_band=4.0)
    one.stop()
    return {"reports": figures(case, reports), "digest": published, "guarded": figures(case, [frozen, safe])}


# --- claims ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of two processes: for each case the reports, the published weights and a checkpoint."""
    root = tmp_path_factory.mktemp("together")
    alone = learner(CASES["token"], root / "alone" / "token")
    steps(alone, CASES["token"], 1, SAVED_AT)
    alone.save()
    ranks = [start_rank(rank, root) for rank in range(2)]
    try:
        codes = [process.wait() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    said = [(root / f"rank{rank}.txt").read_text()[-2000:] for rank in range(2)]
    assert codes == [0, 0], f"exit codes {codes}; the ends of what they printed: {said}"
    yield root


def start_rank(rank: int, root: Path) -> "subprocess.Popen[bytes]":
    """One of two processes that meet through a file, as those of a node do."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    with (root / f"rank{rank}.txt").open("wb") as printed:
        command = [sys.executable, "-X", "faulthandler", __file__, str(root)]
        return subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT)


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for step, (one, two) in enumerate(zip(ours, theirs, strict=True), start=1):
        assert one == pytest.approx(two, rel=tolerance, abs=tolerance, nan_ok=True), f"step {step}"


@pytest.mark.parametrize("name", CASES)
def test_two_processes_have_the_loss_curve_of_one(together: Path, tmp_path: Path, name: str) -> None:
    case, found = CASES[name], json.loads((together / f"{name}.json").read_text())
    one = learner(case, tmp_path)
    assert_same(figures(case, steps(one, case, 1, NUM_STEPS)), found["reports"], case.tolerance)
    published = load_file(together / name / "published.safetensors")
    assert {key: (t.dtype, t.shape) for key, t in published.items()} == {
        key: (t.dtype, t.shape) for key, t in one.snapshot()[1].items()
    }
    for key, tensor in one.snapshot()[1].items():
        np.testing.assert_allclose(published[key].float(), tensor.float(), rtol=0, atol=case.tolerance, err_msg=key)
    assert found["digest"] == weights_digest(published).hex(), "the digest is that of what was published"
    frozen = one.step(draw(case, NUM_STEPS + 1), is_frozen=True)
    safe = one.step(draw(case, NUM_STEPS + 1), load_recipe("gspo"), ratio_band=4.0)
    assert_same(figures(case, [frozen, safe]), found["guarded"], case.tolerance)


@pytest.mark.parametrize("name", ["infinite_loss", "infinite_gradient"])
def test_a_step_that_is_not_finite_is_skipped_by_all(together: Path, name: str) -> None:
    reports = json.loads((together / f"{name}.json").read_text())["reports"]
    assert [report["step"] for report in reports] == [1, 2, 3, 3, 4, 5]


@pytest.mark.parametrize("name", ["token", "step_in_updates", "adapters", "bfloat16"])
def test_a_checkpoint_of_two_processes_is_gone_on_with_by_one(together: Path, name: str) -> None:
    case, found = CASES[name], json.loads((together / f"{name}.json").read_text())
    one = learner(case, together / name).resume()
    assert one.version.step == SAVED_AT and one.next_draw == SAVED_AT + 1
    assert_same(figures(case, steps(one, case, SAVED_AT + 1, NUM_STEPS)), found["reports"][SAVED_AT:], case.tolerance)


def test_a_checkpoint_of_one_process_is_gone_on_with_by_two(together: Path) -> None:
    found = json.loads((together / "token.json").read_text())
    assert_same(found["resumed"], found["reports"][SAVED_AT:], CASES["token"].tolerance)


def test_turns_of_one_process_are_all_of_its_own() -> None:
    assert OneProcess().assign(3) == [(0, True), (1, True), (2, True)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
