"""The newest manifest seen of a run, kept in the directory of a node or coordinator with its signature.

Invariant: what is read back was signed by the key that it names; a damaged file stops the process, since going on
without it could mean to forget who may take part.
"""

from pathlib import Path
from typing import Any, Final

from swarm.config import EntryConfig, NodeConfig
from swarm.errors import ConfigError, StorageFull, SwarmError
from swarm.identity import node_id_of
from swarm.process import read_json, write_json
from swarm.wire.run_manifest import MAX_MANIFEST_BYTES, SignedManifest, open_manifest

HELD: Final = "manifest.json"


def save_held(directory: Path, signed: SignedManifest) -> None:
    """Replaces the manifest that is held. Raises StorageFull where it cannot be written."""
    texts = {"public_key": signed.public_key.hex(), "signature": signed.signature.hex()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / HELD, {**texts, "manifest": signed.data.decode()}, is_durable=True)
    except OSError as error:
        raise StorageFull(f"{directory / HELD}: cannot be written: {error.strerror}; make room there") from None


def load_held(directory: Path, run_id: str) -> SignedManifest | None:
    """The manifest that is held; None where there is none. Raises ConfigError for a damaged file."""
    path = directory / HELD
    try:
        kept: dict[str, Any] = read_json(path, 4 * MAX_MANIFEST_BYTES)
        public_key = bytes.fromhex(kept["public_key"])
        signature, data = bytes.fromhex(kept["signature"]), str(kept["manifest"]).encode()
        return open_manifest(data, public_key, signature, node_id_of(public_key), run_id)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, SwarmError) as error:
        raise ConfigError(
            f"{path}: damaged, or of another run ({str(error)[:200]}); delete it, and the configuration counts"
        ) from None


def with_held(config: NodeConfig, held: SignedManifest | None, own: EntryConfig | None = None) -> NodeConfig:
    """A node's configuration with who may take part and the coordinator's key as the newest manifest says.

    What the node's own file denies stays denied, and whose groups count in full is as its own `established` says
    unless that is `auto`.

    Args:
        config: of the node, perhaps with what an older manifest said.
        held: the newest one; None where no manifest is followed.
        own: `entry` of the node's own file; None: that of `config`.
    """
    if held is None:
        return config
    own, entry = own or config.entry, held.manifest.entry
    denied = tuple(dict.fromkeys((*entry.denied, *own.denied)))
    established = entry.established if own.established == "auto" else own.established
    entry = entry.model_copy(update={"denied": denied, "established": established})
    coordinator = config.coordinator.model_copy(update={"fingerprint": held.key})
    return config.model_copy(update={"entry": entry, "coordinator": coordinator})
