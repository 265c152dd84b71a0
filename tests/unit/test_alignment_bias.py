"""Error of the correction across tokenizers, by enumeration; docs/recipes.md shows this table.

Two policies over tokens of two vocabularies write texts of "a" and "b". The probability of a text is a sum over all
ways to cut it, which only enumeration can give; a sender reports the probability of the one way it took. Compared is
the expected gradient of each correction, over everything the sender may write, with that of the truth.
`python tests/unit/test_alignment_bias.py` prints the table.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from swarm.model.token_alignment import UNALIGNED, align, token_ends

DOCUMENT = Path(__file__).parents[2] / "docs" / "recipes.md"
OURS, THEIRS = ("a", "b", "ab"), ("a", "b", "ba", "bb")
MAX_CHARACTERS = 4
END = "."
SEEDS = range(5)
CAP = 2.0  # of `segment_ratio`

Tokens = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """Token probabilities given the last character; canonical texts are favoured by `habit` nats a token.

    A text of MAX_CHARACTERS always ends; a token that would pass that length is impossible.
    """

    vocabulary: tuple[str, ...]
    logits: Tensor  # [3, V + 1] by last character (none, a, b) and token, the last of which ends
    habit: float
    known: dict[Tokens, Tensor] = field(default_factory=dict[Tokens, Tensor])

    def logprobs(self, tokens: Tokens) -> Tensor:
        """Log-prob [T] of each token of a response, its end included."""
        if tokens not in self.known:
            self.known[tokens] = self._logprobs(tokens)
        return self.known[tokens]

    def _logprobs(self, tokens: Tokens) -> Tensor:
        text, found = "", list[Tensor]()
        for place, token in enumerate((*tokens, END)):
            choices = [*self.vocabulary, END]
            row = self.logits[("", "a", "b").index(text[-1:])]
            strays = [
                choice != END and canonical(text + choice, self.vocabulary) != (*tokens[:place], choice)
                for choice in choices
            ]
            row = row - self.habit * torch.tensor(strays, dtype=row.dtype)
            fits = [choice == END or len(text + choice) <= MAX_CHARACTERS for choice in choices]
            row = torch.where(torch.tensor(fits), row, -torch.inf)
            found.append(torch.log_softmax(row, 0)[choices.index(token)])
            text += token
        return torch.stack(found)

    def probability(self, tokens: Tokens) -> float:
        """Of one way to write a text."""
        return math.exp(float(self.logprobs(tokens).detach().sum()))


def random_policy(vocabulary: tuple[str, ...], habit: float, seed: int) -> Policy:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((3, len(vocabulary) + 1), generator=generator, dtype=torch.float64)
    return Policy(vocabulary=vocabulary, logits=logits.requires_grad_(), habit=habit)


def canonical(text: str, vocabulary: tuple[str, ...]) -> Tokens:
    """Longest match from the left."""
    found: list[str] = []
    while text:
        piece = max((piece for piece in vocabulary if text.startswith(piece)), key=len)
        found.append(piece)
        text = text[len(piece) :]
    return tuple(found)


def cuts(text: str, vocabulary: tuple[str, ...]) -> Iterator[Tokens]:
    """Every way to write a text."""
    if not text:
        yield ()
    for piece in vocabulary:
        if text.startswith(piece):
            yield from ((piece, *rest) for rest in cuts(text[len(piece) :], vocabulary))


def texts() -> list[str]:
    return ["".join(letters) for size in range(MAX_CHARACTERS + 1) for letters in itertools.product("ab", repeat=size)]


def reward(text: str) -> float:
    return text.count("ab") + 0.5 * text.endswith("b") - 0.1 * len(text)


def true_gradient(ours: Policy) -> Tensor:
    """Of the expected reward, a text's probability being that of all its cuts together."""
    value = torch.stack(
        [ours.logprobs(way).sum().exp() * reward(text) for text in texts() for way in cuts(text, ours.vocabulary)]
    ).sum()
    return torch.autograd.grad(value, ours.logits, retain_graph=True)[0]


Weights = Callable[[Tensor, Tensor, Tokens, Tokens], Tensor]
"""Ratio [T] of each of our tokens from our log-probs [T], theirs [U] and both cuts."""


def expected_gradient(ours: Policy, theirs: Policy, weights: Weights) -> Tensor:
    """Of what the sender may write: each cut of each text by its probability, weighted where it is canonical."""
    baseline = sum(theirs.probability(way) * reward(text) for text in texts() for way in cuts(text, theirs.vocabulary))
    total = torch.zeros((), dtype=torch.float64)
    for text in texts():
        our_way = canonical(text, ours.vocabulary)
        our_logprobs = ours.logprobs(our_way)
        for way in cuts(text, theirs.vocabulary):
            their_logprobs = theirs.logprobs(way).detach()
            ratios = torch.ones(len(our_way) + 1, dtype=torch.float64)
            if way == canonical(text, theirs.vocabulary):  # else the sender says nothing
                ratios = weights(our_logprobs.detach(), their_logprobs, our_way, way)
            total = total + (ratios * our_logprobs).sum() * (reward(text) - baseline) * their_logprobs.sum().exp()
    return torch.autograd.grad(total, ours.logits, retain_graph=True)[0]


def no_ratio(ours: Tensor, theirs: Tensor, our_way: Tokens, their_way: Tokens) -> Tensor:
    return torch.ones_like(ours)


def by_response(ours: Tensor, theirs: Tensor, our_way: Tokens, their_way: Tokens) -> Tensor:
    return (ours.sum() - theirs.sum()).exp().expand(ours.shape)


def by_segment(ours: Tensor, theirs: Tensor, our_way: Tokens, their_way: Tokens) -> Tensor:
    size = sum(map(len, our_way))
    found = align(token_ends([*map(len, our_way), 0], True), token_ends([*map(len, their_way), 0], True), size)
    assert UNALIGNED not in found.ours
    sent = torch.from_numpy(found.sums_of_theirs(theirs.numpy().astype(np.float32)))
    own = torch.zeros_like(sent).index_add(0, torch.from_numpy(found.ours), ours)
    return (own - sent).exp()[torch.from_numpy(found.ours)]


def capped(rule: Weights) -> Weights:
    return lambda *arguments: rule(*arguments).clamp(max=CAP)


RULES: dict[str, Weights] = {
    "none (swarm sampling)": no_ratio,
    "segment, cap 2 (the recipe)": capped(by_segment),
    "segment, no cap": by_segment,
    "response, cap 2": capped(by_response),
    "response, no cap": by_response,
}


def stray_share(policy: Policy) -> float:
    """Probability that a response is not cut as its text is encoded."""
    return sum(
        policy.probability(way)
        for text in texts()
        for way in cuts(text, policy.vocabulary)
        if way != canonical(text, policy.vocabulary)
    )


@functools.cache
def errors(habit: float) -> tuple[float, dict[str, tuple[float, float]]]:
    """(share of stray cuts, rule -> (relative error of the gradient, cosine with the truth)), means over SEEDS."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in RULES}
    strays: list[float] = []
    for seed in SEEDS:
        ours, theirs = random_policy(OURS, habit, seed), random_policy(THEIRS, habit, 100 + seed)
        truth = true_gradient(ours)
        strays.append((stray_share(ours) + stray_share(theirs)) / 2)
        for name, rule in RULES.items():
            gradient = expected_gradient(ours, theirs, rule)
            error = float((gradient - truth).norm() / truth.norm())
            cosine = float((gradient * truth).sum() / (gradient.norm() * truth.norm()))
            found[name].append((error, cosine))
    means = {name: tuple(np.mean(rows, axis=0).tolist()) for name, rows in found.items()}
    return float(np.mean(strays)), means  # type: ignore[return-value]


HABITS = {"never stray": 40.0, "seldom": 2.5, "often": 0.0}


def table() -> str:
    lines = ["| cuts that are not canonical | correction | error of the gradient | cosine |", "|---|---|---|---|"]
    for habit, nats in HABITS.items():
        share, rows = errors(nats)
        label = f"{habit} ({100 * share:.1f} %)"
        lines += [f"| {label} | {name} | {error:.2f} | {cosine:.2f} |" for name, (error, cosine) in rows.items()]
    return "\n".join(lines) + "\n"


def test_probabilities_of_all_responses_add_up_to_one() -> None:
    for vocabulary in (OURS, THEIRS):
        policy = random_policy(vocabulary, 1.0, 3)
        total = sum(policy.probability(way) for text in texts() for way in cuts(text, vocabulary))
        assert total == pytest.approx(1.0)


def test_the_ratio_of_responses_is_exact_where_nobody_strays() -> None:
    _, rows = errors(HABITS["never stray"])
    error, cosine = rows["response, no cap"]
    assert error < 1e-5 and cosine > 1 - 1e-9


def test_stray_cuts_bias_every_correction() -> None:
    _, rows = errors(HABITS["often"])
    assert all(error > 0.05 for error, _ in rows.values())


def test_the_documented_table_is_what_enumeration_gives() -> None:
    assert table() in DOCUMENT.read_text(encoding="utf-8")


if __name__ == "__main__":
    print(table(), end="")
