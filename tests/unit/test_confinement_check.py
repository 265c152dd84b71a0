"""Confinement that a system does not have: found by trying, and answers of other machines refused by name."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from node.daemon import Daemon
from node.doctor import _check_sandbox  # pyright: ignore[reportPrivateUsage]
from swarm.cli.check import check
from swarm.config import EnvironmentConfig, NodeConfig, SandboxConfig, parse_config
from swarm.environments.load import build_environments
from swarm.environments.sandbox import scoring_process
from swarm.environments.sandbox.confinement_check import (
    TESTED,
    exposed_environments,
    file_outside,
    missing_limits,
    refusal,
    require_confinement,
)
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.errors import ConfigError, Unavailable
from swarm.interfaces import PeerAddress, Producer
from swarm.testing.builders import answers
from swarm.types import NodeId
from swarm.wire.run_manifest import write_toml

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is taken away here is of Linux")

CODE = EnvironmentConfig(name="prog", kind="code")
CHAR = EnvironmentConfig(name="rev", kind="char", dataset="reverse")
ELSEWHERE = {"exchange": {"listen": "0.0.0.0:0"}}  # others of the network reach it
# What a scoring process starts with instead of its own first line; nothing that ships has a way to ask for it.
WITHOUT = "import sys, types\nfrom swarm.environments.sandbox import child, confine\n{lines}\nchild.main()"
SECCOMP = "confine._program = lambda: b''"
LANDLOCK = "confine._RIGHTS_BY_VERSION = ()"
MOUNTS = "confine._PIVOT_ROOT = {}"
LINUX = "confine.sys = types.SimpleNamespace(**vars(sys) | {'platform': 'darwin'})"
FORKS = ["processes"] if os.geteuid() == 0 else []  # RLIMIT_NPROC, which every system has, does not bind root

PEER_ID = "12D3KooWBmAwcd4PJNJvfV89HwE48nwkRmAgo8Vy3uQEyNNHBox2"

Take = Callable[..., None]


@pytest.fixture
def take_away(monkeypatch: pytest.MonkeyPatch) -> Take:
    """Scoring processes from now on lack what the given lines take away."""

    def take(*lines: str) -> None:
        code = WITHOUT.format(lines="\n".join(lines))
        monkeypatch.setattr(scoring_process, "_COMMAND", (sys.executable, "-I", "-B", "-c", code))

    return take


def node(*environments: EnvironmentConfig, **sections: object) -> NodeConfig:
    data = {"environments": [each.model_dump() for each in environments], "model": {"source": "tiny"}} | sections
    return parse_config(NodeConfig, data, "test")


def has_landlock() -> bool:
    """Asks the kernel itself, not the code under test."""
    version = ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1)  # landlock_create_ruleset, for its version
    return sys.platform == "linux" and version > 0


def has_user_namespaces() -> bool:
    return (
        shutil.which("unshare") is not None and subprocess.run(["unshare", "-Urm", "true"], check=False).returncode == 0
    )


async def limits_of(config: NodeConfig) -> dict[str, bool]:
    async with SandboxVerifier(config.environments, config.sandbox) as verifier:
        return await verifier.limits_in_force()


@pytest.mark.parametrize(
    ("taken", "missing"),
    [
        ([], []),
        ([SECCOMP], ["network", *FORKS]),
        ([LANDLOCK], []),  # mounts hide the files all the same
        ([MOUNTS], []),  # and Landlock does without them
        ([LANDLOCK, MOUNTS], ["files"]),
        ([LINUX], ["network", "files", *FORKS]),
    ],
)
async def test_a_limit_that_is_taken_away_is_found_missing_by_trying(
    take_away: Take, taken: list[str], missing: list[str]
) -> None:
    hides = {LANDLOCK: has_landlock(), MOUNTS: has_user_namespaces()}
    if missing == [] and not any(here for name, here in hides.items() if name not in taken):
        pytest.skip("this machine's kernel has neither Landlock nor user namespaces, or not the one that is left")
    take_away(*taken)
    found = await limits_of(node(CHAR))
    assert missing_limits(found) == missing


def test_a_file_below_a_readable_place_shows_nothing() -> None:
    assert file_outside([]) == sys.executable
    assert file_outside([Path("/")]) == ""


@pytest.mark.parametrize("name", TESTED)
def test_each_missing_limit_refuses_answers_of_other_machines_and_is_named(name: str) -> None:
    quiz = EnvironmentConfig(
        name="quiz", kind="retry", params={"inner": {"kind": "reasoning_gym", "dataset": "leg_counting"}}
    )
    reason = refusal(node(CODE, quiz, CHAR, **ELSEWHERE), dict.fromkeys(TESTED, True) | {name: False})
    assert "environments prog (code), quiz (reasoning_gym):" in reason and f" {name} were tried" in reason
    assert "rev" not in reason and 'exchange = "own"' in reason and 'directory.kind = "none"' in reason


@pytest.mark.parametrize(
    "config",
    [
        node(CODE, directory={"kind": "none"}, **ELSEWHERE),
        node(CODE.model_copy(update={"exchange": "own"}), **ELSEWHERE),
        node(CHAR, **ELSEWHERE),
    ],
    ids=["alone", "own episodes", "closed"],
)
def test_own_answers_and_closed_environments_need_no_confinement(config: NodeConfig) -> None:
    assert exposed_environments(config) == [] and refusal(config, dict.fromkeys(TESTED, False)) == ""


@pytest.mark.parametrize(
    "sections",
    [
        ELSEWHERE,
        {"exchange": {"anchors": [f"{'a' * 64}@192.0.2.1:7700"]}, "directory": {"kind": "none"}},
        {"directory": {"listen": "/ip4/0.0.0.0/tcp/0"}},
        {
            "directory": {
                "bootstrap": ["/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWBmAwcd4PJNJvfV89HwE48nwkRmAgo8Vy3uQEyNNHBox2"]
            }
        },
        {"coordinator": {"address": "192.168.1.5:7600", "fingerprint": "a" * 64}},
    ],
    ids=["listens", "anchor", "DHT listens", "bootstrap", "coordinator in the home"],
)
def test_one_address_beyond_this_machine_is_enough_to_need_it(sections: dict[str, object]) -> None:
    assert "environments prog (code)" in refusal(node(CODE, **sections), dict.fromkeys(TESTED, False))
    assert refusal(node(CODE), dict.fromkeys(TESTED, False)) == "", (
        "every address is a loopback one, as in a simulation"
    )


@pytest.fixture
def quiz(tmp_path: Path) -> EnvironmentConfig:
    """Own code that judges answers, in characters that the tiny model reads."""
    (tmp_path / "rule.py").write_text(
        "def score(question, answer, reference):\n    return float(answer == reference)\n"
    )
    (tmp_path / "quiz.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    params = {"path": str(tmp_path / "quiz.jsonl")}
    return EnvironmentConfig(name="quiz", kind="function", dataset=f"{tmp_path / 'rule.py'}:score", params=params)


async def test_a_node_without_confinement_does_not_start_and_doctor_says_why(
    take_away: Take, quiz: EnvironmentConfig, tmp_path: Path
) -> None:
    take_away(SECCOMP, LANDLOCK, MOUNTS)
    config = node(quiz, dir=tmp_path / "node", worker="inline", **ELSEWHERE)
    with pytest.raises(ConfigError, match=r"environments quiz \(function\): .* network, files"):
        async with Daemon(config):
            pass
    finding = await _check_sandbox(config)
    assert finding.is_fatal and not finding.is_ok and "the node does not start: environments quiz" in finding.detail


async def test_a_node_whose_others_are_on_its_machine_starts_without_it(
    take_away: Take, quiz: EnvironmentConfig, tmp_path: Path
) -> None:
    take_away(LINUX)
    local = {"directory": {"kind": "none"}, "exchange": {"anchors": [f"{'a' * 64}@127.0.0.1:7700"]}}
    config = node(quiz, dir=tmp_path / "node", worker="inline", **local)
    assert not config.is_alone
    async with Daemon(config) as daemon:
        assert daemon.agent.endpoints
        for endpoint in ("192.0.2.1:7700", "[2001:db8::1]:7700"):
            with pytest.raises(Unavailable, match="on another machine"):
                await daemon.transport.connect(PeerAddress(node_id=NodeId("b" * 64), endpoint=endpoint), 1.0)
        with pytest.raises(Unavailable, match=r"^127\.0\.0\.1:9"):
            await daemon.transport.connect(PeerAddress(node_id=NodeId("b" * 64), endpoint="127.0.0.1:9"), 1.0)


def test_swarm_check_refuses_it_too(take_away: Take, quiz: EnvironmentConfig, tmp_path: Path) -> None:
    take_away(SECCOMP)
    path = tmp_path / "node.toml"
    write_toml(node(quiz, **ELSEWHERE).model_dump(mode="json"), path)
    with pytest.raises(ConfigError, match=r"environments quiz \(function\): .*Confinement needs Linux"):
        check(None, path, trust=True)


async def test_without_confinement_scoring_goes_on_where_it_is_allowed_and_a_warning_says_so_once(
    take_away: Take, caplog: pytest.LogCaptureFixture
) -> None:
    take_away(LINUX)
    config = node(CHAR, **ELSEWHERE)
    verifier, right = (
        SandboxVerifier(config.environments, SandboxConfig()),
        build_environments([CHAR])["rev"].reference(1),
    )
    try:
        await require_confinement(config, verifier.limits_in_force)
        for producer in (None, Producer(node_id=NodeId("a" * 32), is_known=False)):
            verdict = await verifier.verify("rev", 1, answers(right, "no"), producer)
            assert verdict.rewards.tolist() == [1.0, 0.0]
    finally:
        await verifier.close()
    warned = [record for record in caplog.records if "are not confined" in record.message]
    assert [record.__dict__["missing"] for record in warned] == [["network", "files", *FORKS]]
