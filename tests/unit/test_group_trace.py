"""`swarm trace`: one group through the logs and stores of the nodes that saw it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logged_events import make, write_events
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.clock import ManualClock
from swarm.errors import ConfigError
from swarm.events import (
    EarlierRefusals,
    Event,
    GroupAdmitted,
    GroupGivenUp,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupUse,
    NodeStarted,
    StepMade,
)
from swarm.exchange.group_store import SqliteGroupStore
from swarm.identity import Identity
from swarm.report.group_trace import GroupTrace, trace_group
from swarm.report.node_directory import EVENTS, open_directories
from swarm.testing.builders import make_group, make_scored, make_sealed
from swarm.trained.samples import STORE
from swarm.types import Draw, DrawnGroup, EdgeReport

ADA, BELL, CURIE = Identity.create(), Identity.create(), Identity.create()
ONE, TWO, THREE = "1" * 64, "1" * 8 + "2" * 56, "3" * 64
RUN = CliRunner()


def directory(path: Path, events: Sequence[Event], node: Identity, start_s: float = 1_700_000_000.0) -> Path:
    path.mkdir()
    node.save(path / "identity.key")
    write_events(path / EVENTS, events, start_s, every_s=10.0)
    return path


def of_group(digest: str, producer: Identity = ADA) -> dict[str, Any]:
    given = {"digest": digest, "producer": producer.node_id, "policy_id": producer.node_id, "oldest_step": 4}
    return {**given, "size_bytes": 512, "reward_mean": 0.25, "versions": ((4, "abc"), (5, "def"))}


def use(digest: str, **changes: Any) -> GroupUse:
    ada = {"producer": ADA.node_id, "policy_id": ADA.node_id}
    return make(GroupUse, digest=digest, **ada, age_steps=2, in_flight_steps=1, **changes)


def drawn(step: int, *groups: GroupUse, **changes: Any) -> GroupsDrawn:
    return make(GroupsDrawn, draw_step=step, groups=groups, **changes)


def step_made(draw: int, **changes: Any) -> StepMade:
    return make(StepMade, **{"step": draw, "draw_step": draw, "digest": f"version{draw}", **changes})


def told(found: GroupTrace) -> list[str]:
    return [f"{line.node}: {line.text}" for line in found.lines]


def traced(prefix: str, *paths: Path) -> GroupTrace:
    return trace_group(open_directories(paths), prefix)


@pytest.fixture
def swarm_of_three(tmp_path: Path) -> list[Path]:
    """Ada makes ONE, Bell learns from it, Curie refuses it."""
    made = make(GroupPut, **of_group(ONE), num_tokens=40, finishes={"stop": 3, "length": 1}, reward_parts={"form": 0.5})
    edge = EdgeReport(
        source=ADA.node_id, num_groups=1, age_mean_steps=2.0, ess_share=0.75, mismatch_kl=0.125, reward_mean=0.5
    )
    return [
        directory(tmp_path / "ada", [NodeStarted(node_id=ADA.node_id), made, drawn(7, use(ONE)), step_made(7)], ADA),
        directory(
            tmp_path / "bell",
            [
                make(GroupAdmitted, **of_group(ONE), via=CURIE.node_id, age_s=1.5),
                drawn(3, use(ONE, is_own_policy=False), use(THREE)),
                step_made(2),
                step_made(3, edges=(edge,)),
            ],
            BELL,
            1_700_000_015.0,
        ),
        directory(
            tmp_path / "curie",
            [GroupRefused(reason="false_reward", producer=ADA.node_id, via=ADA.node_id, digest=ONE)],
            CURIE,
            1_700_000_012.0,
        ),
    ]


def test_a_group_is_followed_from_its_making_to_every_use(swarm_of_three: list[Path]) -> None:
    found = traced("1111", *swarm_of_three)
    assert (found.digest, found.env, found.producer, found.policy) == (ONE, "sort", "ada", "ada")
    assert told(found) == [
        "ada: made and stored: 40 tokens in 4 responses, 1 cut off, mean reward 0.25, form 0.5, with "
        "versions 4 to 5 (def)",
        "curie: refused, sent by ada: false_reward",
        "bell: admitted, sent by curie 1.5 s after it was made; mean reward 0.25, 512 bytes, versions 4 to 5 (def)",
        "ada: drawn for draw 7, one of 1 groups: age 2 of at most 4 steps, 1 of them in flight, use 1 of 1, local",
        "bell: drawn for draw 3, one of 2 groups: age 2 of at most 4 steps, 1 of them in flight, use 1 of 1, external",
        "ada: learned from: version 7, version7",
        "bell: learned from: version 3, version3; its source: ESS 0.75, KL 0.125 nats a token",
    ]
    assert [each.split(":")[0] for each in found.unknown] == [
        "to whom it was advertised or sent",
        "how much this group alone weighed in a gradient",
    ]


def test_what_no_log_holds_is_said(swarm_of_three: list[Path], tmp_path: Path) -> None:
    of = [
        GroupRefused(reason="too_old", producer=ADA.node_id, count=5),
        GroupRefused(reason="duplicate", count=2),
        GroupRefused(reason="malformed", producer=BELL.node_id, count=9),  # of another producer
    ]
    silent = directory(tmp_path / "silent", of, Identity.create())
    lost = directory(tmp_path / "lost", [EarlierRefusals(refused={}), drawn(9, use(ONE))], Identity.create())
    unknown = traced(ONE, *swarm_of_three[1:], silent, lost).unknown
    assert any(each.startswith("when and how it was made") and ADA.node_id[:8] in each for each in unknown)
    assert any("silent was offered it" in each and "7 groups" in each and "5 too_old" in each for each in unknown)
    assert any("lost did with it before its event log begins" in each for each in unknown)


def test_groups_that_were_never_learned_from_say_why(tmp_path: Path) -> None:
    left_out = step_made(3, num_local=0, num_external=1, diagnostics={"guard_groups_left_out": 1.0}, edges=())
    events = [
        make(GroupPut, **of_group(ONE), num_tokens=40),
        drawn(1, zero_variance=(ONE,)),
        drawn(2, too_old=(ONE,)),
        drawn(3, use(ONE)),
        left_out,
        drawn(4, use(ONE)),
        step_made(4, step=3, was_skipped=True),
        GroupGivenUp(digest=ONE, producer=ADA.node_id, draw_step=4),
    ]
    words = "\n".join(told(traced(ONE, directory(tmp_path / "ada", events, ADA))))
    for reason in (
        "used up by draw 1: without signal",
        "used up by draw 2: too old",
        "not learned from: the guard left it out of step 3",
        "not learned from: the step was skipped, and version 3 stayed",
        "given up: it ended the learner's process alone",
    ):
        assert words.count(reason) == 1, reason


def test_a_prefix_must_name_one_group(swarm_of_three: list[Path], tmp_path: Path) -> None:
    other = directory(tmp_path / "other", [make(GroupPut, **of_group(TWO), num_tokens=1)], Identity.create())
    with pytest.raises(ConfigError, match="2 groups begin so"):
        traced("11111111", *swarm_of_three, other)
    assert traced("111111112", *swarm_of_three, other).digest == TWO
    with pytest.raises(ConfigError, match="no group whose digest begins so"):
        traced("4444", *swarm_of_three)
    for bad in ("111", "xyzw", "1" * 65, "1111%"):
        with pytest.raises(ConfigError, match="hexadecimal digits"):
            traced(bad, *swarm_of_three)
    with pytest.raises(ConfigError, match="no group"):
        traced(ADA.node_id[:12], *swarm_of_three)  # of a node, in every line


async def test_the_store_adds_rewards_weights_and_deletion(tmp_path: Path) -> None:
    group = make_group(ADA.node_id)
    sealed = make_sealed(group, ADA)
    scored = replace(make_scored(group), digest=sealed.digest, first_seen_s=1_700_000_001.0)
    digest = sealed.digest.hex()
    event = make(GroupAdmitted, **of_group(digest), via=ADA.node_id, age_s=0.0)
    bell = directory(tmp_path / "bell", [event, drawn(3, use(digest, is_own_policy=False))], BELL)
    clock = ManualClock(1_700_000_500.0)
    store = await SqliteGroupStore.open(bell / STORE, clock, max_bytes=2**20)
    await store.put(scored, sealed)
    taken = DrawnGroup(scored=scored, age_steps=2, use=1)
    await store.record_draw(Draw(step=3, groups=(taken,), num_zero_variance=0, source_weights={ADA.node_id: 0.125}))
    words = "\n".join(told(traced(digest[:10], bell)))
    assert f"task {group.task_id}, {len(group.rollouts)} responses" in words and "rewards by its own verifier" in words
    assert "its source was drawn with weight 0.125" in words
    await store.forget(before_s=2e9, max_bytes=0)
    await store.close()
    words = "\n".join(told(traced(digest[:10], bell)))
    assert "deleted from its store" in words and "rewards by its own" not in words
    (bell / EVENTS).write_text("")
    assert "deleted from its store" in "\n".join(told(traced(digest[:10], bell))), (
        "the log has rotated, the store knows"
    )


def test_the_command_shows_hostile_text_and_mistakes_plainly(swarm_of_three: list[Path], tmp_path: Path) -> None:
    event = GroupRefused(reason="false_\x1b[2J\u202ereward", producer=ADA.node_id, via=ADA.node_id, digest=ONE)
    hostile = directory(tmp_path / "hostile", [event], Identity.create())
    dirs = [argument for path in (*swarm_of_three, hostile) for argument in ("--dir", str(path))]
    done = RUN.invoke(app, ["trace", "1111", *dirs])
    assert done.exit_code == 0 and "2023-11-14 22:13:30.0  ada" in done.output, done.output
    assert "\x1b" not in done.output and "\u202e" not in done.output and "false_\\x1b[2J\\u202ereward" in done.output
    assert "not known: to whom it was" in done.output
    shown = json.loads(RUN.invoke(app, ["trace", "1111", "--json", *dirs]).output)
    assert shown["digest"] == ONE and len(shown["lines"]) == 8
    failed = RUN.invoke(app, ["trace", "1111", "--dir", str(tmp_path)])
    assert failed.exit_code == 2 and "no events.jsonl" in failed.stderr
