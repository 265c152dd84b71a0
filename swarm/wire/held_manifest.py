"""Held manifest: the newest manifest seen of a run, stored with its signature in a node's or coordinator's directory.

Invariant: a loaded manifest was signed by the key stored with it. A damaged file stops the process, since continuing
without it could forget who may take part.
"""

from pathlib import Path
from typing import Any, Final

from swarm.config import EntryConfig, NodeConfig
from swarm.errors import ConfigError, StorageFull, SwarmError
from swarm.identity import node_id_of
from swarm.process import write_json
from swarm.read_files import read_json
from swarm.wire.run_manifest import MAX_MANIFEST_BYTES, RunManifest, SignedManifest, open_manifest

HELD: Final = "manifest.json"
_SHARED_GENERATION: Final = ("temperature", "max_new_tokens", "max_episode_tokens", "group_size", "largest_group")
_OWN_OF_ENVIRONMENT: Final = frozenset({"name", "exchange", "scored_from"})  # all other keys decide a task's reward
_VALUE_CHARS: Final = 60  # of a value in a message

Difference = tuple[str, str, str]
"""Key of node.toml, its value here, its value in the run's manifest."""


def save_held(directory: Path, signed: SignedManifest) -> None:
    """Stores a manifest in place of the held one. Raises StorageFull if the file cannot be written."""
    texts = {"public_key": signed.public_key.hex(), "signature": signed.signature.hex()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / HELD, {**texts, "manifest": signed.data.decode()}, is_durable=True)
    except OSError as error:
        raise StorageFull(f"{directory / HELD}: cannot be written: {error.strerror}; make room there") from None


def load_held(directory: Path, run_id: str) -> SignedManifest | None:
    """The held manifest; None if there is none. Raises ConfigError for a damaged file, or one of another run."""
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
    """A node's configuration with entry rules and coordinator key of the newest manifest.

    The node's own `denied` stays in force, and so does its own `established` unless that is `auto`.

    Args:
        config: configuration of the node, perhaps with values of an older manifest.
        held: the newest manifest; None if the node follows none, which leaves `config` unchanged.
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


def differences(config: NodeConfig, manifest: RunManifest) -> list[Difference]:
    """Keys that must be equal on every node of a run but differ here, sorted.

    An environment is compared if the manifest has one of the same name and the node exchanges its groups; a node may
    have other environments. The model is not compared.
    """
    limits = manifest.limits
    found: list[tuple[str, object, object]] = [
        ("exchange.max_group_bytes", config.exchange.max_group_bytes, limits.max_group_bytes),
        ("directory.shards", config.directory.shards, limits.directory_shards),
    ]
    for key in _SHARED_GENERATION:
        found.append((f"generator.{key}", getattr(config.generator, key), getattr(manifest.generator, key)))
    theirs = {each.name: each for each in manifest.environments}
    for env in config.environments:
        if env.exchange == "own" or env.name not in theirs:
            continue
        for key in type(env).model_fields.keys() - _OWN_OF_ENVIRONMENT:
            found.append((f"environments ({env.name}) {key}", getattr(env, key), getattr(theirs[env.name], key)))
    return sorted((key, _shown(here), _shown(there)) for key, here, there in found if here != there)


def in_words(found: list[Difference]) -> str:
    """At most four differences as text: `generator.max_new_tokens is 12 here and 8 in the run`."""
    shown = [f"{key} is {ours} here and {theirs} in the run" for key, ours, theirs in found[:4]]
    return "; ".join(shown) + (f"; and {len(found) - 4} more" if len(found) > 4 else "")


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _VALUE_CHARS else f"{text[: _VALUE_CHARS - 3]}..."
