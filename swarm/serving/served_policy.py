"""Serving of an engine over the HTTP interface, and the key that clients need."""

import logging
import os
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from swarm.errors import ConfigError
from swarm.interfaces import Completer, Tokenizer

if TYPE_CHECKING:
    from swarm.serving.agent_runs import AgentRuns
    from swarm.serving.http_server import HttpServer

logger = logging.getLogger(__name__)

KEY_FILE: Final = "api.key"  # in a node's directory


def serve(
    engine: Completer,
    tokenizer: Tokenizer,
    *,
    name: str,
    source: str,
    context_tokens: int,
    listen: str,
    key: str,
    keys: Sequence[tuple[str, str, bool]] = (),
    runs: "AgentRuns | None" = None,
) -> "tuple[HttpServer, str]":
    """Starts to serve an engine in a new thread.

    Args:
        engine: engine that answers requests; not closed with the server.
        tokenizer: tokenizer of the engine's model.
        name: name of the model for clients.
        source: source of the initial model.
        context_tokens: most tokens of a prompt and its answer together.
        listen: host:port; port 0 takes a free one.
        key: bearer token that clients must send.
        keys: further tokens, each with its name and True if runs of agents with it are learned from.
        runs: runs of agents; None: none are recorded.

    Returns:
        The server, to be stopped before the engine is closed, and the base address for clients.

    Raises:
        ConfigError: `listen` is not an address where the server can listen, or a package is missing.
    """
    with needs_packages():
        from swarm.serving.openai_app import ApiKey, OpenAiApp, ServedModel

    model = ServedModel(name=name, completer=engine, tokenizer=tokenizer, context_tokens=context_tokens, source=source)
    others = [ApiKey(key=token, name=name_, learns=learns) for token, name_, learns in keys]
    server, address = start_server(OpenAiApp(model, key, keys=others, runs=runs).routes, listen)
    url = f"{address}/v1"
    logger.info("policy served", extra={"url": url, "model": name})
    return server, url


def start_server(app: Any, listen: str) -> "tuple[HttpServer, str]":
    """Starts to serve an ASGI application in a new thread; returns the server and its address.

    Raises:
        ConfigError: `listen` is not an address where the server can listen, or a package is missing.
    """
    with needs_packages():
        from swarm.serving.http_server import HttpServer
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"serve.listen {listen!r}: expected host:port, such as 127.0.0.1:8300")
    server = HttpServer(app)
    return server, f"http://{host}:{server.start(host.strip('[]'), int(port))}"


@contextmanager
def needs_packages() -> Generator[None]:
    """Turns an ImportError in the block into a ConfigError with the command that installs the package."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'swarm-trainer[serve]'") from None


def read_or_make_key(directory: Path, name: str = "") -> str:
    """Reads the main key of a node, or the key `name`; the first call makes it, in a file that only its owner can read.

    Raises:
        ConfigError: the file has fewer than 16 characters, or a character that is not ASCII.
        OSError: the file cannot be made or read.
    """
    path = directory / (f"api-{name}.key" if name else KEY_FILE)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
    except FileExistsError:
        pass
    key = path.read_text().strip()
    if not key.isascii() or len(key) < 16:
        raise ConfigError(f"{path}: expected a key of at least 16 ASCII characters; delete it, and one is made")
    return key
