"""Pages over plain HTTP: one that fails ends no other."""

import logging
import socket

import pytest
from waits import HANG_S

from swarm.telemetry.page_server import Page, PageServer


def get(port: int, path: str, *headers: str) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        connection.sendall("\r\n".join([f"GET {path} HTTP/1.1", *headers, "", ""]).encode())
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_page_that_fails_is_logged_and_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    made: list[str] = []

    def page_of(path: str) -> Page | None:
        made.append(path)
        if path == "/metrics":
            raise ZeroDivisionError("a figure of nothing")
        return Page(body=b"ok\n")

    server = PageServer(page_of)
    port = server.start("127.0.0.1", 0)
    try:
        with caplog.at_level(logging.ERROR):
            failed = [get(port, "/metrics") for _ in range(3)]
            assert get(port, "/healthz").endswith(b"ok\n")
    finally:
        server.stop()
    assert all(answer.startswith(b"HTTP/1.1 500 ") and b"figure" not in answer for answer in failed)
    assert caplog.records and all(record.exc_info for record in caplog.records)
    assert len(caplog.records) == made.count("/metrics")


def test_a_page_of_this_machine_is_answered_to_no_name_that_anybody_may_register() -> None:
    server = PageServer(lambda _: Page(body=b"figures"))
    port = server.start("127.0.0.1", 0)
    try:
        for host in (
            "127.0.0.1",
            f"localhost:{port}",
            "[::1]:80",
            "0.0.0.0",
            "8.8.8.8:80",
            "head-node",
            "node.internal",
        ):
            assert get(port, "/", f"Host: {host}").endswith(b"figures"), host
        assert get(port, "/").endswith(b"figures"), "no browser"
        for headers in (["Host: evil.example.org"], [f"host:rebound.example:{port}"], ["Host: localhost", "Host: a.b"]):
            answer = get(port, "/", *headers)
            assert answer.startswith(b"HTTP/1.1 421 ") and b"figures" not in answer, headers
    finally:
        server.stop()
