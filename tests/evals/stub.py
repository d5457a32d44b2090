"""An HTTP server that answers sums, or whatever it was told to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stub(BaseHTTPRequestHandler):
    """Answers `N + 0` with N, or with what its server was told to do."""

    server: StubServer

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "stub"}]} if self.server.models else {"data": []})

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append((body, dict(self.headers)))
            server.busy += 1
            server.most = max(server.most, server.busy)
            server.lock.notify_all()
            server.lock.wait_for(lambda: server.most >= server.together, 60)
        time.sleep(0.1)  # in which more may come
        with server.lock:
            server.busy -= 1
        if server.status != 200:
            self._reply(server.status, {"error": {"message": "the stub refuses"}})
            return
        if server.reply is not None:
            self._send(200, server.reply.encode())
            return
        number = body["messages"][-1]["content"].split()[0]
        message = {"role": "assistant", "content": None if number == "8" else f"#### {number}"}
        choices = [{"message": message, "finish_reason": "stop"}]
        self._reply(200, {"choices": choices, "usage": {"completion_tokens": 2}})

    def _reply(self, status: int, content: dict) -> None:
        self._send(status, json.dumps(content).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class StubServer(ThreadingHTTPServer):
    request_queue_size = 64

    def __init__(self, *, status: int = 200, models: bool = True, reply: str | None = None):
        super().__init__(("127.0.0.1", 0), Stub)
        self.status, self.models, self.reply = status, models, reply
        self.lock = threading.Condition()
        self.bodies: list[tuple[dict, dict]] = []
        self.busy = self.most = 0
        self.together = 1  # requests that the first of them waits for

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


@contextmanager
def serving(**options) -> Iterator[StubServer]:
    with StubServer(**options) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
