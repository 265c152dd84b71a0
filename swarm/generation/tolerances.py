"""How far the log-probs of an engine may be from a publisher's at equal weights: the one table.

Invariant: each value is above what was measured on natural text (docs/engines.md, benchmarks/mismatch.py) and below
what another model gives. The digest proves that the right weights arrived; this tells whether they took effect.
"""

from typing import Final

# Engine -> dtype -> mean |difference| in nats per token of the canaries.
TOLERANCE_NATS: Final = {
    "transformers": {"float32": 1e-4, "bfloat16": 0.1},
    "vllm": {"float32": 1e-3, "bfloat16": 0.2},
}


def tolerance_nats(engine: str, dtype: str, configured: float = 0.0) -> float:
    """The configured tolerance where it is above 0, else as measured for this engine and dtype."""
    return configured or TOLERANCE_NATS[engine][dtype]
