"""What every directory of nodes promises: the bounds of the adverts that it keeps."""

from typing import Final

from swarm.types import Advert, NodeId

MAX_TTL_S: Final = 300.0
"""Longest time for which any directory keeps an advert, seconds."""


def check_own(advert: Advert, node_id: NodeId, run_id: str, now_s: float) -> None:
    """Asserts what every directory demands of an advert that its own node announces."""
    assert advert.node_id == node_id, f"{advert.node_id} is not this node, {node_id}"
    assert advert.run_id == run_id, f"run {advert.run_id!r} is not {run_id!r}"
    assert now_s < advert.expires_at_s <= now_s + MAX_TTL_S, (
        f"expiry in {advert.expires_at_s - now_s} s, at most {MAX_TTL_S}"
    )
