"""What one step did, in figures.

Invariant: figures only; what is kept for the next step is elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.learn.diagnostics import edge_reports, step_diagnostics
from swarm.learn.gradient import Measured
from swarm.objectives.batch import Batch
from swarm.types import Draw, PolicyVersion, StepReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What became of one optimizer update; the default is that of none."""

    loss: float = 0.0
    norm: float = 0.0  # of the gradient before clipping
    was_skipped: bool = True


def step_report(
    version: PolicyVersion, draw: Draw, batch: Batch, found: Measured, updates: Sequence[Update]
) -> StepReport:
    """Of a whole draw; loss and norm are means over the updates that were made, or over all where none was.

    Args:
        version: the newest one, after the step.
        draw: what was learned from.
        batch: the same with advantages.
        found: what its updates measured.
        updates: at least one.
    """
    made = [update for update in updates if not update.was_skipped]
    counted = made or updates
    local = [drawn.scored for drawn in draw.groups if drawn.scored.is_own_policy(version.policy_id)]
    figures = step_diagnostics(batch, found.logprobs, found.entropy, found.bounded, found.factor) | {
        "padding_share": found.num_padding / max(1, found.num_inputs),
        "num_micro_batches": float(found.num_micro_batches),
        "num_updates": float(len(made)),
        "age_in_flight_mean_steps": sum(drawn.in_flight_steps for drawn in draw.groups) / len(draw.groups),
    }
    return StepReport(
        version=version,
        loss=sum(update.loss for update in counted) / len(counted),
        grad_norm=sum(update.norm for update in counted) / len(counted),
        num_tokens=batch.num_tokens,
        was_skipped=not made,
        diagnostics=figures,
        seconds=found.seconds,
        edges=edge_reports(batch, found.logprobs),
        ages_steps=tuple(drawn.age_steps for drawn in draw.groups),
        num_local=len(local),
        num_external=len(draw.groups) - len(local),
        num_from_followers=sum(not scored.is_made_here for scored in local),
        draw_step=draw.step,
    )
