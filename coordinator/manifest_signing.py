"""Signing of the run's manifest: serial, expiry and the next key, kept in the coordinator's directory.

Invariant: no two manifests of one serial leave this directory, and a key that named its successor never names another.
"""

import contextlib
import logging
import os
from pathlib import Path
from typing import Final

from swarm.config import CoordinatorConfig
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.process import lock_directory
from swarm.types import short
from swarm.wire.held_manifest import load_held, save_held
from swarm.wire.run_manifest import RunManifest, SignedManifest, sign_manifest

logger = logging.getLogger(__name__)

_DAY_S: Final = 86_400.0


def sign_next(config: CoordinatorConfig, identity: Identity, manifest: RunManifest, now_s: float) -> SignedManifest:
    """Returns the manifest to serve: the last one, or a newly signed one.

    The last one is kept while its content is the same and, if it expires, more than half of its time is left.

    Args:
        config: configuration of the coordinator, with the next key and the days that a manifest is good.
        identity: key that signs.
        manifest: content to sign, without serial, expiry and next key.
        now_s: wall clock.

    Raises:
        ConfigError: next_key is not the one that this key named before, or it is this key; or the last manifest is
            damaged.
        StorageFull: the new manifest cannot be written.
    """
    if config.next_key == identity.node_id:
        raise ConfigError("next_key: it is this coordinator's own key; make a second one: swarm keys new PATH")
    last = load_held(config.dir, config.run_id)
    if last is not None and last.key != identity.node_id and last.manifest.next_key != identity.node_id:
        logger.warning(
            "the coordinator has another key than before, which was not named as the next one: nodes do not follow it",
            extra={"before": short(last.key), "now": short(identity.node_id)},
        )
        last = None
    if last is not None and last.key == identity.node_id:
        named = last.manifest.next_key
        if named and named != config.next_key:
            raise ConfigError(f"next_key: this key named {named} before, and nodes hold to that: set it again")
        if _is_as_new(last.manifest, manifest, config, now_s):
            return last
    wanted = {
        # By the clock, so that a coordinator that lost its directory does not begin with serials that nodes have seen.
        "serial": max(int(now_s), 0 if last is None else last.manifest.serial + 1),
        "expires_at_s": now_s + config.manifest_days * _DAY_S if config.manifest_days else 0.0,
        "next_key": config.next_key,
    }
    signed = sign_manifest(manifest.model_copy(update=wanted), identity)
    save_held(config.dir, signed)
    logger.info("manifest signed", extra={"serial": wanted["serial"]})
    return signed


def _is_as_new(last: RunManifest, manifest: RunManifest, config: CoordinatorConfig, now_s: float) -> bool:
    kept = {"serial": last.serial, "expires_at_s": last.expires_at_s, "next_key": config.next_key}
    if last.to_bytes() != manifest.model_copy(update=kept).to_bytes() or bool(last.expires_at_s) != bool(
        config.manifest_days
    ):
        return False
    return not last.expires_at_s or last.expires_at_s - now_s > 0.5 * config.manifest_days * _DAY_S


def rotate_key(config: CoordinatorConfig, key: Path) -> Identity:
    """Puts the next key in the place of the coordinator's key and returns it; the old file is kept beside it.

    Args:
        config: configuration of the coordinator.
        key: path of the next key.

    Raises:
        ConfigError: the key cannot be read, the last manifest did not name it, or the coordinator runs.
    """
    following = Identity.load(key)
    last = load_held(config.dir, config.run_id)
    if last is None or last.manifest.next_key != following.node_id:
        named = "nobody" if last is None or not last.manifest.next_key else last.manifest.next_key
        raise ConfigError(
            f"{key}: key {following.node_id} was not named as the next one; the last manifest names {named}"
        )
    lock = lock_directory(config.dir)  # one that runs would go on with the old key, and sign with it
    try:
        path = config.dir / "identity.key"
        kept = config.dir / f"identity.key.{short(last.key)}"
        with contextlib.suppress(FileExistsError, FileNotFoundError):  # kept before, or lost
            os.link(path, kept)
        draft = config.dir / f".identity.key.{short(following.node_id)}"
        draft.unlink(missing_ok=True)
        following.save(draft)
        draft.replace(path)
    finally:
        os.close(lock)
    return following
