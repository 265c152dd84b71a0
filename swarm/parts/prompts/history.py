"""What is remembered of prompts: a bounded table, the prompt seen last at its end.

Invariant: a table never grows beyond its bound, and its entries are plain JSON data.
"""

from collections.abc import Mapping
from typing import TypeVar

from swarm.errors import ConfigError

Entry = TypeVar("Entry")


def with_entry(table: Mapping[str, Entry], key: str, entry: Entry, limit: int) -> dict[str, Entry]:
    """The table with that entry as its newest, without the oldest ones beyond `limit`."""
    kept = {other: value for other, value in table.items() if other != key}
    kept[key] = entry
    for other in list(kept)[: max(0, len(kept) - limit)]:
        del kept[other]
    return kept


def check_limit(limit: int) -> None:
    """Raises ConfigError where nothing could be remembered."""
    if limit < 1:
        raise ConfigError(f"remembers: {limit} prompts are none")
