"""How likely the policy finds the right answer before each turn of an episode.

Invariant: the answer comes from this node's own environment, never from who made the episode; nothing here has a
gradient. Shape letters: N rollouts, K most turns, L longest response in tokens.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from swarm.interfaces import Tokenizer
from swarm.learn.gradient import score_batch
from swarm.learn.packing import PackedRows
from swarm.learn.ranks import Ranks
from swarm.model.tokenizer import text_ids
from swarm.objectives.batch import Batch


def answer_probs(
    network: nn.Module,
    batch: Batch,
    tokenizer: Tokenizer,
    answers: Sequence[str],
    pack: Callable[[Batch], list[PackedRows]],
    ranks: Ranks,
) -> Tensor:
    """exp of the mean log-prob of the right answer, where a turn begins: float32 [N, K], 0 where there is no turn.

    Args:
        network: the policy.
        batch: the whole step.
        tokenizer: of the policy; the end token is no part of an answer.
        answers: of each group, as an action would say it.
        pack: of a batch.
        ranks: the processes that share the step.
    """
    num_turns = [1] * batch.num_rollouts if batch.num_turns is None else batch.num_turns.clamp(min=1).tolist()
    begins = [_begins(batch.turn_ids[row].tolist(), count) for row, count in enumerate(num_turns)]
    places = list(dict.fromkeys((row, start) for row, starts in enumerate(begins) for start in starts))
    asked = asked_batch(batch, places, [text_ids(tokenizer, answer) for answer in answers])
    logprobs = score_batch(network, asked, pack(asked), ranks=ranks).logprobs
    means = logprobs.sum(dim=1) / asked.mask.sum(dim=1)
    probs = dict(zip(places, means.exp().tolist(), strict=True))
    found = torch.zeros((batch.num_rollouts, max(num_turns)), dtype=torch.float32, device=batch.mask.device)
    for row, starts in enumerate(begins):
        found[row, : len(starts)] = torch.tensor([probs[row, start] for start in starts], device=found.device)
    return found


def _begins(turn_ids: Sequence[int], num_turns: int) -> list[int]:
    """[K] first token of each turn. One without tokens begins where the next does, or where the last one did where
    none follows (it was cut off): so a turn is credited with no answer that it did not see.

    Args:
        turn_ids: [L] of a row, in order; 0 behind its end.
        num_turns: of the episode.
    """
    starts = [0]
    for turn in range(1, num_turns):
        starts.append(next((at for at, each in enumerate(turn_ids) if each >= turn), starts[-1]))
    return starts


def asked_batch(batch: Batch, places: Sequence[tuple[int, int]], answers: Sequence[Sequence[int]]) -> Batch:
    """A row for each (rollout, token): what came before the token, then the group's answer, which alone is scored."""
    device, groups = batch.mask.device, batch.group_index.tolist()
    shape = (len(places), max(start + len(answers[groups[row]]) for row, start in places))
    token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
    conversations = torch.zeros(shape, dtype=torch.int64, device=device)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    for place, (row, start) in enumerate(places):
        answer = torch.tensor(list(answers[groups[row]]), dtype=torch.int64, device=device)
        token_ids[place, :start] = batch.token_ids[row, :start]
        token_ids[place, start : start + len(answer)] = answer
        mask[place, start : start + len(answer)] = True
        if batch.conversation_ids is not None:
            conversations[place, :start] = batch.conversation_ids[row, :start]
            conversations[place, start:] = batch.conversation_ids[row, start]
    rollouts = [row for row, _ in places]
    return batch.with_tokens(rollouts, token_ids, mask, None if batch.conversation_ids is None else conversations)
