"""What a Python program sees of its training: callbacks, and figures by the names that TRL logs them under.

Invariant: a figure of ours that TRL has a name for bears that name; every other one keeps its own, below `learn/`.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

from swarm.events import PolicyEvaluated, StepMade

if TYPE_CHECKING:
    from node.python_api.training import Training

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


class Callback:
    """What a program does while it trains: derive from it, and override what is wanted.

    All are called in the thread that called `swarm.train`, in order; the training goes on meanwhile. `run.stop()` ends
    it, with a checkpoint; an exception ends it as well, and comes out of `swarm.train`.

    Example:
        class Until(swarm.Callback):
            def on_evaluation(self, run, metrics):
                if metrics["eval_own_accuracy"] > 0.9:
                    run.stop()
    """

    def on_step(self, run: "Training", metrics: Metrics) -> None:
        """After each optimizer step, with `step`, `loss`, `reward` and so on."""

    def on_evaluation(self, run: "Training", metrics: Metrics) -> None:
        """After each evaluation, with `step` and `eval_ENVIRONMENT_accuracy` (held-out problems)."""

    def on_end(self, run: "Training") -> None:
        """Once, when it ended by itself, or was stopped."""


def step_metrics(step: StepMade) -> dict[str, float]:
    """The figures of a step."""
    figures: dict[str, float] = {
        "step": step.step,
        "loss": step.loss,
        "grad_norm": step.grad_norm,
        "num_tokens": step.num_tokens,  # of this step, as everything here
    }
    return figures | {_NAMES.get(name, f"learn/{name}"): value for name, value in step.diagnostics.items()}


def evaluation_metrics(evaluations: Iterable[PolicyEvaluated]) -> dict[str, float]:
    """The figures of evaluations of one step."""
    figures: dict[str, float] = {}
    for each in evaluations:
        of_split = "" if each.split == "held_out" else f"_{each.split}"
        figures |= {"step": each.step, f"eval_{each.env}{of_split}_accuracy": each.accuracy}
    return figures
