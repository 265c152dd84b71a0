"""Some rollouts of a step, token by token, for people to read (`swarm.telemetry.shown_updates`)."""

import math

import torch

from swarm.learn.gradient import Measured
from swarm.objectives.batch import Batch
from swarm.telemetry.shown_updates import MAX_TOKENS, SAID, ShownRollout, ShownUpdate
from swarm.types import Draw


def closer_look(step: int, recipe: str, draw: Draw, drawn: Batch, learned: Batch, measured: Measured) -> ShownUpdate:
    """Rollouts of a step, up to `MAX_TOKENS` tokens: largest weights first, own groups alternating with other nodes'.

    Args:
        step: step of the version that was made.
        recipe: name of the step's main recipe.
        draw: the groups of both batches.
        drawn: the batch before the step, with every token that the generator chose.
        learned: the same rollouts with advantages, without the tokens that the step left out.
        measured: measurements of the rollouts by the updates.
    """
    masses = torch.zeros(len(draw.groups), dtype=measured.weights.dtype, device=measured.weights.device)
    masses = masses.index_add(0, drawn.group_index, measured.weights.abs().sum(dim=1)).tolist()
    order = sorted(range(len(draw.groups)), key=lambda group: -masses[group])
    own = [group for group in order if draw.groups[group].scored.is_made_here]
    others = [group for group in order if not draw.groups[group].scored.is_made_here]
    ranks = {group: rank for some in (own, others) for rank, group in enumerate(some)}
    group_of: list[int] = drawn.group_index.tolist()
    rows = sorted(range(drawn.num_rollouts), key=lambda row: (ranks[group_of[row]], group_of[row], row))
    shown: list[ShownRollout] = []
    left = MAX_TOKENS
    for row in rows:
        length, group = min(_length(drawn, row), left), group_of[row]
        if not left:
            break
        left -= length
        place, digest = row - group_of.index(group), draw.groups[group].scored.digest.hex()
        shown.append(_rollout(row, length, digest, place, drawn, learned, measured))
    return ShownUpdate(step=step, recipe=recipe, rollouts=tuple(shown))


def _length(batch: Batch, row: int) -> int:
    """Number of tokens up to the last one that a model generated."""
    chosen = batch.mask[row].nonzero()
    return int(chosen[-1]) + 1 if len(chosen) else 0


def _rollout(
    row: int, length: int, digest: str, place: int, drawn: Batch, learned: Batch, measured: Measured
) -> ShownRollout:
    kinds = (drawn.mask[row, :length].int() + learned.mask[row, :length].int()).tolist()
    generator = drawn.behavior_logprobs[row, :length].tolist()
    return ShownRollout(
        digest=digest,
        place=place,
        reward=float(drawn.rewards[row]),
        age_steps=int(drawn.age_steps[row]),
        token_ids=drawn.token_ids[row, :length].tolist(),
        kinds=kinds,
        generator=[
            value if kind != SAID and math.isfinite(value) else None
            for value, kind in zip(generator, kinds, strict=True)
        ],
        learner=measured.logprobs[row, :length].tolist(),
        advantages=learned.advantages[row, :length].tolist(),
        weights=(-measured.weights[row, :length]).tolist(),
        bounded=measured.bounded[row, :length].tolist(),
    )
