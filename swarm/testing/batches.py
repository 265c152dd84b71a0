"""Builders of the arguments of a recipe's parts: a batch, and the policy's scores of the batch.

Invariant: `builders` does not import this file, so that importing `builders` loads no torch.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.part import Scored
from swarm.types import Correction


def toy_batch(
    rewards: Sequence[float] | Tensor,
    mask: Tensor | None = None,
    *,
    groups: Sequence[int] | Tensor | None = None,
    **changes: Any,
) -> Batch:
    """A batch of local rollouts that is a whole step; every trained token has behaviour log-prob -1.

    Args:
        rewards: [N]; a list becomes float64. Log-probs and advantages get the dtype of the rewards.
        mask: bool [N, L]; default: one trained token for each rollout.
        groups: [N], group of each rollout, 0 to M-1; default: all in group 0.
        changes: values for other fields of `Batch`.

    Example:
        toy_batch([1.0, 0.0, 1.0], groups=[0, 0, 1], age_steps=torch.tensor([0, 0, 3]))
    """
    rewards = rewards if isinstance(rewards, Tensor) else torch.tensor(rewards, dtype=torch.float64)
    count = len(rewards)
    mask = torch.ones(count, 1, dtype=torch.bool) if mask is None else mask
    group_index = torch.as_tensor([0] * count if groups is None else groups)
    num_groups = int(group_index.max()) + 1
    zeros = torch.zeros(mask.shape, dtype=rewards.dtype)
    turns: tuple[int, ...] = (count, 1) if "turn_rewards" not in changes else tuple(changes["turn_rewards"].shape)
    length: Tensor = changes.get("length", mask.sum(dim=1))
    plain: dict[str, Any] = {
        "token_ids": torch.ones(mask.shape, dtype=torch.int64),
        "behavior_logprobs": torch.where(mask, -1.0, zeros),
        "advantages": zeros,
        "turn_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "age_steps": torch.zeros(count, dtype=torch.int64),
        "is_external": torch.zeros(count, dtype=torch.bool),
        "temperature": torch.ones(count),
        "length": length,
        "max_new_tokens": torch.full((count,), mask.shape[1]),
        "is_truncated": torch.zeros(count, dtype=torch.bool),
        "corrections": (Correction.EXACT,) * count,
        "texts": ("",) * count,
        "answer_probs": torch.linspace(0.1, 0.9, turns[0] * turns[1], dtype=rewards.dtype).reshape(turns),
        "feedback_shifts": torch.linspace(-0.5, 0.5, turns[0] * turns[1], dtype=rewards.dtype).reshape(turns),
        "prompts": (torch.ones(1, dtype=torch.int64),) * num_groups,
        "sources": ("me",) * num_groups,
        "task_keys": tuple(f"sums/{group}" for group in range(num_groups)),
        "step_tokens": int(length.sum()),
        "step_rollouts": count,
        "step_groups": num_groups,
    }
    return Batch(mask=mask, rewards=rewards, group_index=group_index, **{**plain, **changes})


def toy_scored(batch: Batch, **changes: Any) -> Scored:
    """Scores equal to the behaviour log-probs of the batch, with entropy 0; `changes` replace fields of `Scored`."""
    zeros = torch.zeros_like(batch.advantages)
    plain: dict[str, Any] = {
        "logprobs": batch.behavior_logprobs,
        "entropy": zeros,
        "advantages": batch.advantages,
        "log_ratio": zeros,
    }
    return Scored(batch=batch, **{**plain, **changes})
