"""Corrections at their edges: fresh data passes, hostile log-probs stay finite, a kept mean is within its budget.

Their numbers are checked in tests/golden.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarm.objectives.methods.a3po import InterpolatedMismatch
from swarm.objectives.methods.dppo import BernoulliDivergenceMask
from swarm.objectives.methods.icepop import MaskedMismatch
from swarm.objectives.methods.m2po_mask import SecondMomentMask
from swarm.objectives.methods.minirl import SignGate
from swarm.objectives.methods.opsm import OffPolicySequenceMask
from swarm.objectives.methods.prime_rl import ProbabilityBand
from swarm.objectives.part import CorrectionPart, Requirement, Scored
from swarm.objectives.parts.mismatch_correction import (
    GeometricRejection,
    K3Rejection,
    MaskedSequenceMismatch,
    Mismatch,
    ProbabilityDifferenceMask,
    TruncatedMismatch,
    TruncatedSequenceMismatch,
    Veto,
)
from swarm.testing.batches import toy_batch, toy_scored

CORRECTIONS: tuple[type[CorrectionPart], ...] = (
    Mismatch,
    TruncatedMismatch,
    TruncatedSequenceMismatch,
    MaskedMismatch,
    MaskedSequenceMismatch,
    GeometricRejection,
    K3Rejection,
    Veto,
    OffPolicySequenceMask,
    ProbabilityDifferenceMask,
    BernoulliDivergenceMask,
    ProbabilityBand,
    SignGate,
    SecondMomentMask,
    InterpolatedMismatch,
)
WEIGHTS = {Mismatch, TruncatedMismatch, TruncatedSequenceMismatch, MaskedMismatch, MaskedSequenceMismatch}


def make_scored(
    behavior: list[float], current: list[float], advantage: float = 1.0, proximal: list[float] | None = None
) -> Scored:
    """One rollout with a hole behind its tokens; without `proximal` the policy is its own (one update)."""

    def row(values: list[float]) -> Tensor:
        return torch.tensor([[*values, 0.0]])

    mask = torch.tensor([[True] * len(behavior) + [False]])
    batch = toy_batch(
        torch.tensor([1.0]),
        mask,
        behavior_logprobs=row(behavior),
        age_steps=torch.tensor([3]),
        proximal_logprobs=None if proximal is None else row(proximal),
    )
    return toy_scored(batch, logprobs=row(current).requires_grad_(), advantages=torch.where(mask, advantage, 0.0))


def factors(part: CorrectionPart, scored: Scored) -> list[float]:
    return part(scored)[scored.mask].tolist()


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_fresh_data_is_neither_weighted_nor_dropped(correction: type[CorrectionPart], advantage: float) -> None:
    same = [-0.1, -2.0, -9.0]
    assert factors(correction(), make_scored(same, same, advantage)) == [1.0, 1.0, 1.0]
    assert factors(correction(), make_scored(same, same, advantage, same)) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_factors_are_finite_not_negative_and_constant_whatever_a_peer_sends(
    correction: type[CorrectionPart], advantage: float
) -> None:
    hostile = [0.0, -1e-9, -50.0, -1e30]
    for behavior, current in ((hostile, hostile[::-1]), (hostile[::-1], hostile), (hostile, [-1.0] * 4)):
        found = correction()(make_scored(behavior, current, advantage))
        assert found.isfinite().all() and (found >= 0).all() and not found.requires_grad
        if correction not in WEIGHTS | {InterpolatedMismatch}:
            assert set(found.flatten().tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_step_without_trained_tokens_is_no_error(correction: type[CorrectionPart]) -> None:
    found = correction()(make_scored([], []))
    assert found.shape == (1, 1) and found.isfinite().all()


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_that_reads_the_generator_says_so(correction: type[CorrectionPart]) -> None:
    needs = correction().needs
    assert needs == (
        {Requirement.PROXIMAL_LOGPROBS} if correction is SignGate else needs | {Requirement.BEHAVIOR_LOGPROBS}
    )


def test_a_weight_is_of_the_proximal_policy_where_there_is_one() -> None:
    scored = make_scored([-1.0], [-0.1], proximal=[-1.5])
    assert factors(Mismatch(), scored) == pytest.approx([math.exp(-0.5)])


@given(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.21, 0.5, 1.0, -0.1, -0.3, -2.0]), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_the_second_moment_of_what_is_kept_is_in_the_budget(gaps: list[float]) -> None:
    scored = make_scored([-3.0] * len(gaps), [-3.0 + gap for gap in gaps])
    scored = replace(scored, logprobs=scored.logprobs.double())
    kept = factors(SecondMomentMask(budget=0.04), scored)
    squares = [gap**2 for gap in gaps]
    inside = [square for square, is_kept in zip(squares, kept, strict=True) if is_kept]
    dropped = [square for square, is_kept in zip(squares, kept, strict=True) if not is_kept]
    assert inside and (max(inside) < min(dropped, default=math.inf))
    if max(inside) > min(inside):
        assert sum(inside) / len(inside) < 0.04 * (1 + 1e-5)
    if dropped:
        smallest = [square for square in squares if square <= min(dropped) + 1e-9]
        assert sum(smallest) / len(smallest) >= 0.04 * (1 - 1e-5), "one more value would have fitted"
