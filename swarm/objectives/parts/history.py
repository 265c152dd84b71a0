"""What parts remember by prompt: plain JSON records, the oldest forgotten.

Invariant: never more than `limit` records, whatever prompts other nodes invent.
"""

from collections.abc import Mapping
from typing import Any

MAX_PROMPTS = 20_000
"""Prompts a part remembers."""


def renewed(records: Mapping[str, Any], news: Mapping[str, Any], limit: int = MAX_PROMPTS) -> dict[str, Any]:
    """`records` with `news` in their place, moved to the end; of more than `limit` the oldest are left out."""
    kept = {key: value for key, value in records.items() if key not in news} | dict(news)
    return dict(list(kept.items())[max(0, len(kept) - limit) :])
