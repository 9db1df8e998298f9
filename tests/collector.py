"""Small collector of OpenTelemetry spans: OTLP over HTTP with JSON."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Collector(ThreadingHTTPServer):
    """Receiver that answers with the next of `statuses`, the last one for ever.

    A status of 0 is no answer until the collector is closed.
    """

    daemon_threads = True

    def __init__(self, statuses):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses = list(statuses)
        self.messages = []
        self.headers = []
        self.closed = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self):
        """Spans of all messages, with attributes and resource as dictionaries."""
        return [
            span
            | {"attributes": plain(span["attributes"])}
            | {"resource": plain(resource["resource"]["attributes"])}
            for message in list(self.messages)
            for resource in message["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]

    def wait_for(self, number):
        """Return the spans as soon as there are `number`."""
        end = time.monotonic() + 120
        while len(self.spans) < number:
            assert time.monotonic() < end, self.spans
            time.sleep(0.02)
        assert len(self.spans) == number
        return self.spans


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = server.statuses.pop(0) if len(server.statuses) > 1 else server.statuses[0]
        server.headers.append((self.path, dict(self.headers)))
        if not status:
            server.closed.wait()
            self.close_connection = True
            return
        if status == 200:
            server.messages.append(body)
        self.send_response(status)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def collector(*statuses: int) -> Iterator[Collector]:
    """Run a collector; its default is to accept all spans."""
    with Collector(statuses or (200,)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.closed.set()
            server.shutdown()
            thread.join()


def plain(attributes):
    """Return OTLP's attributes as a dictionary."""
    return {item["key"]: value_of(item["value"]) for item in attributes}


def value_of(value):
    [(kind, content)] = value.items()
    if kind == "arrayValue":
        return [value_of(item) for item in content["values"]]
    return int(content) if kind == "intValue" else content
