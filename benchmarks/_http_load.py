"""Clients of a served policy, a process: `python -m benchmarks._http_load PORT KEY CLIENTS CALLS BODY`."""

import http.client
import sys
import threading


def main(port: int, key: str, clients: int, calls: int, body: bytes) -> None:
    """Every client keeps a connection and calls again and again."""

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        for _ in range(calls):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5].encode())
