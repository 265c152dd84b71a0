"""The TLS layer below a session: an ephemeral certificate per process, and how a client learns one.

Invariant: a certificate proves nothing by itself. Both sides trust a connection only after the
handshake of `swarm.wire.session`, whose signatures cover the certificate's digest.
"""

import asyncio
import hashlib
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, cast

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from swarm.errors import Unavailable

CERTIFICATE_NAME: Final = "swarm-node"
MAX_CERTIFICATE_BYTES: Final = 8192
# Validity is meaningless for a key that lives as long as its process, and a node whose clock is a
# year off must still connect.
_NOT_BEFORE: Final = datetime(2000, 1, 1, tzinfo=UTC)
_NOT_AFTER: Final = datetime(2100, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A self-signed P-256 certificate and its key."""

    key_pem: bytes
    pem: bytes
    digest: bytes  # SHA-256 of the DER form, 32 bytes


def create_certificate() -> Certificate:
    """A new certificate for this process."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CERTIFICATE_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, SHA256())
    )
    return Certificate(
        key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        pem=certificate.public_bytes(Encoding.PEM),
        digest=hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest(),
    )


async def fetch_certificate(host: str, port: int) -> bytes:
    """The certificate (DER) that a server shows to anyone. The caller sets the deadline.

    Raises:
        Unavailable: nobody answers TLS with HTTP/2 there.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=CERTIFICATE_NAME)
    except (OSError, ValueError) as error:
        raise Unavailable(f"no TLS connection: {type(error).__name__}") from None
    try:
        connection = cast(ssl.SSLObject, writer.get_extra_info("ssl_object"))
        der = connection.getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()
    if not 0 < len(der) <= MAX_CERTIFICATE_BYTES:
        raise Unavailable(f"certificate of {len(der)} bytes, bound {MAX_CERTIFICATE_BYTES}")
    return der
