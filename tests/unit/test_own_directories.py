"""Reading a directory that somebody else made runs none of its code; own directories are known without any question."""

import asyncio
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import swarm
import swarm.cli.serve
from node.python_api.training import Training
from swarm.cli.main import app
from swarm.clock import SystemClock
from swarm.config import NODE_FILE, NodeConfig, load_config
from swarm.errors import ConfigError
from swarm.events import GroupsDrawn, GroupUse
from swarm.exchange.group_store import SqliteGroupStore
from swarm.report.web_pages import WebPages
from swarm.telemetry import EventLog
from swarm.testing.trained_node import make_trained_node
from swarm.trained.own_directories import MARKED, RECORD, code_of_node, is_own, record_own, require_trusted
from swarm.trained.samples import STORE
from swarm.wire.run_manifest import write_toml

LINK = f"swarm://127.0.0.1:1/letters#{'a' * 64}"
DIGEST = "ab" * 32
EVIL = """
from pathlib import Path
Path(__file__).with_name("marker").write_text("run")

def score(question, answer, reference):
    return 1.0

class Tasks:
    pass
"""

NO_DIRECTORY = {"plan", "bench", "simulate", "recipes", "keys"}  # and what they are given to run is named there


async def make_store(path: Path) -> None:
    await (await SqliteGroupStore.open(path, SystemClock(), 1_000_000)).close()


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.telemetry.setup_logging", lambda *_: None)  # of the whole process


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A directory as it comes with a bug report: every key that may name code names a file that leaves a marker."""
    path = tmp_path / "evil"
    make_trained_node(path)
    (path / "evil.py").write_text(EVIL)
    (path / "questions.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    asyncio.run(make_store(path / STORE))
    log = EventLog(path / "events.jsonl")
    use = GroupUse(digest=DIGEST, producer="b" * 64, policy_id="b" * 64, age_steps=0, is_own_policy=False)
    log.write(GroupsDrawn(draw_step=1, groups=(use,), max_age_steps=4, max_reuse=1))
    log.close()
    (path / "nodes.txt").write_text("http://127.0.0.1:1 key\n")
    data = tomllib.loads((path / NODE_FILE).read_text())
    code = f"{path}/evil.py"
    shared = {"params": {"path": str(path / "questions.jsonl")}}
    data["environments"] = [
        {"name": "scored", "kind": "function", "dataset": f"{code}:score", **shared},
        {"name": "again", "kind": "retry", "params": {"inner": {"kind": "plugin", "dataset": f"{code}:Tasks"}}},
    ]
    data["learner"] |= dict.fromkeys(("recipe", "recipe_without_logprobs", "recipe_text_only"), f"{code}:RECIPE")
    data |= {"roles": ["trainer"], "weights": {**data["weights"], "publish": True}}
    data["replay"]["local_groups"] = 0
    write_toml(data, path / NODE_FILE)
    return path


def pages(path: Path, is_trusted: bool) -> str:
    shown = WebPages([path], "key", is_trusted=is_trusted)
    found = [shown.page_of(f"/key/{rest}") for rest in ("", "node/0/", f"node/0/group/{DIGEST}/")]
    return "".join(page.body.decode() for page in found if page is not None)


# command -> its arguments, and if code may be run with --trust
READERS: dict[str, tuple[Callable[[str], Sequence[str]], bool]] = {
    "train": (lambda d: [d], True),
    "check": (lambda d: ["--config", f"{d}/node.toml"], True),
    "eval": (lambda d: [d, "--problems", "1", "--tries", "0"], True),
    "samples": (lambda d: [d], True),
    "report": (lambda d: [d], True),
    "watch": (lambda d: [d, "--once"], False),  # --web: by its pages
    "doctor": (lambda d: ["--config", f"{d}/node.toml"], True),
    "join": (lambda d: [LINK, "--dir", d], True),
    "serve": (lambda d: ["tiny", "--tinker", "--node", d, "--samplers", f"{d}/nodes.txt"], True),
    "chat": (lambda d: [d, "-m", "abc", "--max-new-tokens", "2"], False),
    "export": (lambda d: [d, f"{d}/out"], False),
    "verify": (lambda d: [d], False),
    "trace": (lambda d: [DIGEST, "--dir", d], False),
    "why": (lambda d: [d], False),
    "status": (lambda d: [d], False),
    "pause": (lambda d: [d], False),
    "resume": (lambda d: [d], False),
}


def test_every_command_that_reads_a_directory_is_tried_below() -> None:
    commands: Any = get_command(app)
    assert set(commands.commands) == READERS.keys() | NO_DIRECTORY


@pytest.mark.parametrize("command", READERS)
def test_no_command_runs_the_code_of_a_directory_that_somebody_else_made(
    command: str, evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm.cli.serve, "wait_for_signal", lambda: None)
    monkeypatch.chdir(evil)
    arguments, is_refused = READERS[command]
    result = CliRunner().invoke(app, [command, *arguments(str(evil))])
    assert not (evil / "marker").exists()
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    if command == "report":
        assert "--trust" in (evil / "report.html").read_text(), "in the place of samples"
    elif is_refused:
        assert "add --trust" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["train", "doctor", "join", "serve"])
@pytest.mark.parametrize("engine", ["python", "found here", "openai"])
def test_no_command_starts_the_engine_of_a_directory_that_somebody_else_made(
    command: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evil"
    make_trained_node(path)
    python = path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch {path}/marker\n")
    python.chmod(0o755)
    (path / "nodes.txt").write_text("http://127.0.0.1:1 key\n")
    data = tomllib.loads((path / NODE_FILE).read_text())
    data["engine"] = {"kind": "vllm", "python": str(python) if engine == "python" else ""}
    if engine == "openai":
        data["engine"] = {"kind": "openai", "url": "http://127.0.0.1:1", "options": {"api_key_env": "HOME"}}
    write_toml(data, path / NODE_FILE)
    monkeypatch.chdir(path)
    result = CliRunner().invoke(app, [command, *READERS[command][0](str(path))])
    assert not (path / "marker").exists()
    assert "add --trust" in " ".join(result.output.split())
    if command == "doctor" and engine != "openai":
        CliRunner().invoke(app, [command, *READERS[command][0](str(path)), "--trust"])
        assert (path / "marker").exists()


@pytest.mark.parametrize("command", ["train", "check", "eval", "samples", "report", "doctor"])
def test_the_code_is_run_with_trust(command: str, evil: Path) -> None:
    CliRunner().invoke(app, [command, *READERS[command][0](str(evil)), "--trust"])
    assert (evil / "marker").exists()


def test_pages_and_the_python_api_run_no_code_of_somebody_else(evil: Path) -> None:
    shown = pages(evil, is_trusted=False)
    assert shown.count("add --trust") == 2, "in the place of samples; all else is shown"
    run = Training(evil)
    for read in (run.samples, run.evaluate):
        with pytest.raises(ConfigError, match="add --trust"):
            read()
    assert not (evil / "marker").exists()
    pages(evil, is_trusted=True)
    assert (evil / "marker").exists()


def test_a_directory_is_own_until_another_takes_its_place(tmp_path: Path) -> None:
    own, copy = tmp_path / "own", tmp_path / "copy"
    own.mkdir()
    assert not is_own(own)
    record_own(own)
    link = tmp_path / "link"
    link.symlink_to(own)
    assert is_own(own) and is_own(link)
    shutil.copytree(own, copy)
    assert not is_own(copy)
    shutil.rmtree(own)
    assert not is_own(own)
    copy.rename(own)
    assert not is_own(own), "at the same path"
    (own / MARKED).unlink()
    (own / MARKED).symlink_to(NODE_FILE)
    record_own(own)
    assert not is_own(own), "no file of its own"


def test_own_directories_are_recorded_where_there_is_a_place_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    record_own(tmp_path)
    record = tmp_path / "home/.local/state/swarm-trainer" / RECORD
    assert is_own(tmp_path) and record.exists()
    record.write_text("[" * 100_000)
    assert not is_own(tmp_path)
    record_own(tmp_path)
    assert is_own(tmp_path)
    monkeypatch.setattr("swarm.trained.own_directories.os.geteuid", lambda: 12345)
    assert not is_own(tmp_path), "the record is another user's"
    monkeypatch.undo()

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    record_own(tmp_path)
    assert not is_own(tmp_path) and "set XDG_STATE_HOME" in str(caplog.records[-1].__dict__)


def test_the_record_keeps_the_newest_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("swarm.trained.own_directories.MAX_RECORDED", 2)
    directories = [tmp_path / name for name in "abc"]
    for each in directories:
        each.mkdir()
        record_own(each)
    assert [is_own(each) for each in directories] == [False, True, True]


def test_code_by_a_relative_path_is_run_only_from_where_the_directory_was_used_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    for each in (own, elsewhere):
        each.mkdir()
    monkeypatch.chdir(tmp_path)
    record_own(own)
    for folder, relative in ((tmp_path, True), (elsewhere, False)):
        monkeypatch.chdir(folder)
        for spec in ("my.py:score", "my:score"):
            if relative:
                require_trusted(own, {"learner.recipe": spec}, False)
            else:
                with pytest.raises(ConfigError, match="from the working directory, which was another one"):
                    require_trusted(own, {"learner.recipe": spec}, False)
        require_trusted(own, {"a": f"{tmp_path}/my.py:score", "b": "json:loads"}, False)


def test_code_that_the_command_line_names_needs_no_trust(evil: Path) -> None:
    code = code_of_node(load_config(NodeConfig, evil / NODE_FILE))
    assert len(code) == 5
    named = f"{evil}/evil.py"
    require_trusted(
        evil, code, False, [f"x={named}:score", f'environments=[{{dataset = "{named}:Tasks"}}]', f"{named}:RECIPE"]
    )
    with pytest.raises(ConfigError, match="Tasks"):
        require_trusted(evil, code, False, [f"{named}:score", f"{named}:RECIPE", f"z{named}:Tasks"])


def test_a_training_is_written_without_home_locale_or_direct_network(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "swarm.cli.main",
        "train",
        "my node",
        "-m",
        "tiny",
        "--env",
        "char:sort",
        "--only-write",
    ]
    proxy = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    bare = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "XDG_STATE_HOME": str(tmp_path / "read only"), **proxy}
    (tmp_path / "read only").write_text("no folder")
    done = subprocess.run(command, cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "swarm train 'my node'" in done.stdout
