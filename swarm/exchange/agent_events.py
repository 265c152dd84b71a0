"""What an agent tells of a group, a draw, a step or an evaluation: the fields of its events.

Invariant: figures and digests only, never a prompt, an answer or a key; enough to check every invariant of a run
from the events alone.
"""

import math
from collections.abc import Callable

from swarm.config import NodeConfig
from swarm.types import Draw, Evaluation, FloatArray, JsonDict, ScoredGroup, StepReport

Emit = Callable[[str, JsonDict], None]  # event kind, fields


def mean_and_std(rewards: FloatArray) -> tuple[float, float]:
    """Of [G] rewards; in plain Python, which for a handful of numbers is several times faster than numpy."""
    values: list[float] = rewards.tolist()
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def group_fields(scored: ScoredGroup) -> JsonDict:
    """A group, without what was asked or answered."""
    return {
        "digest": scored.digest.hex(),
        "producer": scored.group.producer,
        "env": scored.group.env,
        "step": scored.group.oldest_step,
        "bytes": scored.size_bytes,
        "reward": mean_and_std(scored.rewards)[0],
    }


def draw_fields(draw: Draw, config: NodeConfig) -> JsonDict:
    """A draw as an event: enough to check every invariant of a run afterwards."""
    return {
        "step": draw.step,
        "num_silent": draw.num_silent,
        "silent": [digest.hex() for digest in draw.silent],
        "groups": [
            {
                **group_fields(drawn.scored),
                "age": drawn.age_steps,
                "use": drawn.use,
                "local": drawn.scored.is_local,
            }
            for drawn in draw.groups
        ],
        "max_age_steps": config.replay.max_age_steps,
        "max_reuse": config.replay.max_reuse,
    }


def step_fields(report: StepReport) -> JsonDict:
    """What a step did; `step` is the version's, `draw` also counts the steps that were skipped."""
    return {
        "step": report.version.step,
        "draw": report.draw_step,
        "digest": report.version.digest.hex()[:16],
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "num_tokens": report.num_tokens,
        "was_skipped": report.was_skipped,
        "diagnostics": report.diagnostics,
        "seconds": report.seconds,
        "ages": list(report.ages_steps),
        "num_local": report.num_local,
        "num_external": report.num_external,
        "edges": [
            {
                "source": edge.source,
                "groups": edge.num_groups,
                "age": edge.age_mean_steps,
                "ess": edge.ess_share,
                "kl": edge.mismatch_kl,
                "reward": edge.reward_mean,
            }
            for edge in report.edges
        ],
    }


def evaluation_fields(evaluation: Evaluation) -> JsonDict:
    """One greedy accuracy."""
    return {
        "step": evaluation.step,
        "env": evaluation.env,
        "split": evaluation.split,
        "accuracy": evaluation.accuracy,
        "num_problems": evaluation.num_problems,
        "majority_baseline": evaluation.majority_baseline,
    }
