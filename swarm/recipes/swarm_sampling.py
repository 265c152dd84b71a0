"""Swarm sampling (SAPO), as published: foreign rollouts are encoded as if generated here.

Invariant: needs no log-probs of the generator. The "old" log-probs are the learner's own snapshot, so
the ratio is 1 at the only update a batch gets, and the mismatch to the generator stays uncorrected by
design; it is measured (diagnostics) and bounded by age and effective sample size instead.
"""

from torch import Tensor

from swarm.learn.batch import Batch
from swarm.learn.objective import Params, Recipe, Scope
from swarm.parts import advantage, aggregate, ratio, weight


def _advantage(batch: Batch, params: Params) -> Tensor:
    return advantage.group_z_score(batch.rewards, batch.group_index, params["std_floor"])


def _ratio(logprobs: Tensor, batch: Batch, params: Params) -> Tensor:
    return ratio.own_log_ratio(logprobs, batch.mask)


def _weight(logprobs: Tensor, log_ratio: Tensor, batch: Batch, params: Params) -> tuple[Tensor, Tensor]:
    return weight.ppo_clip(log_ratio, batch.advantages, 1 - params["clip_low"], 1 + params["clip_high"])


def _aggregate(losses: Tensor, batch: Batch, params: Params) -> Tensor:
    return aggregate.token_mean(losses, batch.step_tokens)


RECIPE = Recipe(
    name="swarm_sampling",
    title="Sharing is Caring: Efficient LM Post-Training with Collective RL Experience Sharing",
    acronym="SAPO",
    arxiv="2509.08721",
    row="S109",
    verification="secondary",
    advantage=_advantage,
    ratio=_ratio,
    weight=_weight,
    aggregate=_aggregate,
    scope=Scope.TOKEN,
    params={"clip_low": 0.2, "clip_high": 0.28, "std_floor": 1e-8},
)
