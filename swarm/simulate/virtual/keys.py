"""Cheap signatures for virtual swarms of hundreds of nodes: a keyed hash in place of Ed25519.

Invariant: nothing but the arithmetic differs (lengths, domains, and that another key, domain or message does not
verify), but anybody can compute such a signature: it stands for a real one only where nobody tries to.
"""

import hashlib

from swarm.identity import PUBLIC_KEY_BYTES, Identity


class HashIdentity(Identity):
    """An identity that signs with `hash_signature`."""

    def sign(self, domain: bytes, message: bytes) -> bytes:
        """64 bytes over key, domain and message."""
        return hash_signature(self.public_key, domain, message)


def hash_signature(public_key: bytes, domain: bytes, message: bytes) -> bytes:
    """SHA-512 of key, domain and message: as long as an Ed25519 signature."""
    return hashlib.sha512(public_key + domain + b"\0" + message).digest()


def verify_hash(public_key: bytes, domain: bytes, message: bytes, signature: bytes) -> bool:
    """As `swarm.identity.verify`, for signatures of a HashIdentity."""
    return len(public_key) == PUBLIC_KEY_BYTES and signature == hash_signature(public_key, domain, message)
