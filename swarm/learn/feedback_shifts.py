"""How far what the environment answered moved the next turn: its log-probs with the answer, and without it.

Invariant: nothing here has a gradient. Without means the same tokens, those of the observation replaced by a text that
says nothing. Shape letters: N rollouts, K most turns, L longest response in tokens.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from swarm.interfaces import Tokenizer
from swarm.learn.gradient import score_batch
from swarm.learn.packing import PackedRows
from swarm.learn.ranks import Ranks
from swarm.model.tokenizer import text_ids
from swarm.objectives.batch import Batch

NOTHING: Final = "No information found."
"""The text in place of an observation. Source: kfq20/InfoPO `intrinsic_reward.py`."""


def feedback_shifts(
    network: nn.Module,
    batch: Batch,
    tokenizer: Tokenizer,
    pack: Callable[[Batch], list[PackedRows]],
    ranks: Ranks,
) -> Tensor:
    """Mean log-prob of the next turn's tokens minus that without this turn's observation: float32 [N, K], else 0.

    Args:
        network: the policy.
        batch: the whole step.
        tokenizer: of the policy.
        pack: of a batch.
        ranks: the processes that share the step.
    """
    most = 1 if batch.turn_rewards is None else batch.turn_rewards.shape[1]
    found = torch.zeros((batch.num_rollouts, most), dtype=torch.float32, device=batch.mask.device)
    places = _answered(batch)
    if not places:
        return found

    def mean(nothing: Sequence[int] | None) -> Tensor:
        asked = masked_batch(batch, places, nothing)
        return score_batch(network, asked, pack(asked), ranks=ranks).logprobs.sum(dim=1) / asked.mask.sum(dim=1)

    shifts = mean(None) - mean(text_ids(tokenizer, NOTHING))
    rows, turns = torch.tensor(places, device=found.device).unbind(dim=1)
    found[rows, turns] = shifts.to(torch.float32)
    return found


def _observed(batch: Batch, row: int, turn: int) -> Tensor:
    """bool [L]: tokens of a turn behind its last trained one."""
    own = batch.turn_ids[row] == turn
    trained = torch.nonzero(own & batch.mask[row])
    last = int(trained[-1]) if len(trained) else -1
    return own & (torch.arange(len(own), device=own.device) > last)


def _answered(batch: Batch) -> list[tuple[int, int]]:
    """(rollout, turn) with an observation and a next turn that has trained tokens."""
    if batch.num_turns is None:
        return []
    return [
        (row, turn)
        for row, count in enumerate(batch.num_turns.tolist())
        for turn in range(count - 1)
        if bool(_observed(batch, row, turn).any()) and bool((batch.mask[row] & (batch.turn_ids[row] == turn + 1)).any())
    ]


def masked_batch(batch: Batch, places: Sequence[tuple[int, int]], nothing: Sequence[int] | None) -> Batch:
    """A row for each (rollout, turn), of which the next turn alone is scored; `nothing` stands for the observation.

    Cut off or repeated in its last token to the length of the observation, so that all else keeps its place.
    """
    rollouts = [row for row, _ in places]
    token_ids = batch.token_ids[rollouts]
    mask = torch.zeros_like(token_ids, dtype=torch.bool)
    for place, (row, turn) in enumerate(places):
        mask[place] = batch.mask[row] & (batch.turn_ids[row] == turn + 1)
        if nothing is not None:
            observed = _observed(batch, row, turn)
            ids = [nothing[min(index, len(nothing) - 1)] for index in range(int(observed.sum()))]
            token_ids[place, observed] = torch.tensor(ids, dtype=token_ids.dtype, device=token_ids.device)
    conversations = None if batch.conversation_ids is None else batch.conversation_ids[rollouts]
    return batch.with_tokens(rollouts, token_ids, mask, conversations)
