"""The keyed hash of large virtual swarms keeps the form of a signature, and what it must refuse."""

from swarm.identity import DOMAIN_ADVERT, DOMAIN_GROUP, SIGNATURE_BYTES, Identity, verify
from swarm.simulate.virtual.shared_work import HashIdentity, verify_hash
from swarm.testing.builders import make_group
from swarm.types import RefusalReason, Refused, RolloutGroup
from swarm.wire.envelopes import open_group, seal_group

SEED = bytes(range(32))


def test_a_hash_signature_fits_its_key_domain_and_message_alone() -> None:
    ada, bob = HashIdentity.from_seed(SEED), HashIdentity.from_seed(SEED[::-1])
    signature = ada.sign(DOMAIN_GROUP, b"message")
    assert len(signature) == SIGNATURE_BYTES
    assert verify_hash(ada.public_key, DOMAIN_GROUP, b"message", signature)
    assert not verify_hash(bob.public_key, DOMAIN_GROUP, b"message", signature)
    assert not verify_hash(ada.public_key, DOMAIN_ADVERT, b"message", signature)
    assert not verify_hash(ada.public_key, DOMAIN_GROUP, b"other", signature)
    assert not verify_hash(b"", DOMAIN_GROUP, b"message", signature)


def test_a_real_node_refuses_it_and_a_virtual_one_refuses_a_real_signature() -> None:
    ada = HashIdentity.from_seed(SEED)
    hashed = seal_group(make_group(ada.node_id), ada)
    signed = seal_group(make_group(ada.node_id), Identity.from_seed(SEED))
    assert isinstance(open_group(hashed, 2**20, verify=verify_hash), RolloutGroup)
    for refused in (open_group(hashed, 2**20), open_group(signed, 2**20, verify=verify_hash)):
        assert isinstance(refused, Refused) and refused.reason is RefusalReason.WRONG_SIGNATURE
    assert isinstance(open_group(signed, 2**20, verify=verify), RolloutGroup)
