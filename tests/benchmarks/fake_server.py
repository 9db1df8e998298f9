"""Server that streams completions, for the tests of the comparison.

usage: fake_server.py BEHAVIOUR PORT
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

behaviour, port = sys.argv[1], int(sys.argv[2])
if behaviour == "dies":
    sys.exit("no such model, says the fake")


class Handler(BaseHTTPRequestHandler):
    """Handler of a behaviour: well, short (a token too few), dies, garbage, refuses, nameless."""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.reply({"data": [] if behaviour == "nameless" else [{"id": "fake"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body.get("stream"):
            self.reply({"choices": [{"text": "a"}]})
            return
        if behaviour == "refuses":
            self.reply({"error": "full"}, 503)
            return
        self.send_response(200)
        self.end_headers()
        if behaviour == "garbage":
            self.wfile.write(b"data: <html>\n\n")
            return
        count = body["max_tokens"] - (behaviour == "short")
        for _ in range(count):
            self.send({"choices": [{"text": "a", "finish_reason": None}]})
        self.send({"choices": [{"text": "", "finish_reason": "length"}]})
        self.send({"choices": [], "usage": {"completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")

    def reply(self, value: object, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def send(self, value: object) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")


ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
