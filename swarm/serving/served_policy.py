"""Puts an engine behind the HTTP interface, with the key that clients need."""

import logging
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from swarm.errors import ConfigError
from swarm.interfaces import Completer, Tokenizer

if TYPE_CHECKING:
    from swarm.serving.http_server import HttpServer

logger = logging.getLogger(__name__)

KEY_FILE: Final = "api.key"  # of a node's directory


def serve(
    engine: Completer, tokenizer: Tokenizer, *, name: str, source: str, context_tokens: int, listen: str, key: str
) -> "tuple[HttpServer, str]":
    """Serves an engine in a thread of its own.

    Args:
        engine: answers requests; it is not closed with the server.
        name: of the model, as clients call it.
        source: the initial model.
        context_tokens: most of a prompt and its answer.
        listen: host:port; port 0 takes a free one.

    Returns:
        The server, to be stopped before the engine is closed, and the base address for clients.

    Raises:
        ConfigError: nothing can listen there, or a package is missing.
    """
    with needs_packages():
        from swarm.serving.openai_app import OpenAiApp, ServedModel

    model = ServedModel(name=name, completer=engine, tokenizer=tokenizer, context_tokens=context_tokens, source=source)
    server, address = start_server(OpenAiApp(model, key).routes, listen)
    url = f"{address}/v1"
    logger.info("policy served", extra={"url": url, "model": name})
    return server, url


def start_server(app: Any, listen: str) -> "tuple[HttpServer, str]":
    """Serves an ASGI application in a thread of its own; returns the server and its address.

    Raises:
        ConfigError: nothing can listen there, or a package is missing.
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
    """Turns a missing package into a ConfigError with the command that installs it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}: pip install 'swarm-trainer[serve]'") from None


def read_or_make_key(directory: Path) -> str:
    """The key in a node's directory, made at the first call; readable by its owner alone.

    Raises:
        ConfigError: the file is empty or cannot be read.
    """
    path = directory / KEY_FILE
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
