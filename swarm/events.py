"""What an agent tells of a group, a draw, a step or an evaluation: the fields of its events.

Invariant: figures and digests only, never a prompt, an answer or a key; enough to check every invariant of a run
from the events alone.
"""

import math
from collections.abc import Callable

from swarm.config import NodeConfig
from swarm.types import (
    Digest,
    Draw,
    Evaluation,
    FloatArray,
    JsonDict,
    PolicyVersion,
    RolloutGroup,
    ScoredGroup,
    StepReport,
)

Emit = Callable[[str, JsonDict], None]  # event kind, fields


def mean_of(rewards: FloatArray) -> float:
    """Of [G] rewards; in plain Python, which for a handful of numbers is several times faster than numpy."""
    values: list[float] = rewards.tolist()
    return math.fsum(values) / len(values)


def mean_and_std(rewards: FloatArray) -> tuple[float, float]:
    """Of [G] rewards."""
    mean = mean_of(rewards)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in rewards.tolist()) / len(rewards))


def group_fields(scored: ScoredGroup) -> JsonDict:
    """A group, without what was asked or answered."""
    return {
        "digest": scored.digest.hex(),
        "producer": scored.group.producer,
        "policy": scored.group.policy_id,
        "env": scored.group.env,
        "step": scored.group.oldest_step,
        "bytes": scored.size_bytes,
        "reward": mean_of(scored.rewards),
    }


def versions_of(group: RolloutGroup) -> list[list[int | str]]:
    """[step, digest as `digest_text`] of each policy version that made tokens of the group, oldest first."""
    return [[version.step, digest_text(version.digest)] for version in group.versions]


def digest_text(digest: Digest) -> str:
    """Of a version's weights in events: the first 16 hex characters."""
    return digest.hex()[:16]


def version_fields(version: PolicyVersion) -> JsonDict:
    """A version of our own lineage that exists from now on."""
    return {"policy": version.policy_id, "step": version.step, "digest": digest_text(version.digest)}


def draw_fields(draw: Draw, config: NodeConfig, policy_id: str) -> JsonDict:
    """A draw as an event: enough to check every invariant of a run afterwards.

    Args:
        draw: of this node.
        config: its bounds.
        policy_id: our own lineage; `local` are the groups of it.
    """
    return {
        "step": draw.step,
        "num_zero_variance": draw.num_zero_variance,
        "silent": [digest.hex() for digest in draw.zero_variance],
        "groups": [
            {
                **group_fields(drawn.scored),
                "age": drawn.age_steps,
                "in_flight": drawn.in_flight_steps,
                "use": drawn.use,
                "local": drawn.scored.is_own_policy(policy_id),
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
        "digest": digest_text(report.version.digest),
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "num_tokens": report.num_tokens,
        "was_skipped": report.was_skipped,
        "diagnostics": report.diagnostics,
        "seconds": report.seconds,
        "ages": list(report.ages_steps),
        "num_local": report.num_local,
        "num_external": report.num_external,
        "num_from_followers": report.num_from_followers,
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
