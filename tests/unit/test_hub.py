"""An export on a hub, against a stand-in that speaks what the real huggingface_hub client says to one."""

import base64
import hashlib
import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import swarm
from swarm.cli.main import app
from swarm.errors import ConfigError, Unavailable
from swarm.testing.trained_node import make_trained_node
from swarm.trained.export import export_model
from swarm.trained.hub import push_folder
from swarm.trained.provenance import verify_export

RUN = CliRunner()
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")  # of huggingface_hub's upload
TOKEN = "hf_" + "a" * 34


class Hub(ThreadingHTTPServer):
    """Repositories in memory; the weights come over LFS, all other files in the commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, dict[str, bytes]] = {}
        self.created: list[dict[str, Any]] = []
        self.lfs: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.is_broken = False
        self.refuses_weights = False

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "lfsFile":
                self.repos[repo][value["path"]] = self.lfs[value["oid"]]
            else:
                self.repos[repo][value["path"]] = base64.b64decode(value["content"])


class Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            return self.answer({"sha": "0" * 40, "siblings": [], "id": "ada/my-model"})
        self.answer({}, 404)

    def do_DELETE(self) -> None:
        asked = json.loads(self.body())
        del self.server.repos[f"{asked.get('organization') or 'ada'}/{asked['name']}"]
        self.answer({})

    def do_PUT(self) -> None:
        data = self.body()
        if self.server.refuses_weights:
            return self.answer({"error": "no room"}, 413)
        self.server.lfs[hashlib.sha256(data).hexdigest()] = data
        self.answer({})

    def do_POST(self) -> None:
        hub, data = self.server, self.body()
        if hub.is_broken:
            return self.answer({"error": "on fire"}, 500)
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.answer({"error": "who are you?"}, 401)
        if self.path == "/api/repos/create":
            asked = json.loads(data)
            name = f"{asked.get('organization') or 'ada'}/{asked['name']}"
            if name.startswith("root/"):
                return self.answer({"error": "not yours"}, 403)
            if name in hub.repos:
                return self.answer({"error": "You already created this model repo"}, 409)
            hub.repos[name] = {}
            hub.created.append(asked)
            return self.answer({"url": f"{hub.url}/{name}", "name": name})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = json.loads(data)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for f in files
            ]
            return self.answer({"files": modes})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}}}
                for o in json.loads(data)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            repo = "/".join(self.path.split("/")[3:5])
            hub.commit(repo, [json.loads(line) for line in data.splitlines()])
            return self.answer({"commitUrl": f"{hub.url}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40})
        self.answer({"error": self.path}, 404)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts: list[bytes] = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, value: Any, code: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    make_trained_node(tmp_path / "node")
    export_model(tmp_path / "node", tmp_path / "out", "hf", None, 0.0)
    return tmp_path / "out"


def test_what_arrives_is_what_was_signed_and_only_its_owner_sees_it(hub: Hub, exported: Path, tmp_path: Path) -> None:
    found = RUN.invoke(app, ["export", str(exported), "--push", "my-model"])
    assert found.exit_code == 0, found.stderr
    assert "sent to ada/my-model (private): http" in found.stdout
    assert [each["visibility"] for each in hub.created] == ["private"]
    arrived = tmp_path / "arrived"
    for name, data in hub.repos["ada/my-model"].items():
        (arrived / name).parent.mkdir(parents=True, exist_ok=True)
        (arrived / name).write_bytes(data)
    assert verify_export(arrived).digests == verify_export(exported).digests
    assert hub.lfs and hub.messages[0].startswith("Step ")


def test_a_node_is_exported_and_sent_in_one_command_and_from_python(hub: Hub, exported: Path, tmp_path: Path) -> None:
    node = tmp_path / "node"
    both = RUN.invoke(app, ["export", str(node), str(tmp_path / "two"), "--push", "org/two", "--public"])
    assert both.exit_code == 0 and "sent to org/two (public)" in both.stdout, both.output
    assert hub.created[0]["visibility"] == "public" and (tmp_path / "two" / "provenance.json").exists()
    pushed = swarm.Training(node).push_to_hub("three")
    assert pushed.repo == "ada/three" and hub.repos["ada/three"].keys() == pushed.sizes_bytes.keys()


def test_a_dry_run_asks_nobody_and_lists_every_file(exported: Path) -> None:
    found = RUN.invoke(app, ["export", str(exported), "--push", "my-model", "--dry-run"])
    assert found.exit_code == 0, found.stderr
    names = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    assert {line.split("MB  ")[1] for line in found.stdout.splitlines()[:-1]} == names
    assert "would go to my-model (private)" in found.stdout


def test_what_goes_wrong_is_a_sentence_and_nothing_is_sent(
    hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.repos["ada/taken"] = {"kept": b""}
    with pytest.raises(ConfigError, match=r"--push taken: exists on http.*: name another.*nothing was sent"):
        push_folder(exported, "taken")
    assert hub.repos["ada/taken"] == {"kept": b""}
    with pytest.raises(ConfigError, match=r"says 403, this token may not write there: make a token with write access"):
        push_folder(exported, "root/mine")
    with pytest.raises(ConfigError, match=r"--push a b: "):
        push_folder(exported, "a b")
    hub.refuses_weights = True
    with pytest.raises(Unavailable, match=r"--push half: Error while uploading 'model.safetensors'.*; try again later"):
        push_folder(exported, "half")
    assert "ada/half" not in hub.repos, "so that it can be tried again"
    hub.is_broken = True
    with pytest.raises(Unavailable, match=r"says 500: on fire; try again later"):
        push_folder(exported, "mine")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub.is_broken = False
    with pytest.raises(ConfigError, match=r"says 401, no token, or one that does not count any more"):
        push_folder(exported, "mine")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        Unavailable, match=r"http://127\.0\.0\.1:1 does not answer \(ConnectError\): is there a network"
    ):
        push_folder(exported, "mine")
    (exported / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json: was changed"):
        push_folder(exported, "mine", is_dry=True)
    assert hub.repos == {"ada/taken": {"kept": b""}}


def test_options_that_do_not_fit_are_told(tmp_path: Path) -> None:
    for arguments, said in (
        ([str(tmp_path)], "FOLDER: name the folder to make, or name a repository with --push"),
        ([str(tmp_path), "out", "--dry-run"], "--public and --dry-run are of an upload"),
        ([str(tmp_path), "--push", "mine"], "no node.toml, so no node's directory"),
    ):
        found = RUN.invoke(app, ["export", *arguments])
        assert found.exit_code == 2 and said in " ".join(found.stderr.split()), found.stderr
