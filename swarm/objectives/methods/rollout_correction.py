"""Rollout correction: truncation, masking or rejection by the gap between generator and learner; one recipe each.

rho_t = pi_old(token) / mu(token) differs from 1 because of the generator's kernels and the age of the data. The
factor multiplies PPO's loss around pi_old; the last recipe leaves pi_old out and weights REINFORCE.
"""

from dataclasses import replace

from swarm.objectives.parts import (
    Clip,
    DetachedClip,
    FullSequenceRatio,
    GeometricRejection,
    GroupZScore,
    K3Rejection,
    MaskedSequenceMismatch,
    RolloutSum,
    TokenMean,
    TokenRatio,
    TruncatedMismatch,
    TruncatedSequenceMismatch,
    Veto,
)
from swarm.objectives.recipe import Recipe

SEQ_TIS = Recipe(
    name="seq_tis",
    title="When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch",
    acronym="Seq-TIS",
    url="https://richardli.xyz/rl-collapse",
    verification="code",
    about="Truncated sequence mismatch (TIS by response): the generator's gap as a product over the response, cut "
    "at 2, on all its tokens. Unbiased before it is cut, with more variance than by token. Ours: GRPO's clip "
    "with a token mean as the host, cap 2 (verl advises 2 to 10). Formula: min(prod_t pi_old/mu, 2) on PPO's "
    "clip around pi_old, token mean.",
    advantage=GroupZScore(),
    ratio=TokenRatio(against="proximal"),
    weight=Clip(low=0.2, high=0.2),
    corrections=(TruncatedSequenceMismatch(cap=2.0),),
    aggregate=TokenMean(),
)

SEQ_MIS = replace(
    SEQ_TIS,
    name="seq_mis",
    acronym="Seq-MIS",
    about="Masked sequence mismatch (MIS by response): responses whose probability at generator and learner differs "
    "too much are dropped as a whole. Dropped responses stay in the denominator. Ours: GRPO's clip with a "
    "token mean as the host, the lower bound 0.5 (TRL has none by default); its upper bound is 3. Formula: "
    "the product where it is in [.5, 3], else 0, on PPO's clip, token mean.",
    corrections=(MaskedSequenceMismatch(low=0.5, high=3.0),),
)

TIS_VETO = replace(
    SEQ_TIS,
    name="tis_veto",
    acronym="TIS-veto",
    about="Vetoed mismatch (TIS by token with a veto): a response with one token that the policy would never give "
    "is dropped as a whole. Such a token marks a broken record or a broken kernel rather than a stale policy. "
    "Ours: GRPO's clip around the start of the update and a token mean as the host. Formula: min(rho, 2) on "
    "PPO's clip around pi_old, no response with a rho under 1e-4, token mean.",
    corrections=(TruncatedMismatch(cap=2.0), Veto(least=1e-4)),
)

GEO_RS = replace(
    SEQ_TIS,
    name="geo_rs",
    acronym="Geo-RS",
    about="Geometric rejection (Geo-RS): responses whose length-normalised mismatch leaves a narrow band are "
    "dropped, the others not weighted. The band of 0.1 % is meant for engine noise; data of another policy "
    "version is refused almost wholly, so widen it for stale rollouts. Ours: GRPO's clip around the start of "
    "the update and a token mean as the host. Formula: PPO's clip around pi_old on responses with exp(mean "
    "log rho) in [.999, 1.001], token mean.",
    corrections=(GeometricRejection(low=0.999, high=1.001),),
)

K3_RS = replace(
    SEQ_TIS,
    name="k3_rs",
    acronym="K3-RS",
    about="K3 rejection (K3-RS): responses whose mean k3 divergence from the generator exceeds 0.01 are dropped, "
    "the others not weighted. Tokens that became likelier and tokens that became rarer do not cancel, as they "
    "do in `geo_rs`. Ours: GRPO's clip around the start of the update and a token mean as the host. Formula: "
    "PPO's clip around pi_old on responses with mean(rho - log rho - 1) at most .01, token mean.",
    corrections=(K3Rejection(limit=0.01),),
)

BYPASS_PG_SEQ_TIS = replace(
    SEQ_TIS,
    name="bypass_pg_seq_tis",
    acronym="Bypass-PG-Seq-TIS",
    about="Truncated sequence reinforce (Bypass mode): the proximal policy is left out, REINFORCE is weighted by "
    "the whole response's ratio, cut at 2. No clip and no extra forward pass: pi_old is taken to be the "
    "generator. Ours: the group z-score. Formula: (1/N) sum of -sg[min(prod_t pi/mu, 2)] A log pi.",
    ratio=FullSequenceRatio(),
    weight=DetachedClip(low=1.0, high=1.0),
    aggregate=RolloutSum(),
    corrections=(),
)
