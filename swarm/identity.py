"""Node identity: one Ed25519 key, whose public half hashes to the node id.

Invariant: every signature covers a domain tag, so that the signature of a group can never serve as the signature of
an advert or a handshake.
"""

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from swarm.errors import ConfigError
from swarm.read_files import read_bounded
from swarm.types import NodeId

logger = logging.getLogger(__name__)

# Purpose of a signature. Tags never contain a NUL byte: one NUL separates tag and message.
DOMAIN_GROUP: Final = b"swarm.v1.group"
DOMAIN_ADVERT: Final = b"swarm.v1.advert"
DOMAIN_CHALLENGE: Final = b"swarm.v1.challenge"
DOMAIN_HELLO: Final = b"swarm.v1.hello"
DOMAIN_MANIFEST: Final = b"swarm.v1.manifest"
DOMAIN_INVITATION: Final = b"swarm.v1.invitation"
DOMAIN_EXPORT: Final = b"swarm.v1.export"

PUBLIC_KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64
SEED_BYTES: Final = 32
_MAX_FILE_BYTES: Final = 4096

# The points of small order, canonical or not, sign bit cleared: under such a key one signature fits
# every message. Source: libsodium, ge25519_has_small_order.
_SMALL_ORDER: Final = frozenset(
    bytes.fromhex(point)
    for point in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


Verify = Callable[[bytes, bytes, bytes, bytes], bool]
"""(public key, domain, message, signature) -> True if the signature is valid, as in `verify`."""


def node_id_of(public_key: bytes) -> NodeId:
    """The node id of a public key: lower-case hex SHA-256, 64 characters."""
    return hashlib.sha256(public_key).hexdigest()


def is_hex_digest(text: str) -> bool:
    """True for 64 lower-case hex digits, the form of a SHA-256 digest and of a node id."""
    return re.fullmatch(r"[0-9a-f]{64}", text) is not None


def verify(public_key: bytes, domain: bytes, message: bytes, signature: bytes) -> bool:
    """True if `signature` is valid for the key, domain and message; never raises for any bytes.

    Args:
        public_key: 32 bytes, unchecked; a key of small order is refused.
        domain: one of the DOMAIN_ tags.
        message: the bytes that were signed.
        signature: 64 bytes, unchecked.
    """
    if len(public_key) != PUBLIC_KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    if public_key[:-1] + bytes([public_key[-1] & 0x7F]) in _SMALL_ORDER:
        return False
    try:
        _public_key_of(public_key).verify(signature, domain + b"\0" + message)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=1024)  # a node verifies the same few keys again and again
def _public_key_of(raw: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(raw)


class Identity:
    """The private key of this node.

    Example:
        identity = Identity.create()
        signature = identity.sign(DOMAIN_GROUP, b"...")
        assert verify(identity.public_key, DOMAIN_GROUP, b"...", signature)
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._public_key = key.public_key().public_bytes_raw()
        self._node_id = node_id_of(self._public_key)

    @classmethod
    def create(cls) -> "Identity":
        """Creates a new random identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """Derives an identity from a 32-byte seed: the same seed gives the same key.

        Raises:
            ConfigError: the seed does not have 32 bytes.
        """
        if len(seed) != SEED_BYTES:
            raise ConfigError(f"identity seed: {len(seed)} bytes, expected {SEED_BYTES}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Reads a key file: an unencrypted PEM (PKCS 8) Ed25519 key, or a raw 32-byte seed.

        Warns in the log if other users can access the file.

        Raises:
            ConfigError: the file cannot be read, or holds no such key.
        """
        try:
            data, mode = read_bounded(path, _MAX_FILE_BYTES), path.stat().st_mode
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot read the key: {error.strerror}; create one with `swarm keys new`"
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path}: no key: {error}") from None
        if mode & 0o077:
            logger.warning("key file is readable by others; use chmod 600", extra={"path": str(path)})
        return cls.from_seed(data) if len(data) == SEED_BYTES else cls(_key_of_pem(data, path))

    def save(self, path: Path) -> None:
        """Writes the key as PEM with mode 0600: all or nothing, and never over an existing file.

        Raises:
            ConfigError: the file exists or cannot be written.
            OSError: the file system has no hard links.
        """
        pem = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_private(draft, pem)
        except OSError as error:
            raise ConfigError(f"{path}: cannot write the key: {error.strerror}") from None
        try:
            # A hard link appears whole or not at all, and fails where the name is taken.
            path.hardlink_to(draft)
        except FileExistsError:
            raise ConfigError(f"{path}: exists; a key is never overwritten, move it away first") from None
        finally:
            draft.unlink()

    @property
    def node_id(self) -> NodeId:
        """Hex SHA-256 of the public key."""
        return self._node_id

    @property
    def public_key(self) -> bytes:
        """Raw Ed25519 public key, 32 bytes."""
        return self._public_key

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """Signs the domain tag and the message; returns the signature, 64 bytes. A tag must not contain a NUL byte."""
        assert b"\0" not in domain, domain
        return self._key.sign(domain + b"\0" + message)

    def __repr__(self) -> str:
        return f"Identity({self._node_id[:8]})"


def _key_of_pem(data: bytes, path: Path) -> Ed25519PrivateKey:
    fix = f"expected an unencrypted Ed25519 PEM key or a raw {SEED_BYTES}-byte seed"
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: not a key: over {_MAX_FILE_BYTES} bytes; {fix}")
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path}: not a usable key ({len(data)} bytes); {fix}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: a {type(key).__name__}; {fix}")
    return key


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
