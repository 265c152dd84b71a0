"""`swarm serve`: serves a model over OpenAI's HTTP interface, or over that of the tinker SDK."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from typer import Option

from swarm.cli.shared_options import Trust
from swarm.cli.trained import Device, Step, Target
from swarm.command_line import waiting
from swarm.errors import ConfigError
from swarm.plugins import load_extra
from swarm.process import wait_for_signal

if TYPE_CHECKING:
    from swarm.trained.model import TrainedModel

console = Console()

_TINKER = "With --tinker"


def serve(
    target: Target,
    listen: Annotated[str, Option(help="host:port; 0.0.0.0:8300 serves other machines, behind a proxy.")] = (
        "127.0.0.1:8300"
    ),
    name: Annotated[
        str, Option(help="Name of the model for clients. Default: the last part of TARGET (--tinker: owner/name).")
    ] = "",
    step: Step = None,
    max_rows: Annotated[int, Option(min=1, help="Most answers that are made at once; others wait.")] = 32,
    device: Device = "auto",
    tinker: Annotated[bool, Option("--tinker", help="Serve the tinker SDK, which trains adapters, too.")] = False,
    store: Annotated[
        Path, Option(help="Directory of saved weights, each a folder for PEFT.", rich_help_panel=_TINKER)
    ] = Path("tinker-weights"),
    node: Annotated[
        Path | None,
        Option(
            help="Directory of a trainer node with weights.publish = true, whose versions other nodes follow.",
            rich_help_panel=_TINKER,
        ),
    ] = None,
    samplers: Annotated[
        Path | None,
        Option(
            help="File with `URL KEY` of each node that follows --node, serves (serve.listen), and makes samples.",
            rich_help_panel=_TINKER,
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Serve a model to chat windows, agents and OpenAI's clients: /v1/chat/completions and the token endpoints of vLLM.

    Clients need the key: SWARM_API_KEY of the environment, else a new one that is printed at each start. A node serves
    its own policy, always the newest, with serve.listen in its node.toml. docs/serving.md has more.

    --tinker: scripts for the tinker SDK train adapters on the model, with the printed address and key. With --node and
    --samplers the nodes of a swarm follow these versions, and make the samples.

      swarm serve swarm-node                              the newest checkpoint of a node
      swarm serve my-model --listen 127.0.0.1:9000        a folder that `swarm export` made
      swarm serve Qwen/Qwen3-0.6B --tinker                scripts for the tinker SDK train adapters on it
    """
    with waiting("loading the packages"):
        from swarm.trained.model import load_target

    key = os.environ.get("SWARM_API_KEY", "") or secrets.token_urlsafe(24)
    if not key.isascii() or len(key) < 16:
        raise ConfigError("SWARM_API_KEY: expected at least 16 ASCII characters; unset it, and a key is made")
    for given, option in ((node, "--node"), (samplers, "--samplers")):
        if given is not None and not tinker:
            raise ConfigError(f"{option}: only with --tinker")
    if (node is None) != (samplers is None):
        raise ConfigError(
            "--node and --samplers go together: the one publishes the weights that the others sample with"
        )
    if tinker:
        is_hub_id = target.count("/") == 1 and target[0] not in "./~"  # as clients write it
        name = name or (target if is_hub_id else Path(target).name)
        served = {"name": name, "listen": listen, "key": key, "max_rows": max_rows, "device": device, "store": store}
        load_extra("tinker")(target, step, node, samplers, is_trusted=trust, **served)
    else:
        with waiting(f"loading the model of {target}"):
            model = load_target(target, step)
        _serve_openai(model, target, name or Path(target).name, listen, key, max_rows, device)


def _serve_openai(
    model: "TrainedModel", target: str, name: str, listen: str, key: str, max_rows: int, device: str
) -> None:
    from swarm.generation.transformers_engine import TransformersGenerator
    from swarm.model.compute_dtype import place
    from swarm.model.network import most_tokens
    from swarm.serving import served_policy
    from swarm.trained.provenance import exported_version
    from swarm.types import PolicyVersion

    name = name or model.source_name
    version = model.version or exported_version(Path(target).expanduser(), model.base_digest)
    version = version or PolicyVersion(policy_id=model.source_name, step=0, digest=model.base_digest)
    place(model.network, device)
    engine = TransformersGenerator(model.network, model.tokenizer, version, seed=0, max_rows=max_rows)
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
    wait_for_signal()
    server.stop()
    engine.close()
