"""MinPRO: a token's ratio times the smallest ratio of its prefix, as a capped constant weight.

Invariant: no token loses its gradient to the clip; only its weight is bounded.

The paper's clip constants are not known to us. Ours: no lower bound, cap 2.
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
    log_weight = log_ratio.detach() + ratio.prefix_minimum(log_ratio, batch.mask)
    low, high = 1 - params["clip_low"], 1 + params["clip_high"]
    return weight.detached_clip(logprobs, log_weight, batch.advantages, low, high)


def _aggregate(losses: Tensor, batch: Batch, params: Params) -> Tensor:
    return aggregate.token_mean(losses, batch.step_tokens)


RECIPE = Recipe(
    name="min_prefix_ratio",
    title="A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization",
    acronym="MinPRO",
    arxiv="2601.22718",
    row="S182",
    verification="secondary",
    advantage=_advantage,
    ratio=_ratio,
    weight=_weight,
    aggregate=_aggregate,
    scope=Scope.ROLLOUT,
    needs=frozenset({BEHAVIOR_LOGPROBS}),
    params={"clip_low": 1.0, "clip_high": 1.0, "std_floor": 1e-6},
)
