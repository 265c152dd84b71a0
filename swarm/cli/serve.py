"""`swarm serve`: a model behind OpenAI's HTTP interface."""

import os
import secrets
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from swarm.cli.trained import Device, Step, Target
from swarm.errors import ConfigError

console = Console()


def serve(
    target: Target,
    listen: Annotated[str, typer.Option(help="host:port; 0.0.0.0:8300 for other machines, behind a proxy.")] = (
        "127.0.0.1:8300"
    ),
    name: Annotated[str, typer.Option(help="What clients call the model; without, the last part of TARGET.")] = "",
    step: Step = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Most answers made at once; the others wait.")] = 32,
    device: Device = "auto",
) -> None:
    """Serve a model to chat windows, agents and OpenAI's clients: /v1/chat/completions and the token endpoints of vLLM.

    Clients need the key: SWARM_API_KEY of the environment, else one made at each start and printed. A node serves the
    policy that it trains, as it is at each token, with serve.listen in its node.toml. docs/serving.md has more.

      swarm serve swarm-node                              the newest checkpoint of a node
      swarm serve my-model --listen 127.0.0.1:9000        a folder that `swarm export` made
    """
    from swarm.generation.transformers_engine import TransformersGenerator
    from swarm.model.device import pick_device
    from swarm.model.network import most_tokens
    from swarm.serving import served_policy
    from swarm.trained.model import load_target
    from swarm.types import PolicyVersion

    key = os.environ.get("SWARM_API_KEY", "") or secrets.token_urlsafe(24)
    if not key.isascii() or len(key) < 16:
        raise ConfigError("SWARM_API_KEY: expected at least 16 ASCII characters; unset it, and a key is made")
    model = load_target(target, step)
    version = model.version or PolicyVersion(policy_id=model.source_name, step=0, digest=model.base_digest)
    engine = TransformersGenerator(
        model.network.to(pick_device(device)), model.tokenizer, version, seed=0, max_rows=max_rows
    )
    name = name or Path(target).name or model.source_name
    server, url = served_policy.serve(
        engine,
        model.tokenizer,
        name=name,
        source=model.source_name,
        context_tokens=most_tokens(model.network),
        listen=listen,
        key=key,
    )
    for line in (
        f"model {name}, step {version.step}, version {version.digest.hex()[:16]}; Ctrl-C ends it",
        f"export OPENAI_BASE_URL={url} OPENAI_API_KEY={key}",
    ):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    server.stop()
    engine.close()
