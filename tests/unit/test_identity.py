"""Identity: keys, files and signatures."""

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from swarm.errors import ConfigError
from swarm.identity import DOMAIN_ADVERT, DOMAIN_GROUP, Identity, node_id_of, verify


def test_node_id_is_the_sha256_of_the_public_key_of_rfc_8032():
    # RFC 8032, 7.1, test 1: secret key and its public key; the id is sha256sum of the latter.
    identity = Identity.from_seed(bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"))
    assert identity.public_key.hex() == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert identity.node_id == "21fe31dfa154a261626bf854046fd2271b7bed4b6abe45aa58877ef47f9721b9"
    assert node_id_of(identity.public_key) == identity.node_id


def test_signature_holds_for_one_domain_message_and_key_only():
    ours, other = Identity.create(), Identity.create()
    signature = ours.sign(DOMAIN_GROUP, b"message")
    assert verify(ours.public_key, DOMAIN_GROUP, b"message", signature)
    assert not verify(ours.public_key, DOMAIN_ADVERT, b"message", signature)
    assert not verify(ours.public_key, DOMAIN_GROUP, b"messagf", signature)
    assert not verify(other.public_key, DOMAIN_GROUP, b"message", signature)


def test_domain_and_message_cannot_trade_bytes():
    identity = Identity.create()
    signature = identity.sign(b"swarm.v1.a", b"bc")
    assert not verify(identity.public_key, b"swarm.v1.ab", b"c", signature)


@pytest.mark.parametrize(
    "key",
    [b"", b"\xff" * 32, b"\0" * 32, b"x" * 31, b"x" * 33, b"x" * 10_000],
    ids=["none", "ones", "zeros", "short", "long", "huge"],
)
@pytest.mark.parametrize("signature", [b"", b"\xff" * 64, b"\0" * 64, b"x" * 65], ids=["none", "ones", "zeros", "long"])
def test_verify_of_hostile_input_is_false(key: bytes, signature: bytes):
    assert verify(key, DOMAIN_GROUP, b"", signature) is False


def test_saved_key_loads_again_and_only_its_owner_can_read_it(tmp_path: Path):
    identity = Identity.create()
    path = tmp_path / "new" / "node.key"
    identity.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load(path).node_id == identity.node_id
    assert [entry.name for entry in path.parent.iterdir()] == ["node.key"]


def test_save_refuses_to_overwrite(tmp_path: Path):
    path = tmp_path / "node.key"
    first = Identity.create()
    first.save(path)
    with pytest.raises(ConfigError, match="exists"):
        Identity.create().save(path)
    assert Identity.load(path).node_id == first.node_id
    assert [entry.name for entry in tmp_path.iterdir()] == ["node.key"]


def test_save_into_an_impossible_place_is_a_config_error(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot write"):
        Identity.create().save(tmp_path / "file" / "node.key")


def test_raw_seed_file_loads(tmp_path: Path):
    path = tmp_path / "seed"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o600)
    assert Identity.load(path).node_id == Identity.from_seed(bytes(range(32))).node_id


def test_key_readable_by_others_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "seed"
    path.write_bytes(bytes(32))
    path.chmod(0o644)
    Identity.load(path)
    assert "readable by others" in caplog.text


def _pem(key: object, password: bytes | None = None) -> bytes:
    encryption = BestAvailableEncryption(password) if password else NoEncryption()
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 31,
        b"-----BEGIN PRIVATE KEY-----\nnot base64\n-----END PRIVATE KEY-----\n",
        b"x" * 5000,
        _pem(generate_private_key(SECP256R1())),
        _pem(Ed25519PrivateKey.generate(), b"password"),
    ],
    ids=["empty", "short", "broken pem", "huge", "other algorithm", "encrypted"],
)
def test_bad_key_file_is_a_config_error_that_names_it(tmp_path: Path, content: bytes):
    path = tmp_path / "bad.key"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.key"):
        Identity.load(path)


def test_missing_key_file_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="swarm keys new"):
        Identity.load(tmp_path / "none")


def test_seed_of_another_length_is_a_config_error():
    with pytest.raises(ConfigError, match="31 bytes"):
        Identity.from_seed(bytes(31))


def test_repr_shows_no_secret():
    identity = Identity.from_seed(bytes(32))
    assert repr(identity) == f"Identity({identity.node_id[:8]})"


def test_key_of_small_order_never_verifies():
    # y = 1 is the neutral element: with R = it and S = 0 the equation S B = R + k A holds for any message.
    neutral = b"\1" + bytes(31)
    assert not verify(neutral, DOMAIN_GROUP, b"anything", neutral + bytes(32))
    assert not verify(b"\1" + bytes(30) + b"\x80", DOMAIN_GROUP, b"anything", neutral + bytes(32))
