"""Runs recipes of tinker-cookbook, as they were installed, against `swarm serve --tinker`.

    build/tinker-env/bin/python tests/extras/tinker_cookbook.py    # 2 to 4 minutes on 2 cores; make nightly runs it

sl_loop and rl_loop have a server that is a trainer node; three other nodes follow what it publishes and serve it. Every
sample has to be theirs. The other recipes have a server alone. docs/serving.md names all recipes of the package.
Names of models and data sets that the loops ask for lie in the folder they run in; the network is not used.
"""

import ast
import base64
import hashlib
import http.client
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from tests.extras.tinker_world import MODEL, make_world
from tests.first_hour import Terminal

KEY: Final = "tml-key-of-the-cookbook"
NUM_NODES: Final = 3
HANG_S: Final = 900.0  # for one wait
NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 2, 4, 4, 16
LOSSES: Final = ("importance_sampling", "cispo", "gspo")
TABLE: Final = "### Recipes of tinker-cookbook"  # of docs/serving.md
# Recipes against a server alone: options, and a number of each step that has to be there.
ALONE: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "math_rl.train": (
        {"env": "arithmetic", "loss_fn": "ppo", "groups_per_batch": 4, "max_tokens": 8},
        "env/all/reward/total",
    ),
    "preference.dpo.train": ({"batch_size": 4}, "dpo_loss"),
    "sdft.train": ({"groups_per_batch": 4, "max_tokens": 8, "eval_every": 0}, "num_steps"),
    "decisions.forecasting": (
        {"data_path": "markets.csv", "split_date": "2026-01-01", "batch_size": 4, "lora_rank": 8},
        "train/loss",
    ),
}

_COMMON: Final = f"""
run_id = "cookbook"
num_threads = 1

[[environments]]
name = "sort"
kind = "char"
dataset = "sort"

[model]
source = "{MODEL}"
dtype = "float32"
"""
_TRAINER: Final = 'dir = "trainer"\nname = "trainer"\nroles = ["trainer"]\n' + _COMMON + "[weights]\npublish = true\n"


def generator(name: str, port: int, trainer: dict[str, Any]) -> str:
    """node.toml of a node that follows the trainer and serves what it has."""
    return (
        f'dir = "{name}"\nname = "{name}"\nroles = ["generator"]\n{_COMMON}'
        f'[follow]\npolicy = "{trainer["node_id"]}"\n'
        f"[directory]\nbootstrap = {json.dumps(trainer['dht'])}\n"
        f'[serve]\nlisten = "127.0.0.1:{port}"\n'
    )


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for(what: str, found: Any) -> Any:
    """The first value of `found` that is not None."""
    ends_s = time.monotonic() + HANG_S
    while not (given := found()):
        assert time.monotonic() < ends_s, f"{what}: not there after {HANG_S:g} s"
        time.sleep(0.2)
    return given


def version_of(port: int, key: str) -> dict[str, Any] | None:
    """The policy version that a node serves; None where it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        return json.loads(connection.getresponse().read())["data"][0]["policy_version"]
    except OSError:
        return None
    finally:
        connection.close()


def run_loop(name: str, folder: Path, url: str, **options: Any) -> list[dict[str, Any]]:
    """Runs a loop of the cookbook; what it logged of each step."""
    log = folder / "logs" / "-".join([name, *(str(options[key]) for key in ("loss_fn",) if key in options)])
    settings = {"model_name": MODEL, "max_steps": NUM_STEPS, "log_path": log, **options}
    environment = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": KEY,
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
    }
    began_s = time.monotonic()
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", *(f"{k}={v}" for k, v in settings.items())]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * HANG_S)
    assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    steps = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    print(f"{log.name}: {len(steps)} steps, {time.monotonic() - began_s:.0f} s", flush=True)
    return steps


def recipe_files() -> dict[str, Path]:
    """The files of all recipes that can be run, each as its release has it."""
    recipes: dict[str, Path] = {}
    for path in metadata.distribution("tinker-cookbook").files or ():
        file, parts = Path(str(path.locate())), path.with_suffix("").parts
        if path.suffix != ".py" or parts[:2] != ("tinker_cookbook", "recipes") or path.name.endswith("_test.py"):
            continue
        source = file.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(source).digest()).rstrip(b"=").decode()
        assert path.hash is not None and digest == path.hash.value, f"{file} was changed"
        asks_name = (
            isinstance(each, ast.If) and "__name__" in ast.unparse(each.test) for each in ast.parse(source).body
        )
        if path.name == "__main__.py" or any(asks_name):
            recipes[".".join(parts[2:])] = file
    return recipes


def check_table(recipes: dict[str, Path]) -> None:
    """Compares the recipes with those that the table of docs/serving.md names."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8").partition(TABLE)[2]
    rows = [line.split("|")[1] for line in text.partition("\n#")[0].splitlines() if line.startswith("| `")]
    named = re.findall(r"`([a-z_0-9.]+)`", " ".join(rows))
    assert sorted(named) == sorted(recipes), f"docs/serving.md: {set(named) ^ set(recipes)}, or one name twice"


def main() -> None:
    """All of it in a new folder."""
    began_s = time.monotonic()
    recipes = recipe_files()
    check_table(recipes)
    versions = f"tinker {metadata.version('tinker')}, tinker-cookbook {metadata.version('tinker-cookbook')}"
    print(f"{versions}, its {len(recipes)} recipes are in the table", flush=True)
    swarm = str(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv/bin").resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_world(folder)
        ports = free_ports(NUM_NODES + 1)
        names = ["ada", "bell", "curie"]
        (folder / "trainer").mkdir()
        (folder / "trainer" / "node.toml").write_text(_TRAINER)
        for each in names:
            (folder / each).mkdir()
            (folder / each / "api.key").write_text(KEY)
            (folder / each / "api.key").chmod(0o600)
        lines = [f"http://127.0.0.1:{port}/v1 {KEY}\n" for port in ports[1:]]
        (folder / "samplers.txt").write_text("".join(lines))
        serve = f"{swarm}/swarm serve {MODEL} --tinker --listen 127.0.0.1:{ports[0]}"
        os.environ["SWARM_API_KEY"] = KEY
        run_alone(swarm, folder)
        running = [Terminal(f"{serve} --node trainer --samplers samplers.txt", folder)]
        try:
            running[0].wait_for("TINKER_BASE_URL=")
            status = wait_for("status of the trainer", lambda: read_status(folder / "trainer"))
            for each, port in zip(names, ports[1:], strict=True):
                (folder / each / "node.toml").write_text(generator(each, port, status))
                running.append(Terminal(f"{swarm}/swarm-node start --config {each}/node.toml", folder))
            for port in ports[1:]:
                wait_for(
                    "a follower", lambda port=port: (version_of(port, KEY) or {}).get("policy_id") == status["node_id"]
                )
            print(f"{NUM_NODES} nodes follow: {time.monotonic() - began_s:.0f} s", flush=True)
            url = f"http://127.0.0.1:{ports[0]}"
            learned = run_loop("sl_loop", folder, url, batch_size=NUM_PROMPTS, max_length=128, lora_rank=8)
            assert learned[1]["train_mean_nll"] < learned[0]["train_mean_nll"], learned
            for loss in LOSSES:
                steps = run_loop(
                    "rl_loop",
                    folder,
                    url,
                    loss_fn=loss,
                    lora_rank=8,
                    batch_size=NUM_PROMPTS,
                    group_size=NUM_SAMPLES,
                    max_tokens=NUM_TOKENS,
                )
                assert [step["num_steps"] for step in steps if "num_steps" in step], f"{loss}: no step was made"
        finally:
            for terminal in running:
                terminal.interrupt()
            for terminal in running:
                terminal.wait()
    said = running[0].said
    assert "Traceback" not in said, said
    found = re.search(r"samples: (\d+) by \S+, (\d+) by \S+, (\d+) by \S+, (\d+) here", said)
    assert found is not None, said
    print(found.group(0))
    *by_nodes, here = map(int, found.groups())
    assert min(by_nodes) > 0 and here == 0, found.group(0)
    assert sum(by_nodes) == len(LOSSES) * NUM_STEPS * NUM_PROMPTS * NUM_SAMPLES, found.group(0)
    print(f"the cookbook's loops ran against a swarm: {time.monotonic() - began_s:.0f} s")


def run_alone(swarm: str, folder: Path) -> None:
    """Runs the recipes of ALONE against a server that samples itself; each makes its steps with finite numbers."""
    port = free_ports(1)[0]
    server = Terminal(f"{swarm}/swarm serve {MODEL} --tinker --listen 127.0.0.1:{port}", folder)
    try:
        server.wait_for("TINKER_BASE_URL=")
        for name, (options, number) in ALONE.items():
            steps = run_loop(name, folder, f"http://127.0.0.1:{port}", **options)
            values = [step[number] for step in steps if number in step]
            assert len(values) >= NUM_STEPS and all(map(math.isfinite, values)), f"{name}: {number} of {steps}"
    finally:
        server.interrupt()
        server.wait()
    assert "Traceback" not in server.said, server.said


def read_status(directory: Path) -> dict[str, Any] | None:
    """status.json of a node that has started."""
    path = directory / "status.json"
    status = json.loads(path.read_text()) if path.is_file() else {}
    return status if status.get("dht") else None


if __name__ == "__main__":
    main()
