"""A node's own credential: the invitation in its directory, and the proof of work that it makes there.

Invariant: a proof is made outside the event loop, once an epoch; an interrupted search continues where it stopped.
"""

import asyncio
import contextlib
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.errors import ConfigError, SwarmError
from swarm.peers.entry import EntryRule
from swarm.process import write_json
from swarm.read_files import read_bounded, read_json
from swarm.types import JsonDict, NodeId
from swarm.wire.credentials import (
    Credential,
    Invitation,
    WorkProof,
    epoch_at,
    find_work,
    fits_invitation,
    invitation_from_text,
)

logger = logging.getLogger(__name__)

INVITATION: Final = "invitation.txt"  # in the directory of a node
WORK: Final = "work.json"
_MAX_FILE_BYTES: Final = 4096
_SAVE_EVERY_S: Final = 5.0
_LOG_EVERY_S: Final = 15.0
_RENEW_EVERY_S: Final = 3600.0


class OwnCredential:
    """Credential that a node shows to take part, kept in its directory.

    Example:
        own = OwnCredential(config, identity.node_id, rule, clock)
        await own.prepare()  # minutes where the run asks for a proof of work
        transport = GrpcTransport(..., credential=own.shown)
    """

    def __init__(self, config: NodeConfig, node_id: NodeId, rule: EntryRule, clock: Clock) -> None:
        self._config, self._node_id, self._rule, self._clock = config, node_id, rule, clock
        self._credential = Credential()
        self._is_changed = asyncio.Event()

    def shown(self) -> bytes:
        """The credential in its serialised form; b"" for a node that has none."""
        return self._credential.to_bytes()

    async def prepare(self) -> None:
        """Reads or makes the credential that the run asks for, so that this node itself would be admitted.

        Raises:
            ConfigError: the node cannot take part; the message names the fix.
        """
        entry, held = self._rule.config, self._credential.work
        invitation = await asyncio.to_thread(read_invitation, self._config.dir)
        needs_work = entry.kind == "work" and not self._rule.fresh().admits(
            self._node_id, Credential(invitation=invitation).to_bytes()
        )
        shown = Credential(invitation=invitation, work=held).to_bytes()
        is_new = held is not None and held.epoch == epoch_at(self._clock.now_s())
        if needs_work and not (is_new and self._rule.fresh().admits(self._node_id, shown)):
            search = WorkSearch(self._config.dir, self._config.run_id, self._node_id, entry.work_bits, self._clock)
            held = await search.run()  # until then the proof of the epoch before is shown
        self._credential = Credential(invitation=invitation, work=held)
        try:
            self._rule.fresh().require(self._node_id, self.shown())
        except SwarmError as error:
            fix = "" if entry.kind == "members" else ", then join with --invitation"
            raise ConfigError(f"entry: {error}{fix}") from None

    def request_renewal(self) -> None:
        """Has `keep` prepare the credential again at once, since the run's rule of entry changed."""
        self._is_changed.set()

    async def keep(self) -> None:
        """Prepares the credential again every hour, for a new epoch, and after `request_renewal`, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RENEW_EVERY_S):
                    await self._is_changed.wait()
            self._is_changed.clear()
            try:
                await self.prepare()
            except ConfigError as error:
                logger.error("other nodes refuse this one now", extra={"error": str(error)})


class WorkSearch:
    """A search for a proof of work, with its state in a file.

    Example:
        work = await WorkSearch(config.dir, "demo", node_id, entry.work_bits, clock).run()
    """

    def __init__(self, directory: Path, run_id: str, node_id: NodeId, bits: int, clock: Clock) -> None:
        self._path, self._clock = directory / WORK, clock
        self._run_id, self._node_id, self._bits = run_id, node_id, bits
        self._epoch = epoch_at(clock.now_s())
        self._is_over = threading.Event()
        self._began_s = self._saved_s = self._logged_s = clock.monotonic_s()
        self._first = 0

    async def run(self) -> WorkProof:
        """The proof of work: the one found earlier in this epoch, else a new one (minutes)."""
        work = await asyncio.to_thread(self._restore)
        if work is not None:
            return work
        logger.info(
            "making a proof of work, which this run asks of new nodes",
            extra={"mean_tries": 2**self._bits, "tried": self._first},
        )
        try:
            work = await asyncio.to_thread(
                find_work, self._run_id, self._node_id, self._epoch, self._bits, self._first, self._go_on
            )
        finally:
            self._is_over.set()  # also where the node is stopped: the thread ends, and the file says how far it came
        assert work is not None, "nobody but a cancellation breaks it off"
        await asyncio.to_thread(self._save, work.nonce, is_found=True)
        took_s = self._clock.monotonic_s() - self._began_s
        logger.info("proof of work made", extra={"tries": work.nonce + 1, "took_s": round(took_s, 1)})
        return work

    def _restore(self) -> WorkProof | None:
        """The proof found earlier in this epoch; else None, and the search begins where the last one stopped."""
        reached = _read_search(self._path, self._run_id, self._node_id, self._bits)
        if reached is None or reached.work.epoch != self._epoch:
            return None
        if reached.is_found:
            return reached.work
        self._first = reached.work.nonce
        return None

    def _go_on(self, nonce: int) -> bool:
        """Saves and logs the progress now and then; False ends the search. Runs in its thread before each try."""
        now_s = self._clock.monotonic_s()
        is_over = self._is_over.is_set()
        if is_over or now_s - self._saved_s > _SAVE_EVERY_S:
            self._saved_s = now_s
            self._save(nonce, is_found=False)
        if now_s - self._logged_s > _LOG_EVERY_S:
            self._logged_s = now_s
            rate = (nonce - self._first) / max(now_s - self._began_s, 1e-9)
            fields = {"tried": nonce, "mean_tries": 2**self._bits, "mean_s": round(2**self._bits / max(rate, 1e-9))}
            logger.info("making a proof of work", extra=fields)
        return not is_over

    def _save(self, nonce: int, *, is_found: bool) -> None:
        data = {"run_id": self._run_id, "node_id": self._node_id, "bits": self._bits, "epoch": self._epoch}
        try:
            write_json(self._path, cast(JsonDict, {**data, "nonce": nonce, "is_found": is_found}))
        except OSError as error:  # a full disk costs the progress, not the proof
            logger.warning("the proof of work was not saved", extra={"error": str(error)})


@dataclass(frozen=True, slots=True)
class _Reached:
    work: WorkProof
    is_found: bool  # False: the search goes on from its nonce


def _read_search(path: Path, run_id: str, node_id: NodeId, bits: int) -> _Reached | None:
    """The progress of a search; None if the file is missing, unreadable, or of another search."""
    try:
        data: JsonDict = read_json(path, _MAX_FILE_BYTES)
        kept = {key: data[key] for key in ("run_id", "node_id", "bits")}
        epoch, nonce, is_found = int(data["epoch"]), int(data["nonce"]), bool(data["is_found"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        logger.warning("the proof of work is unreadable, and is made again", extra={"path": str(path)})
        return None
    if kept != {"run_id": run_id, "node_id": node_id, "bits": bits} or not 0 <= nonce < 2**63:
        return None
    return _Reached(WorkProof(epoch=epoch, nonce=nonce), is_found)


def read_credential(config: NodeConfig, node_id: NodeId) -> Credential:
    """The credential in a node's directory; no proof of work is made. Raises ConfigError for a damaged invitation.

    Args:
        config: configuration of the node, with the values of the newest manifest.
        node_id: id of the node.
    """
    reached = _read_search(config.dir / WORK, config.run_id, node_id, config.entry.work_bits)
    work = reached.work if reached is not None and reached.is_found else None
    return Credential(invitation=read_invitation(config.dir), work=work)


def keep_invitation(directory: Path, text: str, run_id: str, node_id: NodeId) -> None:
    """Writes an invitation into a node's directory. Raises ConfigError if it is malformed or of another node or run."""
    invitation = invitation_from_text(text)
    if not fits_invitation(invitation, run_id, node_id):
        raise ConfigError(
            f"--invitation: it is not for node {node_id} in run {run_id}; ask for: swarm-node invite {node_id}"
        )
    (directory / INVITATION).write_text(text.strip() + "\n", encoding="utf-8")


def read_invitation(directory: Path) -> Invitation | None:
    """The invitation in a node's directory; None if there is none. Raises ConfigError if it cannot be used."""
    path = directory / INVITATION
    try:
        text = read_bounded(path, _MAX_FILE_BYTES).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; write the invitation into it again") from None
    try:
        return invitation_from_text(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
