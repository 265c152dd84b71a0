"""GRPO: group-relative advantages in a clipped surrogate, mean over rollouts.

Invariant: with fresh, exact data every ratio is 1 and the gradient is that of REINFORCE with A.

Framework notes: verl adds 1e-6 to the standard deviation and TRL 1e-4; both use the unbiased one. The
original has a KL term to a reference policy, which both frameworks leave off by default, and so do we.
"""

from torch import Tensor

from swarm.learn.batch import Batch
from swarm.learn.objective import BEHAVIOR_LOGPROBS, Params, Recipe, Scope
from swarm.parts import advantage, aggregate, ratio, weight


def _advantage(batch: Batch, params: Params) -> Tensor:
    return advantage.group_z_score(batch.rewards, batch.group_index, params["std_floor"])


def _ratio(logprobs: Tensor, batch: Batch, params: Params) -> Tensor:
    return ratio.token_log_ratio(logprobs, batch.behavior_logprobs, batch.mask)


def _weight(logprobs: Tensor, log_ratio: Tensor, batch: Batch, params: Params) -> tuple[Tensor, Tensor]:
    low, high = 1 - params["clip_low"], 1 + params["clip_high"]
    return weight.ppo_clip(log_ratio, batch.advantages, low, high, params["dual_clip"])


def _aggregate(losses: Tensor, batch: Batch, params: Params) -> Tensor:
    return aggregate.rollout_mean(losses, batch.mask, batch.step_rollouts)


RECIPE = Recipe(
    name="grpo",
    title="DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    acronym="GRPO",
    arxiv="2402.03300",
    row="",
    verification="code",
    advantage=_advantage,
    ratio=_ratio,
    weight=_weight,
    aggregate=_aggregate,
    scope=Scope.ROLLOUT,
    needs=frozenset({BEHAVIOR_LOGPROBS}),
    # Half-widths; dual_clip 0 is off (TRL), verl's vanilla loss uses 3.
    params={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "std_floor": 1e-6},
)
