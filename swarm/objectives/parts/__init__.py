"""Parts that at least two methods share, or that make a library for methods of one's own: a file for each kind.

Invariant: parts know nothing of methods; a method's own parts stand in its file.
"""
