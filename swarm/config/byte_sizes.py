"""Sizes and rates in bytes as text for people: 20GB, 1.5 GiB, 500kB/s.

Invariant: a parsed size is a whole number of bytes above 0; the error for any other text shows the form.
"""

import re
from typing import Final

from swarm.errors import ConfigError

_UNITS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_FORM: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?(/s)?\s*", re.IGNORECASE)


def parse_bytes(text: str, option: str, *, is_rate: bool = False) -> int:
    """Parses bytes, or bytes per second, from text such as "20GB", "1.5GiB" or "2MB/s"; k is 1000, ki is 1024.

    Args:
        text: number with an optional unit; upper and lower case are equal.
        option: name of the option, for the error message.
        is_rate: True: the text may end in /s.

    Raises:
        ConfigError: the text has another form, or is less than a byte.
    """
    form = _FORM.fullmatch(text)
    size = 0
    if form and (is_rate or not form[4]):
        size = round(float(form[1]) * (1024 if form[3] else 1000) ** _UNITS[form[2].lower()])
    if size < 1:
        example = "2MB/s or 500kB/s" if is_rate else "20GB or 500MiB"
        raise ConfigError(f"{option} {text!r}: write a number with a unit, such as {example}")
    return size


def byte_words(size: float) -> str:
    """A size as text in the largest decimal unit in which it is at least 1: 4.8 GB, 512 B."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**power:
            return f"{size / 1000**power:,.1f} {unit}"
    return f"{size:.0f} B"
