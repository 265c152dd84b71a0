"""Text from elsewhere (models, peers, files that somebody sent) for a terminal.

Invariant: line feed and tab are the only control characters left, so no text moves the cursor or hides another.
"""


def printable(text: str) -> str:
    """The text with its other control characters, and what cannot be encoded, spelled out."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """The same on one line, for a name or a value beside others."""
    return printable(text).replace("\n", " ")
