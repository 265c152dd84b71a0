"""POISE: the baseline is a linear probe on the policy's own states, taken from another rollout of the prompt.

    A = R - mean of g(phi) of the other rollouts, g a ridge regression; clip .2, rollout mean

No critic and no large group: two rollouts are enough, and because the baseline of each comes from the other's states,
the gradient stays unbiased. Ours: a few random directions of the states and running sums of a ridge regression, where
the paper has full states and a buffer, which would be too much to remember (see `CrossBaseline`). The recipe's
`advantage` only marks the external rollouts with a negative advantage.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swarm.objectives.part import (
    Count,
    Decay,
    Memory,
    Positive,
    Prediction,
    Probe,
    Requirement,
    Scope,
    Scored,
    ShapePart,
)
from swarm.objectives.parts import Clip, LeaveOneOut, RolloutMean, TokenRatio, group_sum, rollout_mean
from swarm.objectives.recipe import Recipe


def project(seen: Prediction, number: int) -> Tensor:
    """Hidden states [c] along a random direction that depends only on `number` and the hidden size."""
    size = seen.hidden.shape[1]
    direction = torch.randn(size, generator=torch.Generator().manual_seed(number), dtype=torch.float64) / size**0.5
    hidden = seen.hidden.to(seen.logits.dtype)
    return hidden @ direction.to(device=hidden.device, dtype=hidden.dtype)


class CrossBaseline(ShapePart):
    """Reward minus the mean prediction of a linear probe from the states of the group's other rollouts.

    Features of a rollout: the state that predicts its first token (the prompt's), the mean state of its last
    `ending` tokens, mean, deviation and largest of its entropies, and 1. The probe is a ridge regression of the
    others' mean reward on these features. The result replaces any other advantage; a group of one gets 0.

    Ours: states of the last layer, projected on `directions` random directions; older steps fade by `decay`, instead
    of a buffer; the ridge (relative to the mean square of a feature); predictions are clamped to the range of rewards
    seen; groups of more than two average over the others; before the first fit, each prediction is the mean reward of
    the group's other rollouts.
    """

    equation = "A_i = R_i - mean_{j != i} g(phi_j), g = ridge regression of mean_{k != j} R_k on phi_j"
    scope = Scope.GROUP
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
    directions: Count = 8
    ending: Count = 4  # tokens
    ridge: Positive = 1e-2
    decay: Decay = 0.95  # factor on the weight of earlier steps, each step

    @property
    def probes(self) -> Mapping[str, Probe]:
        return {f"direction_{number}": partial(project, number=number) for number in range(self.directions)}

    def initial(self) -> Memory:
        return {"gram": [], "moment": [], "rewards": []}

    def __call__(self, scored: Scored) -> Tensor:
        rewards, group_index = scored.batch.rewards.double(), scored.batch.group_index
        predicted = self._predicted(scored)
        size = group_sum(torch.ones_like(rewards), group_index)
        baseline = (group_sum(predicted, group_index) - predicted) / (size - 1).clamp(min=1)
        advantages = torch.where(size > 1, rewards - baseline, torch.zeros_like(rewards))
        return advantages.to(scored.advantages.dtype)[:, None].expand(scored.mask.shape)

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        features, (others, size) = self._features(scored), _others(scored)
        features, others = features[size > 1], others[size > 1]
        if not others.numel():
            return memory
        gram, moment = features.T @ features, features.T @ others
        seen = scored.batch.rewards.tolist()
        if self._fits(memory):
            gram = gram + self.decay * torch.tensor(memory["gram"], dtype=gram.dtype, device=gram.device)
            moment = moment + self.decay * torch.tensor(memory["moment"], dtype=gram.dtype, device=gram.device)
            seen += memory["rewards"]
        return {"gram": gram.tolist(), "moment": moment.tolist(), "rewards": [min(seen), max(seen)]}

    def _predicted(self, scored: Scored) -> Tensor:
        """Prediction [N] of the others' reward from each rollout's states."""
        memory: Mapping[str, Any] = self.remembered(scored.batch)
        if not self._fits(memory):
            return _others(scored)[0]
        features = self._features(scored)
        gram, moment = (
            torch.tensor(memory[name], dtype=features.dtype, device=features.device) for name in ("gram", "moment")
        )
        damping = self.ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return (features @ torch.linalg.solve(gram + damping, moment)).clamp(*memory["rewards"])

    def _fits(self, memory: Mapping[str, Any]) -> bool:
        """True if the memory has a fit with as many features: not at the start or after a change of constants."""
        return len(memory["moment"]) == 2 * self.directions + 4

    def _features(self, scored: Scored) -> Tensor:
        """Features [N, F] of the rollouts, float64; 0 for a rollout without trained tokens."""
        mask, zeros = scored.mask, torch.zeros(scored.mask.shape, dtype=torch.float64, device=scored.mask.device)
        count = mask.sum(dim=1, keepdim=True)
        is_first = mask & (mask.cumsum(dim=1) == 1)
        is_last = mask & (mask.cumsum(dim=1) > count - self.ending)
        columns: list[Tensor] = []
        for name in self.probes:
            values = torch.where(mask, scored.probes[name].double(), zeros)
            columns += [rollout_mean(values, is_first)[:, 0], rollout_mean(values, is_last)[:, 0]]
        entropy = torch.where(mask, scored.entropy.detach().double(), zeros)
        usual = rollout_mean(entropy, mask)[:, 0]
        spread = rollout_mean((entropy - usual[:, None]) ** 2, mask)[:, 0].sqrt()
        constant = (count[:, 0] > 0).double()
        return torch.stack([*columns, usual, spread, entropy.max(dim=1).values, constant], dim=1)


def _others(scored: Scored) -> tuple[Tensor, Tensor]:
    """Returns (mean reward of the group's other members, size of the group), each [N]."""
    rewards, group_index = scored.batch.rewards.double(), scored.batch.group_index
    size = group_sum(torch.ones_like(rewards), group_index)
    return (group_sum(rewards, group_index) - rewards) / (size - 1).clamp(min=1), size


RECIPE = Recipe(
    name="poise",
    title="Your Language Model is Its Own Critic: Reinforcement Learning with Value Estimation "
    "from Actor's Internal States",
    acronym="POISE",
    arxiv="2605.07579",
    verification="ours",
    advantage=LeaveOneOut(),
    shapers=(CrossBaseline(),),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
)
