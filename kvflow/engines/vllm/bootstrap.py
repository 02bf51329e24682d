"""`GET /query`, answered like the bootstrap server of vLLM's MooncakeConnector.

A router asks once for the id of prefill's engine, and passes it to decode with each request. Here, that id is the
address of the first prefill rank, so decode needs no further lookup.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Final

from kvflow import ConfigError

__all__ = ["serve_query"]

REQUEST_S: Final = 5.0


@contextmanager
def serve_query(host: str, port: int, endpoint: str) -> Iterator[None]:
    """Serve queries in a thread, for which vLLM's worker does not wait.

    Args:
        host: Host to listen on.
        port: Port to listen on.
        endpoint: Endpoint of the first prefill rank.

    Raises:
        ConfigError: The address cannot be bound.
    """
    body = json.dumps({"0": {"engine_id": endpoint, "worker_addr": {"0": {"0": endpoint}}}}).encode()

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S

        def do_GET(self) -> None:
            if self.path != "/query":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing: a router asks only once."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ConfigError("address cannot be bound", setting="mooncake_port", value=port, detail=str(error)) from error
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, name="kvflow-query", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
