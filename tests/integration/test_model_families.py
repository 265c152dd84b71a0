"""Families of models through load, generation, learning, weights, adapters, export and serving, against transformers.

Derivation: each log-prob is compared with a forward pass of plain transformers in float32 and in float64.
"""

from pathlib import Path

import pytest

from benchmarks.model_families import FAMILIES, MOST_NATS, row, survey

TABLE = (Path(__file__).parents[2] / "docs/models.md").read_text()
ALWAYS = ("Qwen2.5", "Gemma 3")  # null tokens and bos; windows, norms of its own, tied embeddings

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.sweep) for name in FAMILIES]
)
def test_a_family_is_trained_right_or_refused_by_name(name: str, tmp_path: Path) -> None:
    found = survey(FAMILIES[name], tmp_path)
    assert max(found.engine_nats, found.exact_nats, found.learner_nats) < MOST_NATS
    documented = next(line for line in TABLE.splitlines() if line.startswith(f"| {name} ("))
    own, theirs = (line.split(" | ") for line in (row(name, found), documented))
    del own[4], theirs[4]  # the low bits are the machine's
    assert own == theirs
