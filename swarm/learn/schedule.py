"""The learning rate of a step: warm-up, then constant, or falling to the last step.

Invariant: a function of configuration and step alone, so that a resumed training needs no state of a scheduler.
"""

import math

from swarm.config import LearnerConfig


def learning_rate(config: LearnerConfig, step: int) -> float:
    """The learning rate of the step that makes version `step`, >= 1.

    Warm-up is linear, up to the full rate at step W = `warmup_steps`. The step after it has the full rate, too, as in
    `get_cosine_schedule_with_warmup` of transformers, and the one after the last, N = `num_steps`, would have the rate
    0; later ones, where a node goes on, keep it.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step - 1 - config.warmup_steps) / (config.num_steps - config.warmup_steps))
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.learning_rate * left
