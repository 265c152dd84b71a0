"""Losses of Tinker as recipes: a named loss becomes parts of a recipe here, and the data of a request becomes batches.

Invariant: the loss is the sum over all tokens that were sent, with advantages (or weights) as sent, at temperature 1.
Two bounds are added here: a log-ratio counts as far as +-20, that of a whole sequence (gspo) up to 10.

Source: Tinker's documentation of its losses (tinker-docs.thinkingmachines.ai/tinker/losses), which has each formula.
Shape letters: N data, L longest of them in targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.extras.tinker.tinker_wire import TrainingDatum
from swarm.learn.supervised import GivenAdvantages
from swarm.objectives.batch import Batch, weighted_rows
from swarm.objectives.methods.gspo import SequenceTokenRatio
from swarm.objectives.part import AggregatePart, NotNegative, Scored, TokenLosses, WeightPart
from swarm.objectives.part import unbounded as unbounded_losses
from swarm.objectives.parts import Clip, DetachedClip, Likelihood, NoRatio, Surrogate, TokenRatio
from swarm.objectives.recipe import Recipe
from swarm.serving.openai_requests import RequestRefused

MAX_PADDED: Final = 2**22  # elements of a part's tensors; a datum that is longer is alone
GSPO_LOW, GSPO_HIGH = 1 - 3e-4, 1 + 4e-4  # of the paper, section 5.1
UNKNOWN: Final[Mapping[str, str]] = {
    "stable_reinforce": "its formula is not public; use importance_sampling, ppo, cispo, dro or gspo",
    "custom": "losses are not run here; leave custom_loss_server_side off, and the SDK computes them itself",
}


class TokenSum(AggregatePart):
    """Sum over all tokens; the divisor of a mean, if there is one, is in the advantages already."""

    equation = "L = sum_i sum_t L_t"

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return losses.sum()


class QuadraticPenalty(WeightPart):
    """Negative log-likelihood times the advantage, plus beta/2 times the squared log-ratio.

    Source: DRO, arXiv:2405.19107, as Tinker writes it for tokens.
    """

    equation = "L_t = -A log pi_t + beta/2 (log r_t)^2"
    beta: NotNegative = 0.05

    def __call__(self, scored: Scored) -> TokenLosses:
        return unbounded_losses(-scored.advantages * scored.logprobs + 0.5 * self.beta * scored.log_ratio**2)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loss:
    inputs: tuple[str, ...]  # tensors that each datum has beside target_tokens
    constants: Mapping[str, float]  # what loss_fn_config may set, with what it is otherwise
    parts: Any  # constants -> ratio and weight
    sees: str = ""  # the tensor that says which tokens the ratio is of; empty: all


_CLIP: Final[Mapping[str, float]] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_RL: Final = ("logprobs", "advantages")
LOSSES: Final[Mapping[str, _Loss]] = {
    "cross_entropy": _Loss(inputs=("weights",), constants={}, parts=lambda: (NoRatio(), Likelihood())),
    "importance_sampling": _Loss(inputs=_RL, constants={}, parts=lambda: (TokenRatio(), Surrogate())),
    "ppo": _Loss(inputs=_RL, constants=_CLIP, parts=lambda low, high: (TokenRatio(), Clip(low=1 - low, high=high - 1))),
    "cispo": _Loss(
        inputs=_RL, constants=_CLIP, parts=lambda low, high: (TokenRatio(), DetachedClip(low=1 - low, high=high - 1))
    ),
    "dro": _Loss(inputs=_RL, constants={"beta": 0.05}, parts=lambda beta: (TokenRatio(), QuadraticPenalty(beta=beta))),
    "gspo": _Loss(
        inputs=(*_RL, "sequence_ratio_mask"),
        constants={"clip_low_threshold": GSPO_LOW, "clip_high_threshold": GSPO_HIGH},
        parts=lambda low, high: (SequenceTokenRatio(), Clip(low=1 - low, high=high - 1)),
        sees="sequence_ratio_mask",
    ),
}


def recipe_of(loss: str, config: Mapping[str, float]) -> Recipe:
    """The recipe of a loss.

    Args:
        loss: Tinker's name of the loss.
        config: constants as in `loss_fn_config`; the others have Tinker's defaults.

    Raises:
        RequestRefused: an unknown loss, an unknown constant, or a constant out of bounds.
    """
    if loss not in LOSSES:
        raise RequestRefused(f"loss_fn {loss!r}: {UNKNOWN.get(loss, 'there are ' + ', '.join(LOSSES))}")
    known = LOSSES[loss].constants
    if unknown := sorted(config.keys() - known.keys()):
        raise RequestRefused(f"loss_fn_config.{unknown[0]}: {loss} has {', '.join(known) or 'no constants'}")
    values = {**known, **config}
    low, high = values.get("clip_low_threshold", 0.0), values.get("clip_high_threshold", 1.0)
    if not 0 <= low <= 1 <= high:
        raise RequestRefused(
            f"loss_fn_config: clip_low_threshold {low:g} must be in [0, 1] and clip_high_threshold {high:g} at least 1"
        )
    try:
        ratio, weight = LOSSES[loss].parts(*values.values())
    except ConfigError as error:
        raise RequestRefused(f"loss_fn_config.{error}") from None
    return Recipe(
        name=f"tinker {loss}",
        title=loss,
        url="https://tinker-docs.thinkingmachines.ai/tinker/losses",
        verification="paper",
        advantage=GivenAdvantages(),
        ratio=ratio,
        weight=weight,
        aggregate=TokenSum(),
    )


def parts_of_similar_length(data: Sequence[TrainingDatum]) -> list[list[int]]:
    """Splits data, the longest first, into parts of at most MAX_PADDED elements, padding included.

    Returns:
        Indices of the data of each part; a datum that is longer has its own part.
    """
    parts: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(data)), key=lambda row: -data[row].targets.size):
        if not parts or longest * (len(parts[-1]) + 1) > MAX_PADDED:
            parts.append([])
            longest = data[row].targets.size
        parts[-1].append(row)
    return parts


def batch_of(loss: str, data: Sequence[TrainingDatum], part: Sequence[int], device: torch.device) -> Batch:
    """The batch of one part: a rollout for each datum, its targets in order.

    Args:
        loss: Tinker's name of the loss.
        data: all data of the request.
        part: indices of the data in this batch.
        device: device of the tensors.

    Raises:
        RequestRefused: a datum lacks a tensor of this loss, or has one that the loss does not take, another shape, a
            value that is not finite, or an advantage off the mask.
    """
    size = max(data[row].targets.size for row in part)
    shape = (len(part), size)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    advantages, behavior = torch.zeros(shape), torch.zeros(shape)
    for row, place in enumerate(part):
        datum = data[place]
        if unknown := sorted(datum.inputs.keys() - LOSSES[loss].inputs):
            raise RequestRefused(
                f"data.{place}.loss_fn_inputs.{unknown[0]}: {loss} takes target_tokens, "
                f"{', '.join(LOSSES[loss].inputs)}; constants go into loss_fn_config, for all tokens alike"
            )
        sent = {name: _tensor(loss, name, datum, place) for name in LOSSES[loss].inputs}
        count = datum.targets.size
        is_seen = torch.ones(count, dtype=torch.bool)
        advantage = sent["weights" if "weights" in sent else "advantages"]
        if LOSSES[loss].sees:
            is_seen = sent[LOSSES[loss].sees] != 0
            if bool((advantage[~is_seen] != 0).any()):
                raise RequestRefused(
                    f"data.{place}: advantages are not 0 where sequence_ratio_mask is 0; set one of them to match"
                )
        ids[row, :count] = torch.from_numpy(datum.targets.reshape(-1).copy())
        mask[row, :count], advantages[row, :count] = is_seen, torch.where(is_seen, advantage, 0.0)
        if "logprobs" in sent:
            behavior[row, :count] = torch.where(is_seen, sent["logprobs"], 0.0)
    return weighted_rows(
        ids.to(device),
        mask.to(device),
        advantages.to(device),
        prompts=[[0]] * len(part),
        behavior_logprobs=behavior.to(device),
    )


def _tensor(loss: str, name: str, datum: TrainingDatum, row: int) -> Tensor:
    """A tensor of a datum, flat, as float32; missing weights are 1. Raises RequestRefused."""
    sent = datum.inputs.get(name)
    if sent is None:
        if name == "weights":
            return torch.ones(datum.targets.size)
        raise RequestRefused(f"data.{row}.loss_fn_inputs.{name}: missing, {loss} takes it")
    if sent.shape != datum.targets.shape:
        raise RequestRefused(
            f"data.{row}.loss_fn_inputs.{name}: shape {list(sent.shape)}, that of target_tokens is "
            f"{list(datum.targets.shape)}"
        )
    values = torch.from_numpy(sent.astype("float32").reshape(-1))
    if not bool(torch.isfinite(values).all()):
        raise RequestRefused(f"data.{row}.loss_fn_inputs.{name}: a value is not finite")
    return values
