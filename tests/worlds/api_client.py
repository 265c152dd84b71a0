"""A client of a served policy on this machine, over real connections."""

import http.client
import json
from collections.abc import Mapping
from typing import Any

from waits import HANG_S


class ApiClient:
    """Requests to one port; each carries the key, unless it names another one."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key

    def send(
        self, path: str, body: object = None, key: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and content of the reply to a POST, or to a GET without a body; key "": none is sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        key = self.key if key is None else key
        all_headers = ({"Authorization": f"Bearer {key}"} if key else {}) | {**(headers or {})}
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, content, all_headers)
        response = connection.getresponse()
        read = response.status, response.read()
        connection.close()
        return read

    def ask(self, path: str, body: object = None, **options: Any) -> tuple[int, dict[str, Any]]:
        """Status and decoded content of the reply."""
        status, content = self.send(path, body, **options)
        return status, json.loads(content)

    def events(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events of a streamed reply."""
        status, content = self.send(path, {**body, "stream": True})
        assert status == 200, content
        *lines, last = [line for line in content.decode().split("\n\n") if line]
        assert last == "data: [DONE]", last
        return [json.loads(line.removeprefix("data: ")) for line in lines]
