"""Many adapters beside other engines: the client of llama.cpp's server, against a fake server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lora_peers
import pytest
from peers import llama

SERVER = """#!{python}
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass

    def do_GET(self): self.answer({{}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({log!r}, "a") as log: log.write(json.dumps([sys.argv[1:], body]) + "\\n")
        self.answer({{"tokens_predicted": body["n_predict"] - {missing}}})

    def answer(self, found):
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def put_server(root: Path, missing: int = 0) -> Path:
    log, file = root / "asked", llama.build_folder(root) / "bin" / "llama-server"
    file.parent.mkdir(parents=True)
    file.write_text(SERVER.format(python=sys.executable, log=str(log), missing=missing))
    file.chmod(0o755)
    return log


def test_requests_of_a_server_of_llama_cpp(tmp_path: Path) -> None:
    log = put_server(tmp_path)
    adapters = [Path("/a/0.gguf"), Path("/a/1.gguf")]
    assert lora_peers.serve_llama(tmp_path, "/m.gguf", adapters, 5) > 0
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    words, bodies = asked[0][0], [body for _, body in asked]
    assert len(bodies) == 10
    assert words[words.index("--lora") + 1] == "/a/0.gguf,/a/1.gguf"
    assert "--lora-init-without-apply" in words
    wanted = [
        (ask.prompt, ask.max_tokens, [{"id": ask.adapter, "scale": 1.0}])
        for ask in lora_peers.make_requests(5, 2)
    ]
    found = [(body["prompt"], body["n_predict"], body["lora"]) for body in bodies]
    assert sorted(found[:5], key=str) == sorted(wanted, key=str)


def test_a_short_answer_of_llama_cpp(tmp_path: Path) -> None:
    put_server(tmp_path, missing=1)
    with pytest.raises(SystemExit, match="answered with"):
        lora_peers.serve_llama(tmp_path, "/m.gguf", [Path("/a/0.gguf")], 2)


def test_a_server_of_llama_cpp_that_ends(tmp_path: Path) -> None:
    put_server(tmp_path)
    (llama.build_folder(tmp_path) / "bin" / "llama-server").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SystemExit, match="ended with status 3"):
        lora_peers.serve_llama(tmp_path, "/m.gguf", [Path("/a/0.gguf")], 2)
