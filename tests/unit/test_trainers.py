"""Choice of a follower's trainer: the configured one, the previous one, the only one; never one of several."""

from pathlib import Path

import pytest

from swarm.clock import ManualClock
from swarm.testing.builders import make_advert
from swarm.types import Advert, NodeId, PolicyVersion, Role
from swarm.weight_sync.choose_trainer import FILE, TrainerChoice

FIRST, SECOND, OWN = "aa" * 32, "bb" * 32, "cc" * 32


def advert_of(node_id: NodeId, clock: ManualClock, *roles: Role, digest: bytes = bytes(32)) -> Advert:
    head = PolicyVersion(policy_id=node_id, step=0, digest=digest)
    expires_at_s = clock.now_s() + 100.0
    return make_advert(node_id, roles=roles or (Role.TRAINER,), head=head, expires_at_s=expires_at_s)


def trainers_of(directory: Path, clock: ManualClock, named: NodeId = "") -> TrainerChoice:
    return TrainerChoice(node_id=OWN, named=named, directory=directory, clock=clock)


def chosen(trainers: TrainerChoice, *adverts: Advert) -> NodeId:
    trainers.observe(adverts)
    return trainers.choose()


def test_the_only_trainer_is_chosen_and_among_several_nobody_until_the_adverts_of_the_others_expire(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    trainers = trainers_of(tmp_path, clock)
    first, second = advert_of(FIRST, clock), advert_of(SECOND, clock)
    assert chosen(trainers, advert_of(OWN, clock), advert_of("dd" * 32, clock, Role.GENERATOR)) == ""
    assert chosen(trainers, first, second) == "" and trainers.candidates == (FIRST, SECOND)
    assert chosen(trainers, second) == "", "one look-up that misses the other"
    clock.advance(101.0)
    assert chosen(trainers, advert_of(FIRST, clock)) == FIRST and trainers.candidates == ()


def test_a_trainer_whose_weights_cannot_be_had_is_listed_and_never_chosen(tmp_path: Path) -> None:
    clock = ManualClock()
    trainers = trainers_of(tmp_path, clock)
    first, second = advert_of(FIRST, clock, digest=b""), advert_of(SECOND, clock)
    assert chosen(trainers, first) == "" and trainers.without_weights == (FIRST,)
    assert chosen(trainers, first, second) == SECOND and trainers.candidates == ()


def test_who_is_named_comes_first_then_who_was_followed_before(tmp_path: Path) -> None:
    clock = ManualClock()
    trainers_of(tmp_path, clock).remember(FIRST)
    adverts = [advert_of(FIRST, clock), advert_of(SECOND, clock)]
    assert chosen(trainers_of(tmp_path, clock), *adverts) == FIRST
    assert chosen(trainers_of(tmp_path, clock, named=SECOND), *adverts) == SECOND


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"policy": 3}', '{"policy": "ada"}', "\x00"])
def test_a_damaged_memory_counts_as_none(tmp_path: Path, content: str) -> None:
    clock = ManualClock()
    (tmp_path / FILE).write_text(content)
    assert trainers_of(tmp_path, clock).choose() == ""


def test_what_cannot_be_remembered_stops_nobody(tmp_path: Path) -> None:
    clock = ManualClock()
    trainers = trainers_of(tmp_path / "missing", clock)
    trainers.remember(FIRST)
    assert trainers.choose() == ""
