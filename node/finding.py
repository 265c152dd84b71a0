"""What one check of `swarm doctor` found."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check and its outcome."""

    name: str
    is_ok: bool
    detail: str
    fix: str = ""
    is_fatal: bool = False
