"""Canary check: compares an engine's log-probs of a few texts with those of the version that it should serve.

The digest proves that the right weights arrived; canaries show that they took effect. Invariant: what cannot be
compared (NaN, another length, an infinity) counts as different. Each tolerance is above the mismatch measured on
natural text (docs/engines.md, benchmarks/mismatch.py) and below that of another model.
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from swarm.errors import WeightsRefused
from swarm.types import Canary, FloatArray, PolicyVersion

# Engine -> dtype -> mean |difference| in nats per token of the canaries.
TOLERANCE_NATS: Final = {
    "transformers": {"float32": 1e-4, "bfloat16": 0.1},
    "vllm": {"float32": 1e-3, "bfloat16": 0.2},
}

Score = Callable[[Sequence[Sequence[int]]], list[FloatArray]]  # `Generator.score`


def tolerance_nats(engine: str, dtype: str, configured: float = 0.0) -> float:
    """The configured tolerance; if that is 0, the entry of TOLERANCE_NATS for this engine and dtype."""
    return configured or TOLERANCE_NATS[engine][dtype]


def mismatch_nats(canaries: Sequence[Canary], score: Score) -> float:
    """Mean |difference| from the publisher's log-probs over all tokens but each canary's first. Raises as `score`.

    Returns:
        Nats per token; 0 if there is nothing to compare, infinity if a log-prob is not finite.
    """
    if not canaries:
        return 0.0
    own = score([canary.token_ids.tolist() for canary in canaries])
    differences = np.concatenate(
        [
            np.abs(np.asarray(mine, np.float64)[1:] - canary.logprobs.astype(np.float64)[1:])
            for mine, canary in zip(own, canaries, strict=True)
        ]
    )
    if not np.isfinite(differences).all():
        return float("inf")
    return float(differences.mean()) if differences.size else 0.0


def check_canaries(version: PolicyVersion, canaries: Sequence[Canary], score: Score, tolerance_nats: float) -> float:
    """Computes the mismatch of the canaries, in nats per token, and compares it with the tolerance.

    Raises:
        WeightsRefused: the mismatch exceeds the tolerance, or a canary cannot be scored.
    """
    try:
        mismatch = mismatch_nats(canaries, score)
    except ValueError as error:
        raise WeightsRefused(f"step {version.step}: a canary cannot be scored: {error}") from error
    if mismatch > tolerance_nats:
        raise WeightsRefused(
            f"step {version.step}: canary log-probs differ by {mismatch:.3g} nats on average, more than the tolerance "
            f"{tolerance_nats:.3g}"
        )
    return mismatch
