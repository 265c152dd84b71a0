"""The ratio of segments: what is known of a token decides which ratio it has."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.methods.segment_ratio import SegmentRatio, segment_sum
from swarm.objectives.part import Requirement, Scored
from swarm.objectives.parts.ratio import TokenRatio
from swarm.testing.batches import toy_batch, toy_scored
from swarm.types import Correction

NAN = math.nan


def scored(
    ids: list[list[int]] | None,
    sent: list[list[float]] | None,
    kinds: tuple[Correction, ...],
    mask: Tensor | None = None,
) -> Scored:
    """Log-probs of -1, -2, -3 for every rollout; behaviour log-probs of -2 where they are known."""
    count = len(kinds)
    mask = torch.ones((count, 3), dtype=torch.bool) if mask is None else mask
    behavior = torch.tensor([[-2.0 if kind is Correction.EXACT else NAN] * 3 for kind in kinds])
    batch = toy_batch(
        torch.zeros(count),
        mask,
        behavior_logprobs=torch.where(mask, behavior, 0.0),
        advantages=torch.ones((count, 3)),
        is_external=torch.ones(count, dtype=torch.bool),
        length=torch.full((count,), 3),
        corrections=kinds,
        segment_ids=None if ids is None else torch.tensor(ids),
        segment_logprobs=None if sent is None else torch.tensor(sent),
    )
    logprobs = torch.where(mask, torch.tensor([-1.0, -2.0, -3.0]).expand(count, 3), 0.0)
    return toy_scored(batch, logprobs=logprobs)


EXACT, WITHOUT, TEXT = Correction.EXACT, Correction.NO_LOGPROBS, Correction.TEXT_ONLY


def test_each_kind_has_the_ratio_that_exists_for_it() -> None:
    seen = scored([[-1] * 3, [-1] * 3, [0, 0, 1]], [[0.0] * 3, [0.0] * 3, [-2.5, 0.0, -3.5]], (EXACT, WITHOUT, TEXT))
    found = SegmentRatio(cap=1.5)(seen)
    expected = torch.tensor([[math.log(1.5), 0.0, -1.0], [0.0, 0.0, 0.0], [-0.5, -0.5, math.log(1.5)]])
    torch.testing.assert_close(found, expected)


def test_without_any_segment_it_is_the_token_ratio_under_a_cap() -> None:
    seen = scored(None, None, (EXACT, EXACT))
    torch.testing.assert_close(SegmentRatio(cap=3.0)(seen), TokenRatio()(seen).clamp(max=math.log(3.0)))


def test_a_segment_that_lost_a_token_has_no_ratio() -> None:
    mask = torch.tensor([[True, False, True]])
    found = SegmentRatio(cap=2.0)(scored([[0, 0, 1]], [[-9.0, 0.0, -2.5]], (TEXT,), mask))
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, -0.5]]))
    whole = SegmentRatio(cap=2.0, by_response=True)(scored([[0, 0, 1]], [[-9.0, 0.0, -2.5]], (TEXT,), mask))
    torch.testing.assert_close(whole, torch.tensor([[-0.5, 0.0, -0.5]]))


def test_what_a_sender_claims_is_bounded_on_both_sides() -> None:
    for claim, expected in ((-1e30, math.log(2.0)), (0.0, -6.0), (3e38, -20.0)):
        found = SegmentRatio()(scored([[0, 0, 0]], [[claim, 0.0, 0.0]], (TEXT,)))
        torch.testing.assert_close(found, torch.full((1, 3), expected))


def test_gradient_is_that_of_the_token_alone_times_its_segments_ratio() -> None:
    seen = scored([[0, 0, 1]], [[-3.5, 0.0, -3.5]], (TEXT,))
    logprobs = seen.logprobs.clone().requires_grad_()
    ratio = SegmentRatio()(replace(seen, logprobs=logprobs)).exp()
    (gradient,) = torch.autograd.grad(ratio.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([[0.5, 0.5, 0.5]]).exp())


def test_sums_of_segments_leave_out_what_belongs_to_none() -> None:
    ids = torch.tensor([[0, 1, 1, -1], [2, 0, 2, 0]])
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]])
    mask = torch.tensor([[True] * 4, [True, True, False, True]])
    assert segment_sum(values, ids, mask).tolist() == [[1.0, 6.0, 6.0, 0.0], [1.0, 10.0, 1.0, 10.0]]


@pytest.mark.parametrize("cap", [0.99, 0.0, -1.0, math.inf, math.nan])
def test_a_senseless_cap_is_refused(cap: float) -> None:
    with pytest.raises(ConfigError, match="cap"):
        SegmentRatio(cap=cap)
    assert SegmentRatio().needs == {Requirement.SEGMENT_LOGPROBS}
