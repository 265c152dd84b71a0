"""Escaping of untrusted text (of models, peers, received files) for a terminal.

Invariant: line feed and tab are the only control characters left, so no text moves the cursor or hides other text.
"""

import shlex
from pathlib import Path


def printable(text: str) -> str:
    """The text with every non-printable character except line feed and tab replaced by its backslash escape."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """As `printable`, with each line feed replaced by a space; for a name or value within a line."""
    return printable(text).replace("\n", " ")


def as_argument(path: Path) -> str:
    """A path as one word of a command that people copy, in quotes where a shell would split or change it."""
    return printable(shlex.quote(str(path)))
