"""Versions that existed: one branch of our own lineage, and admission's verdict on a group that names another."""

from dataclasses import replace

import pytest

from swarm.clock import ManualClock
from swarm.config import NodeConfig, WeightsConfig
from swarm.exchange.known_versions import MAX_LINEAGES, KnownVersions
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import COSTS, Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import make_group, make_identity, make_sealed
from swarm.testing.nodes import make_admission, make_context
from swarm.types import PolicyVersion, RefusalReason, Refused, RolloutGroup, ScoredGroup, VersionSpan

TRAINER, FOLLOWER = make_identity(1), make_identity(2)


def version(step: int, weights: str = "main", policy_id: str = TRAINER.node_id) -> PolicyVersion:
    return PolicyVersion(policy_id=policy_id, step=step, digest=f"{weights} {step}".encode().ljust(32, b"."))


def made_by(*versions: PolicyVersion) -> RolloutGroup:
    """A group of the follower whose tokens those versions made, the first one from token 0 on."""
    group = make_group(FOLLOWER.node_id, texts=["77"] * 8)
    spans = tuple(VersionSpan(start=start, version=each) for start, each in enumerate(versions))
    rollouts = tuple(replace(r, trace=replace(r.trace, spans=spans)) for r in group.rollouts if r.trace is not None)
    return replace(group, policy_id=versions[0].policy_id, rollouts=rollouts)


def at_step(step: int) -> KnownVersions:
    versions = KnownVersions(TRAINER.node_id, ManualClock())
    for each in range(step + 1):
        versions.publish(version(each))
    return versions


def reason(versions: KnownVersions, *named: PolicyVersion) -> RefusalReason | None:
    finding = versions.check(made_by(*named))
    return None if finding is None else finding[0]


def test_a_group_may_name_what_we_published_and_nothing_else() -> None:
    versions = at_step(3)
    assert reason(versions, version(2)) is None
    assert reason(versions, version(2), version(3)) is None
    assert reason(versions, version(2, "forged")) is RefusalReason.BAD_VERSION
    assert reason(versions, version(2), version(3, "forged")) is RefusalReason.BAD_VERSION
    assert reason(versions, version(4)) is RefusalReason.BAD_VERSION
    assert reason(versions, replace(version(2), digest=b"")) is RefusalReason.BAD_VERSION


def test_versions_of_a_branch_that_a_rewind_left_are_refused_without_blame() -> None:
    versions = at_step(5)
    versions.publish(version(3))  # killed, and gone on from a checkpoint
    assert reason(versions, version(3)) is None
    assert reason(versions, version(4)) is RefusalReason.TOO_OLD
    versions.publish(version(4, "again"))
    assert reason(versions, version(4, "again")) is None
    assert reason(versions, version(4)) is RefusalReason.TOO_OLD, "the same step on another branch"
    assert reason(versions, version(5)) is RefusalReason.TOO_OLD
    assert reason(versions, version(4, "forged")) is RefusalReason.BAD_VERSION
    assert RefusalReason.TOO_OLD not in COSTS


def test_steps_made_again_bit_for_bit_exist_again() -> None:
    versions = at_step(5)
    versions.publish(version(3))
    versions.publish(version(4))
    assert reason(versions, version(4)) is None and reason(versions, version(5)) is RefusalReason.TOO_OLD


def test_a_step_that_was_skipped_publishes_the_same_version_again_and_changes_nothing() -> None:
    versions = at_step(3)
    versions.publish(version(3))
    assert reason(versions, version(2), version(3)) is None


def test_what_is_known_after_a_restart_comes_from_the_store_and_the_rest_is_no_lie() -> None:
    clock = ManualClock()
    versions = KnownVersions(TRAINER.node_id, clock)
    assert reason(versions, version(7)) is RefusalReason.FROM_THE_FUTURE, "nothing published yet: nobody lied"
    versions.restore([made_by(version(5), version(6)), made_by(version(8))], doubtful_s=600.0)
    versions.publish(version(6))
    assert reason(versions, version(5), version(6)) is None
    assert reason(versions, version(8)) is RefusalReason.TOO_OLD, "beyond the checkpoint"
    assert reason(versions, version(4)) is RefusalReason.TOO_OLD, "forgotten"
    for seems_false in (version(7), version(6, "of a branch that a crash before the last one left")):
        assert reason(versions, seems_false) is RefusalReason.TOO_OLD
    clock.advance(601.0)
    assert reason(versions, version(7)) is RefusalReason.BAD_VERSION
    assert reason(versions, version(6, "forged")) is RefusalReason.BAD_VERSION
    assert RefusalReason.FROM_THE_FUTURE not in COSTS


def test_after_a_restart_manifests_say_which_branch_goes_on_and_then_what_came_last() -> None:
    versions = KnownVersions(TRAINER.node_id, ManualClock())
    for known in (version(3), version(4, "again"), version(5, "again")):
        versions.record(known)  # of the manifests on the disk
    old, new = made_by(version(4), version(5)), made_by(version(6, "again"))
    versions.restore([old, made_by(version(6)), new], doubtful_s=0.0)
    versions.publish(version(6, "again"))
    assert reason(versions, version(4, "again"), version(5, "again"), version(6, "again")) is None
    assert reason(versions, version(4)) is reason(versions, version(6)) is RefusalReason.TOO_OLD


def test_of_a_followed_lineage_every_version_with_a_manifest_existed_whatever_its_branch() -> None:
    versions, other = KnownVersions(TRAINER.node_id, ManualClock()), "ab" * 32
    assert reason(versions, version(3, policy_id=other)) is None, "of a lineage of which nothing is known it is a claim"
    for step in (2, 3, 4):
        versions.record(version(step, policy_id=other))
    versions.record(version(3, "again", other))
    for weights in ("main", "again"):
        assert reason(versions, version(3, weights, other)) is None
    assert reason(versions, version(3, "forged", other)) is RefusalReason.BAD_VERSION
    assert reason(versions, version(9, policy_id=other)) is RefusalReason.FROM_THE_FUTURE, "a producer may be ahead"


def test_lineages_are_bounded_and_our_own_stays() -> None:
    versions = at_step(1)
    for number in range(MAX_LINEAGES + 5):
        versions.record(version(1, policy_id=f"{number:064x}"))
    assert reason(versions, version(1, "forged")) is RefusalReason.BAD_VERSION
    assert reason(versions, version(1, "forged", f"{0:064x}")) is None, "forgotten, so a claim again"
    assert reason(versions, version(1, "forged", f"{MAX_LINEAGES + 4:064x}")) is RefusalReason.BAD_VERSION


class Gate:
    """Admission at the trainer."""

    def __init__(self, has_followers: bool = True) -> None:
        clock = ManualClock()
        self.reputation = Reputation(clock, 6000)
        versions, peers = KnownVersions(TRAINER.node_id, clock), Peers(TRAINER.node_id)
        self.admission = make_admission(
            make_context(NodeConfig(weights=WeightsConfig(publish=has_followers)), TRAINER, clock=clock),
            MemoryGroupStore(clock, 2**24),
            versions=versions,
            peers=peers,
            reputation=self.reputation,
        )
        for step in range(4):
            versions.publish(version(step))
        peers.own_head = version(3)

    async def admit(self, *named: PolicyVersion) -> ScoredGroup | Refused:
        return await self.admission.admit(make_sealed(made_by(*named), FOLLOWER), FOLLOWER.node_id)


async def test_admission_takes_a_followers_group_as_one_of_ours_made_elsewhere() -> None:
    scored = await Gate().admit(version(2), version(3))
    assert isinstance(scored, ScoredGroup)
    assert not scored.is_made_here and scored.is_own_policy(TRAINER.node_id)


@pytest.mark.parametrize("named", [version(4), version(3, "forged")])
async def test_admission_blames_a_follower_that_invents_versions(named: PolicyVersion) -> None:
    gate = Gate()
    result = await gate.admit(named)
    assert isinstance(result, Refused) and result.reason is RefusalReason.BAD_VERSION
    assert gate.reputation.score(FOLLOWER.node_id) < 0


async def test_who_publishes_no_weights_has_no_followers() -> None:
    result = await Gate(has_followers=False).admit(version(3))
    assert isinstance(result, Refused) and result.reason is RefusalReason.BAD_VERSION


def test_what_a_follower_says_of_our_lineage_moves_nobodys_head() -> None:
    peers = Peers("c" * 64)
    own = version(8, policy_id=FOLLOWER.node_id)
    peers.learn_head(made_by(own))
    assert peers.heads[FOLLOWER.node_id] == own, "of its own lineage its signature is evidence"
    peers.learn_head(made_by(version(900)))
    assert peers.heads == {FOLLOWER.node_id: own}
    assert peers.delivered_steps[FOLLOWER.node_id] == 900, "it did deliver"
