"""Figures of a training under the names that TRL logs.

Invariant: a diagnostic that TRL has a name for has that name; every other one keeps its own, below `learn/`.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from swarm.events import PolicyEvaluated, StepMade

Metrics = Mapping[str, float]

# Figure of a step -> name in TRL's GRPOTrainer.
_NAMES: Final = {
    "learning_rate": "learning_rate",
    "reward_mean": "reward",
    "entropy_nats": "entropy",
    "zero_variance_share": "frac_reward_zero_std",
    "response_tokens_mean": "completions/mean_length",
    "cut_off_share": "completions/clipped_ratio",
    "clip_share": "clip_ratio/region_mean",
    "clip_share_negative": "clip_ratio/low_mean",
    "clip_share_positive": "clip_ratio/high_mean",
    "ratio_mean": "sampling/importance_sampling_ratio/mean",
    "ratio_max": "sampling/importance_sampling_ratio/max",
}


def step_metrics(step: StepMade) -> dict[str, float]:
    """The figures of a step, by name."""
    figures: dict[str, float] = {
        "step": step.step,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "num_tokens": step.num_tokens,  # of this step, as everything here
    }
    return figures | {_NAMES.get(name, f"learn/{name}"): value for name, value in step.diagnostics.items()}


def evaluation_metrics(evaluations: Iterable[PolicyEvaluated]) -> dict[str, float]:
    """The figures of evaluations of one step, by name."""
    figures: dict[str, float] = {}
    for each in evaluations:
        of_split = "" if each.split == "held_out" else f"_{each.split}"
        figures |= {"step": each.step, f"eval_{each.env}{of_split}_accuracy": each.accuracy}
    return figures
