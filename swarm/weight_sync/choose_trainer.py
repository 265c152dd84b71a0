"""Choice of the trainer to follow: the configured one, else the previous one, else the only one that publishes weights.

Invariant: no advert replaces a configured or previous trainer, and among several publishing trainers none is chosen.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.clock import Clock
from swarm.flow import BoundedTable
from swarm.peers.peer_table import MAX_PEERS
from swarm.process import write_json
from swarm.read_files import read_json
from swarm.types import Advert, NodeId, Role, short

logger = logging.getLogger(__name__)

FILE: Final = "followed.json"  # in the node's directory
_ID_CHARS: Final = 64
_MAX_FILE_BYTES: Final = 4096


@dataclass(eq=False, repr=False, kw_only=True)
class TrainerChoice:
    """The trainers that a follower may choose from. `choose` and `remember` use the disk: call them in threads.

    Example:
        choice.observe(adverts)
        policy_id = choice.choose()
        choice.remember(policy_id)  # once its versions arrive
    """

    node_id: NodeId  # our own
    named: NodeId  # `follow.policy`; empty where none is configured
    directory: Path  # of the node; remembers the previous trainer
    clock: Clock  # wall clock of the adverts

    def __post_init__(self) -> None:
        self._path = self.directory / FILE
        self._cached: NodeId | None = None  # the previous trainer; None until it is read
        self._until_s = BoundedTable[NodeId, float](MAX_PEERS)  # expiry of the newest advert of each publishing trainer
        self._weightless_until_s = BoundedTable[NodeId, float](MAX_PEERS)  # likewise of trainers without weights
        self.candidates: tuple[NodeId, ...] = ()  # several publishing trainers, none of which is chosen

    def observe(self, adverts: Sequence[Advert]) -> None:
        """Records the trainers in these adverts; each counts until its advert expires, even if later calls omit it."""
        for advert in adverts:
            if Role.TRAINER in advert.roles and advert.node_id != self.node_id:
                table = self._until_s if advert.head.digest else self._weightless_until_s
                table[advert.node_id] = advert.expires_at_s
        now_s = self.clock.now_s()
        for table in (self._until_s, self._weightless_until_s):
            for peer in [peer for peer, until_s in table.items() if until_s <= now_s]:
                del table[peer]

    @property
    def without_weights(self) -> tuple[NodeId, ...]:
        """Ids of the trainers that publish no weights, or none yet."""
        return tuple(sorted(self._weightless_until_s.keys() - self._until_s.keys()))

    def choose(self) -> NodeId:
        """Id of the trainer to follow; "" if none is configured or remembered and none or several publish weights."""
        chosen = self.named or self._previous()
        if chosen:
            return chosen
        found = sorted(self._until_s)
        candidates = tuple(found) if len(found) > 1 else ()
        if candidates and candidates != self.candidates:
            logger.warning(
                "several trainers: none is followed until follow.policy names one by its id",
                extra={"trainers": list(map(short, candidates))},
            )
        self.candidates = candidates
        return found[0] if len(found) == 1 else ""

    def remember(self, policy_id: NodeId) -> None:
        """Stores the trainer whose versions arrive, for the next start; a failed write is only logged."""
        if policy_id == self._previous():
            return
        try:
            write_json(self._path, {"policy": policy_id})
            self._cached = policy_id
        except OSError as error:
            logger.error(
                "the followed trainer could not be written to the disk; after a restart it may not be found again",
                extra={"error": str(error)},
            )

    def _previous(self) -> NodeId:
        if self._cached is None:
            self._cached = self._read()
        return self._cached

    def _read(self) -> NodeId:
        try:
            policy_id = read_json(self._path, _MAX_FILE_BYTES)["policy"]
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            extra = {"path": str(self._path), "error": str(error)}
            logger.error("the trainer followed before cannot be read; one is chosen anew", extra=extra)
            return ""
        return policy_id if isinstance(policy_id, str) and len(policy_id) == _ID_CHARS else ""
