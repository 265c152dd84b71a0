"""Supervised update (SFT): the mean negative log-likelihood of given answers, on their tokens alone.

Invariant: prompts are not learned; an answer ends with an end token, as a generated one does.
Shape letters: N answers, L longest answer in tokens.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from swarm.objectives.batch import Batch, weighted_rows
from swarm.objectives.part import AdvantagePart
from swarm.objectives.parts import Likelihood, NoRatio, TokenMean
from swarm.objectives.recipe import Recipe


class GivenAdvantages(AdvantagePart):
    """Advantages as they are in the batch."""

    equation = "A as given"

    def __call__(self, batch: Batch) -> Tensor:
        return batch.advantages


SUPERVISED: Final = Recipe(
    name="supervised",
    title="Supervised fine-tuning",
    about="mean negative log-likelihood of given tokens",
    url="https://arxiv.org/abs/2203.02155",
    verification="ours",
    advantage=GivenAdvantages(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)


def supervised_batch(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], device: torch.device | str
) -> Batch:
    """The batch of N prompts with their answers, each token of an answer with weight 1.

    Args:
        prompts: token ids up to the first generated token.
        answers: token ids after it, at least one each, the end token included.
        device: device of the tensors.
    """
    shape = len(answers), max(map(len, answers))
    token_ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    for row, answer in enumerate(answers):
        token_ids[row, : len(answer)] = torch.tensor(list(answer), dtype=torch.int64)
        mask[row, : len(answer)] = True
    mask = mask.to(device)
    return weighted_rows(token_ids.to(device), mask, mask.float(), prompts)
