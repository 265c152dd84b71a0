"""BAPO: clip bounds raised each step until positive tokens contribute a target share.

Invariant: the bounds belong to the whole step, so the step is scored before the first backward pass.

Released code and paper differ in order, measure and numbers: `RECIPE` is the code, `PAPER` the paper.
`form` alone switches the algorithm; `target` is then a ratio of sums (code) or a share (paper).
"""

from dataclasses import replace

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.learn.batch import Batch
from swarm.learn.objective import BEHAVIOR_LOGPROBS, Params, Recipe, Scope
from swarm.parts import advantage, aggregate, ratio, weight

_SEARCH = ("target", "low_start", "low_max", "low_step", "high_start", "high_max", "high_step")


def _advantage(batch: Batch, params: Params) -> Tensor:
    return advantage.group_z_score(batch.rewards, batch.group_index, params["std_floor"])


def _ratio(logprobs: Tensor, batch: Batch, params: Params) -> Tensor:
    return ratio.token_log_ratio(logprobs, batch.behavior_logprobs, batch.mask)


def _weight(logprobs: Tensor, log_ratio: Tensor, batch: Batch, params: Params) -> tuple[Tensor, Tensor]:
    if params["form"] not in ("code", "paper"):
        raise ConfigError(f"learner.recipe_params.form: {params['form']!r} is neither 'code' nor 'paper'")
    if min(params["low_step"], params["high_step"]) <= 0:
        raise ConfigError("learner.recipe_params: low_step and high_step must be positive")
    search = weight.BoundSearch(form=params["form"], **{name: params[name] for name in _SEARCH})
    probabilities = torch.exp(batch.behavior_logprobs).to(log_ratio.dtype)
    low, high = weight.balanced_bounds(
        torch.exp(log_ratio.detach()), batch.advantages, probabilities, batch.mask, search
    )
    return weight.ppo_clip(log_ratio, batch.advantages, low, high, params["dual_clip"])


def _aggregate(losses: Tensor, batch: Batch, params: Params) -> Tensor:
    return aggregate.token_mean(losses, batch.step_tokens)


RECIPE = Recipe(
    name="balanced_clip",
    title="BAPO: Stabilizing Off-Policy Reinforcement Learning for LLMs via "
    "Balanced Policy Optimization with Adaptive Clipping",
    acronym="BAPO",
    arxiv="2510.18927",
    row="S075",
    verification="code",
    advantage=_advantage,
    ratio=_ratio,
    weight=_weight,
    aggregate=_aggregate,
    scope=Scope.STEP,
    needs=frozenset({BEHAVIOR_LOGPROBS}),
    params={
        "form": "code",
        "target": 1.0,
        "low_start": 0.6,
        "low_max": 0.8,
        "low_step": 0.05,
        "high_start": 1.2,
        "high_max": 2.0,
        "high_step": 0.05,
        "dual_clip": 3.0,
        "std_floor": 1e-6,
    },
)

PAPER = replace(
    RECIPE,
    name="balanced_clip_paper",
    verification="paper",
    params={
        "form": "paper",
        "target": 0.4,
        "low_start": 0.6,
        "low_max": 0.9,
        "low_step": 0.02,
        "high_start": 1.2,
        "high_max": 3.0,
        "high_step": 0.05,
        "dual_clip": 0.0,
        "std_floor": 1e-6,
    },
)
