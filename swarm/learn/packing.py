"""Packing: rows of tokens for forward passes under a token budget, with shared prompts and beginnings copied once.

Invariant: packing changes the cost of a step and never its value. A response token attends to its own prompt and its
own response only, at the positions it was sampled at. Each conversation of a rollout is a separate response here; a
conversation after the first has its opening as prompt.
Shape letters: B rows, S tokens of the longest row, n trained tokens.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.model.shared_beginnings import num_alike
from swarm.objectives.batch import Batch

MIN_FILL = 0.9  # shortest over longest row of a micro-batch: bounds the padding share by 10 %
PADDING = -1  # segment id of padding
LEAST_ALIKE = 16  # shared first tokens of prompts (a template, an instruction) from which on one copy is worth it


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """One micro-batch. A row is a prompt with its responses, or several prompts that begin alike with their responses.

    The last token of a response is never an input: nothing after it is predicted.
    Example: prompt `a b`, responses `c d` and `e f g` give the row `a b c e f`, positions `0 1 2 2 3`,
    segments `0 0 1 2 2`; the hidden state of `b` predicts both `c` and `e`. With prompt `a x` and response `y z` as
    well: `a b c e f x y`, positions `0 1 2 2 3 1 2`, segments `0 1 2 3 3 4 5`, prompts `0 1 1 1 1 4 4`.
    """

    token_ids: Tensor  # int64 [B, S]
    position_ids: Tensor  # int64 [B, S]
    segment_ids: Tensor  # int64 [B, S]: 0 the row's beginning, k > 0 the rest of a prompt or a response, PADDING
    prompt_ids: Tensor  # int64 [B, S]: segment with the rest of a token's prompt; 0: it has none
    rows: Tensor  # int64 [n], row of the hidden state that predicts a trained token
    columns: Tensor  # int64 [n], its column
    targets: Tensor  # int64 [n], the trained token
    temperature: Tensor  # float32 [n]
    rollouts: Tensor  # int64 [n], rollout of the step's batch
    positions: Tensor  # int64 [n], column of the step's batch
    members: tuple[int, ...]  # rollouts of the step's batch with a trained token here, ascending

    def __post_init__(self) -> None:
        shapes = {each.shape for each in (self.token_ids, self.position_ids, self.segment_ids, self.prompt_ids)}
        assert len(shapes) == 1
        count = self.rows.shape
        for name in ("columns", "targets", "temperature", "rollouts", "positions"):
            assert getattr(self, name).shape == count, name

    @property
    def num_padding(self) -> int:
        """Number of padding tokens."""
        return int((self.segment_ids == PADDING).sum())

    def attention_mask(self) -> Tensor:
        """bool [B, S, S]: token i sees token j iff j <= i and j is in the prompt or the response of i."""
        segments, prompts = self.segment_ids, self.prompt_ids
        size = segments.shape[1]
        is_past = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
        seen = segments[:, None, :]
        is_related = (seen == 0) | (seen == segments[:, :, None]) | (seen == prompts[:, :, None])
        return is_past & is_related


@dataclass(slots=True)
class _Row:
    """A row being filled, in plain integers."""

    prompt: list[int]
    token_ids: list[int]
    position_ids: list[int]
    segment_ids: list[int]
    prompt_ids: list[int] = field(default_factory=list[int])  # empty: 0 everywhere
    columns: list[int] = field(default_factory=list[int])
    targets: list[int] = field(default_factory=list[int])
    rollouts: list[int] = field(default_factory=list[int])
    positions: list[int] = field(default_factory=list[int])

    @classmethod
    def start(cls, prompt: list[int]) -> "_Row":
        return cls(prompt, list(prompt), list(range(len(prompt))), [0] * len(prompt))

    def has_room(self, num_inputs: int, token_budget: int, break_even: float) -> bool:
        """True if a response fits and sharing the prompt is worth the longer row.

        Attention costs the square of a row's length: (row + response)^2 - row^2 instead of (prompt + response)^2.
        """
        row, prompt = len(self.token_ids), len(self.prompt)
        more_pairs = 2 * row * num_inputs - prompt**2 - 2 * prompt * num_inputs
        return row + num_inputs <= token_budget and more_pairs <= break_even * prompt

    def add(self, rollout: int, response: "_Response") -> None:
        """Appends the inputs of a response and notes where each of its trained tokens is predicted."""
        token_ids, mask = response.token_ids, response.mask
        first_column, first_position = len(self.token_ids), len(self.prompt)
        inputs = token_ids[: _num_inputs(mask)]
        segment = max(self.segment_ids) + 1
        self.token_ids += inputs
        self.position_ids += range(first_position, first_position + len(inputs))
        self.segment_ids += [segment] * len(inputs)
        for position, is_trained in enumerate(mask):
            if is_trained:
                self.columns.append(first_position - 1 if position == 0 else first_column + position - 1)
                self.targets.append(token_ids[position])
                self.rollouts.append(rollout)
                self.positions.append(position if response.columns is None else response.columns[position])


@dataclass(frozen=True, slots=True)
class _Response:
    """Tokens that follow one prompt: a rollout's response, or one of its conversations."""

    prompt: list[int]
    token_ids: list[int]
    mask: list[bool]
    columns: list[int] | None = None  # of the batch, of each token; None: in order from 0


def pack(
    batch: Batch,
    token_budget: int,
    break_even: float = math.inf,
    num_ranks: int = 1,
    most_alike: int = 0,
) -> list[PackedRows]:
    """Packs every trained token once into micro-batches within the budget, each of rows of similar length.

    A group takes several rows if a single row would exceed the budget or cost more (`break_even`); a row of a single
    response that exceeds the budget is a micro-batch by itself.

    Args:
        batch: the whole step; rollouts without a trained token are left out.
        token_budget: tokens of one micro-batch, padding included.
        break_even: context in tokens at which attention costs a token as much as its linear layers. A response joins
            a row only if a second copy of the prompt would cost more than masked attention to the other responses:
            -inf gives one row per response.
        num_ranks: processes that share the work: no micro-batch has more rows than one rank's share.
        most_alike: most tokens of a row that joins prompts that begin alike; with 0 or several ranks, none are joined.
    """
    made = _rows(batch, token_budget, break_even)
    if num_ranks == 1:  # several processes need rows to share
        made = _joined(made, min(token_budget, most_alike), break_even)
    rows = sorted(made, key=lambda row: -len(row.token_ids))
    most_rows = math.ceil(len(rows) / num_ranks)
    micro_batches: list[list[_Row]] = []
    for row in rows:
        current = micro_batches[-1] if micro_batches else []
        longest = len(current[0].token_ids) if current else 0
        is_similar = len(row.token_ids) >= MIN_FILL * longest
        if current and is_similar and len(current) < most_rows and longest * (len(current) + 1) <= token_budget:
            current.append(row)
        else:
            micro_batches.append([row])
    return [_packed(rows, batch) for rows in micro_batches]


def _num_inputs(mask: list[bool]) -> int:
    """Response tokens that a forward pass needs: those before the last trained one."""
    return max((position for position, is_trained in enumerate(mask) if is_trained), default=0)


def _rows(batch: Batch, token_budget: int, break_even: float) -> list[_Row]:
    token_ids: list[list[int]] = batch.token_ids.tolist()
    masks: list[list[bool]] = batch.mask.tolist()
    conversations: list[list[int]] | None = None if batch.conversation_ids is None else batch.conversation_ids.tolist()
    groups: list[int] = batch.group_index.tolist()
    prompts: list[list[int]] = [prompt.tolist() for prompt in batch.prompts]
    open_rows: dict[int, _Row] = {}
    rows: list[_Row] = []
    for rollout, (group, mask) in enumerate(zip(groups, masks, strict=True)):
        whole = _Response(prompts[group], token_ids[rollout], mask)
        for response in [whole] if conversations is None else _by_conversation(whole, conversations[rollout]):
            if not any(response.mask):
                continue
            row = open_rows.get(group) if response.prompt is whole.prompt else None
            if row is None or not row.has_room(_num_inputs(response.mask), token_budget, break_even):
                row = _Row.start(response.prompt)
                rows.append(row)
                if response.prompt is whole.prompt:
                    open_rows[group] = row
            row.add(rollout, response)
    return rows


def _joined(rows: list[_Row], longest: int, break_even: float) -> list[_Row]:
    """Joins rows whose prompts begin alike after one copy of the beginning, if that saves more than attention costs."""
    alike: dict[tuple[int, ...], list[_Row]] = {}
    joined: list[_Row] = []
    for row in rows:
        if len(row.prompt) > LEAST_ALIKE:
            alike.setdefault(tuple(row.prompt[:LEAST_ALIKE]), []).append(row)
        else:
            joined.append(row)
    for family in alike.values():
        shared = num_alike(row.prompt for row in family)
        part: list[_Row] = []
        length = 0
        for row in family:
            own = len(row.token_ids)
            more_pairs = (length + own - shared) ** 2 - length**2 - own**2
            if part and (length + own - shared > longest or more_pairs > break_even * shared):
                joined.append(_one_row(part, shared))
                part, length = [], 0
            length += own - shared if part else own
            part.append(row)
        joined.append(_one_row(part, shared))
    return joined


def _one_row(rows: list[_Row], shared: int) -> _Row:
    """One row of several whose prompts begin with the same `shared` tokens."""
    if len(rows) == 1:
        return rows[0]
    begin = rows[0].prompt[:shared]
    whole = _Row(begin, list(begin), list(range(shared)), [0] * shared, [0] * shared)
    for row in rows:
        offset, prompt = len(whole.token_ids) - shared, max(whole.segment_ids) + 1
        whole.token_ids += row.token_ids[shared:]
        whole.position_ids += row.position_ids[shared:]
        whole.segment_ids += [prompt + segment for segment in row.segment_ids[shared:]]
        whole.prompt_ids += [prompt] * (len(row.token_ids) - shared)
        whole.columns += [offset + column for column in row.columns]
        whole.targets += row.targets
        whole.rollouts += row.rollouts
        whole.positions += row.positions
    return whole


def _by_conversation(whole: _Response, conversations: list[int]) -> list[_Response]:
    """A rollout's tokens as one response per conversation; after the first, the opening becomes the prompt."""
    columns: dict[int, list[int]] = {}
    for column, conversation in enumerate(conversations):
        columns.setdefault(conversation, []).append(column)
    found: list[_Response] = []
    for conversation, own in columns.items():
        ids, mask = [whole.token_ids[column] for column in own], [whole.mask[column] for column in own]
        opening = 0 if conversation == 0 else mask.index(True) if True in mask else len(mask)
        assert opening or conversation == 0, "a conversation begins with what opened it"
        prompt = whole.prompt if conversation == 0 else ids[:opening]
        found.append(_Response(prompt, ids[opening:], mask[opening:], own[opening:]))
    return found


def _packed(rows: list[_Row], batch: Batch) -> PackedRows:
    device = batch.token_ids.device
    size = max(len(row.token_ids) for row in rows)

    def padded(values: list[list[int]], padding: int) -> Tensor:
        return torch.tensor([row + [padding] * (size - len(row)) for row in values], device=device)

    def flat(values: list[list[int]]) -> Tensor:
        return torch.tensor([value for row in values for value in row], dtype=torch.int64, device=device)

    rollouts = flat([row.rollouts for row in rows])
    return PackedRows(
        token_ids=padded([row.token_ids for row in rows], 0),
        position_ids=padded([row.position_ids for row in rows], 0),
        segment_ids=padded([row.segment_ids for row in rows], PADDING),
        prompt_ids=padded([row.prompt_ids or [0] * len(row.token_ids) for row in rows], 0),
        rows=flat([[index] * len(row.columns) for index, row in enumerate(rows)]),
        columns=flat([row.columns for row in rows]),
        targets=flat([row.targets for row in rows]),
        temperature=batch.temperature[rollouts],
        rollouts=rollouts,
        positions=flat([row.positions for row in rows]),
        members=tuple(sorted({rollout for row in rows for rollout in row.rollouts})),
    )
