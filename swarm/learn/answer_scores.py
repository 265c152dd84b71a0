"""How likely the policy finds the right answer before each turn of an episode.

Invariant: the answer comes from this node's own environment, never from who made the episode; nothing here has a
gradient. Shape letters: N rollouts, K most turns, L longest response in tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from swarm.interfaces import Tokenizer
from swarm.learn.gradient import score_batch
from swarm.learn.packing import PackedRows
from swarm.learn.ranks import Ranks
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
    places = [(row, turn) for row, count in enumerate(num_turns) for turn in range(count)]
    asked = asked_batch(batch, places, [answer_ids(tokenizer, answer) for answer in answers])
    logprobs = score_batch(network, asked, pack(asked), ranks=ranks).logprobs
    means = logprobs.sum(dim=1) / asked.mask.sum(dim=1)
    found = torch.zeros((batch.num_rollouts, max(num_turns)), dtype=torch.float32, device=batch.mask.device)
    rows, turns = torch.tensor(places, device=found.device).unbind(dim=1)
    found[rows, turns] = means.exp().to(torch.float32)
    return found


def answer_ids(tokenizer: Tokenizer, answer: str) -> list[int]:
    """The answer as the beginning of an action."""
    ids = tokenizer.encode_response(answer)
    return ids[:-1] if len(ids) > 1 and ids[-1] in tokenizer.eos_ids else ids


def asked_batch(batch: Batch, places: Sequence[tuple[int, int]], answers: Sequence[Sequence[int]]) -> Batch:
    """A row for each (rollout, turn): what came before the turn, then the group's answer, which alone is scored."""
    longest = batch.mask.shape[1] + max(map(len, answers))
    device, groups = batch.mask.device, batch.group_index.tolist()
    shape = (len(places), longest)
    token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
    conversations = torch.zeros(shape, dtype=torch.int64, device=device)
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    for place, (row, turn) in enumerate(places):
        begun = torch.nonzero(batch.turn_ids[row] == turn)
        start = int(begun[0]) if turn and len(begun) else 0
        answer = torch.tensor(list(answers[groups[row]]), dtype=torch.int64, device=device)
        token_ids[place, :start] = batch.token_ids[row, :start]
        token_ids[place, start : start + len(answer)] = answer
        mask[place, start : start + len(answer)] = True
        if batch.conversation_ids is not None:
            conversations[place, :start] = batch.conversation_ids[row, :start]
            conversations[place, start:] = batch.conversation_ids[row, start]
    zeros = torch.zeros(shape, device=device)
    return replace(
        batch.select([row for row, _ in places]),
        token_ids=token_ids,
        mask=mask,
        behavior_logprobs=zeros,
        advantages=zeros,
        turn_ids=torch.zeros_like(token_ids),
        temperature=torch.ones(len(places), device=device),
        conversation_ids=None if batch.conversation_ids is None else conversations,
        proximal_logprobs=None,
        reference_logprobs=None,
        segment_ids=None,
        segment_logprobs=None,
    )
