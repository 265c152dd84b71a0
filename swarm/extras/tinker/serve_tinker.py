"""`swarm serve --tinker`: the interface of the tinker SDK, alone or as a node that others follow and sample for."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from swarm.clock import SystemClock
from swarm.config import NODE_FILE, NodeConfig, load_config
from swarm.errors import ConfigError
from swarm.process import wait_for_signal
from swarm.trained.own_directories import code_of_engine, code_of_node, require_trusted
from swarm.types import Role

if TYPE_CHECKING:
    from swarm.extras.tinker.tinker_app import TinkerApp
    from swarm.extras.tinker.tinker_nodes import SamplingNodes
    from swarm.extras.tinker.tinker_samplers import Publish
    from swarm.serving.http_server import HttpServer
    from swarm.trained.model import TrainedModel, WhichStep

console = Console()


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerSettings:
    """Address, key and limits of a served model."""

    name: str  # as clients call it
    listen: str
    key: str
    max_rows: int
    device: str
    store: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedTinker:
    """A running server, with the address and the key that its clients need."""

    server: "HttpServer"
    app: "TinkerApp"
    url: str
    key: str  # of its clients


def serve_tinker(
    target: str,
    step: "WhichStep",
    node: Path | None,
    samplers: Path | None,
    *,
    name: str,
    listen: str,
    key: str,
    max_rows: int,
    device: str,
    store: Path,
    is_trusted: bool = False,
) -> None:
    """Serves until Ctrl-C or SIGTERM (blocking).

    Args:
        target: directory of a node or a model source; with `node` the source that this node trains.
        step: checkpoint to serve; None for the newest, and with `node`.
        node: directory of the node that publishes; None to serve alone.
        samplers: file with the nodes that sample (`read_nodes`); None to serve alone.
        name, listen, key, max_rows, device, store: see `TinkerSettings`.
        is_trusted: True: code that the node's directory names is loaded, whoever made it.

    Raises:
        ConfigError: names the option and the fix.
    """
    settings = TinkerSettings(name=name, listen=listen, key=key, max_rows=max_rows, device=device, store=store)
    from swarm.trained.model import load_target

    if node is None or samplers is None:
        started = start_tinker(load_target(target, step), settings)
        wait_for_signal()
        end_tinker(started)
        return
    from node.daemon import run_daemon
    from swarm.extras.tinker.tinker_node import TinkerNode
    from swarm.extras.tinker.tinker_nodes import SamplingNodes, read_nodes
    from swarm.telemetry import setup_logging

    config = load_config(NodeConfig, node / NODE_FILE)
    require_trusted(node, code_of_node(config) | code_of_engine(config), is_trusted)
    if set(config.roles) != {Role.TRAINER} or not config.weights.publish or config.model.lora_rank:
        raise ConfigError(
            f'--node {node}: needs roles = ["trainer"], weights.publish = true and model.lora_rank = 0 in {NODE_FILE}, '
            "as merged weights are published"
        )
    if step is not None or config.model.source != target:
        raise ConfigError(
            f"TARGET {target}: a node trains its own model, and {node / NODE_FILE} has {config.model.source!r}; "
            "name that one, without --step"
        )
    setup_logging(config.telemetry.log_level, config.telemetry.log_format, config.name)
    nodes = SamplingNodes(read_nodes(samplers), SystemClock())

    def make(config: NodeConfig) -> TinkerNode:
        return TinkerNode(config, lambda model, publish: start_tinker(model, settings, publish, nodes), end_tinker)

    asyncio.run(run_daemon(config, make))


def start_tinker(
    model: "TrainedModel",
    settings: TinkerSettings,
    publish: "Publish | None" = None,
    nodes: "SamplingNodes | None" = None,
) -> StartedTinker:
    """Starts a server in its own thread, and prints its address and key.

    Args:
        model: model to serve; its adapters are merged into its weights.
        settings: address, key and limits.
        publish: makes an adapter a version that nodes follow; None: no node follows.
        nodes: nodes that sample; None: all samples are made here.

    Raises:
        ConfigError: the server cannot listen at the address, or a package is missing.
    """
    from swarm.extras.tinker.tinker_store import TinkerStore
    from swarm.model.compute_dtype import place
    from swarm.model.lora import merge_adapters
    from swarm.model.network import most_tokens
    from swarm.model.version_digest import published_state, weights_digest
    from swarm.serving.served_policy import needs_packages, start_server

    with needs_packages():
        from swarm.extras.tinker.tinker_app import KEY_PREFIX, TinkerApp
        from swarm.extras.tinker.tinker_samplers import Samplers, TinkerModel

    merge_adapters(model.network)
    model.network.requires_grad_(False)
    network = model.network
    place(network, settings.device)
    digest = weights_digest(published_state(network))
    context = most_tokens(network)
    clock = SystemClock()
    key = settings.key if settings.key.startswith(KEY_PREFIX) else KEY_PREFIX + settings.key
    app = TinkerApp(
        TinkerModel(
            name=settings.name, network=network, digest=digest, tokenizer=model.tokenizer, context_tokens=context
        ),
        Samplers(model.tokenizer, context, settings.max_rows, nodes),
        TinkerStore(settings.store, settings.name, model.source_name, digest, clock),
        key,
        clock,
        publish,
    )
    server, url = start_server(app.routes, settings.listen)
    for line in (
        f"model {settings.name}, weights {digest.hex()[:16]}; saved ones go to {settings.store}; Ctrl-C ends it",
        f"export TINKER_BASE_URL={url} TINKER_API_KEY={key} TINKER_TELEMETRY=0",
    ):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return StartedTinker(server=server, app=app, url=url, key=key)


def end_tinker(started: StartedTinker) -> None:
    """Ends a server, its training and its engines, and prints the number of samples by node (blocking)."""
    started.server.stop()
    started.app.close()
    samplers = started.app.samplers
    by_node = {} if samplers.nodes is None else samplers.nodes.num_answers
    made = [*(f"{count} by {url}" for url, count in by_node.items()), f"{samplers.num_made_here} here"]
    console.print(f"samples: {', '.join(made)}", soft_wrap=True, highlight=False, markup=False)
