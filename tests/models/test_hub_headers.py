"""Headers of GGUF files on the hub, from a server with files and ranges of their bytes."""

import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import msgspec
import numpy as np
import pytest

from octavo.checkpoints.gguf.header import GGUFHeader
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.errors import HubError, ModelError
from octavo.model_tools.plan import plan
from octavo.models import hub_headers
from octavo.models.hub import resolve_model
from octavo.models.registry import read_spec
from tests.checkpoints.gguf.test_file import LLAMA, make, split
from tests.gguf_files import write_gguf

COMMIT = "0" * 40


class Hub(ThreadingHTTPServer):
    """Hub with one repository, org/name."""

    def __init__(self, files: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.sent = files, 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        wanted = self.rfile.read(length).decode()
        self._answer(msgspec.json.encode([e for e in self._entries() if e["path"] in wanted]))

    def do_GET(self) -> None:
        """Answer with the list of files, or with a range of a file."""
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/name/tree/"):
            self._answer(msgspec.json.encode(self._entries()))
        elif path.startswith("/api/models/org/name"):
            self._answer(msgspec.json.encode({"id": "org/name", "sha": COMMIT, "siblings": []}))
        elif path.startswith("/org/name/resolve/"):
            data = (self.server.files / path.rpartition("/")[2]).read_bytes()
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            assert found is not None, "the whole file is requested"
            self.server.sent += int(found[2]) + 1 - int(found[1])
            self._answer(data[int(found[1]) : int(found[2]) + 1], 206)
        else:
            self._answer(b"{}", 404)

    def _entries(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": COMMIT}
            for file in sorted(self.server.files.iterdir())
        ]

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "files").mkdir()
    with Hub(tmp_path / "files") as server:
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        fetch_headers = hub_headers.fetch_headers
        fetch_headers.cache_clear()
        yield server
        fetch_headers.cache_clear()
        server.shutdown()


@pytest.mark.parametrize("first", [64, 2**22])
def test_only_the_header_is_requested(
    first: int, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_headers, "_FIRST_NBYTES", first)
    original = hub.files / "m-Q4_K_M.gguf"
    make("llama", original)
    nbytes = original.stat().st_size
    with original.open("ab") as file:
        file.write(bytes(2**24))  # after the tensors
    (hub.files / "m-Q8_0.gguf").write_bytes(b"another one")
    found = resolve_model("org/name:Q4_K_M", download_dir=str(tmp_path), header_only=True)
    assert found.name == original.name
    assert found.stat().st_size == nbytes + 2**24
    config = EngineConfig.from_kwargs().model
    specs = [read_spec(open_checkpoint(path), config) for path in (found, original)]
    assert specs[0] == specs[1]
    assert hub.sent <= max(first, 2**18)
    sent = hub.sent
    again = resolve_model("org/name:Q4_K_M", download_dir=str(tmp_path), header_only=True)
    assert (again, hub.sent) == (found, sent)


def test_split_files(hub: Hub, tmp_path: Path) -> None:
    make("llama", tmp_path / "whole.gguf")
    first, second = split(tmp_path / "whole.gguf", tmp_path)
    for part in (first, second):
        name = part.name.replace("m-", "m-Q4_K_M-")
        (hub.files / name).write_bytes(part.read_bytes())
    kwargs = {"model": "org/name:Q4_K_M", "download_dir": str(tmp_path / "cache")}
    items = plan(kwargs | {"skip_tokenizer_init": True})["items"]
    expected = plan({"model": str(first), "skip_tokenizer_init": True})["items"]
    assert items["weights"] == expected["weights"]


def test_factors_are_ones(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros would be rejected: factors must be above 0."""
    monkeypatch.setattr(hub_headers, "_FIRST_NBYTES", 64)
    fields: dict[str, Any] = {"block_count": 1, "attention.head_count": 1}
    fields |= {"feed_forward_length": 64}
    fields |= {"embedding_length": 32, "context_length": 64}
    fields |= {"attention.layer_norm_rms_epsilon": 1e-5}
    metadata = {f"llama.{key}": value for key, value in fields.items()}
    factors = np.full(16, 2.0, "<f4")
    rows = np.zeros((4096, 32), "<f4")
    tensors = {
        name: (0, numbers.shape, numbers.tobytes())
        for name, numbers in (("token_embd.weight", rows), ("rope_freqs.weight", factors))
    }
    write_gguf(hub.files / "m-F32.gguf", LLAMA | metadata, tensors)
    found = resolve_model("org/name:F32", download_dir=str(tmp_path), header_only=True)
    assert hub.sent < 2**14
    header = GGUFHeader(found)
    begin = header.tensors["rope_freqs.weight"].begin
    assert np.frombuffer(header.data, "<f4", 16, begin).tolist() == [1.0] * 16
    assert open_checkpoint(found).config is not None


def test_a_downloaded_file_is_used(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m-Q4_K_M.gguf").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    found = resolve_model("org/name:Q4_K_M", header_only=True)
    assert found == tmp_path / "m-Q4_K_M.gguf"


def test_errors(hub: Hub, tmp_path: Path) -> None:
    (hub.files / "m-Q4_K_M.gguf").write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + bytes([255] * 16))
    (hub.files / "m-Q8_0.gguf").write_bytes(b"a text")
    for name, message in (
        ("org/name:Q4_K_M", "is damaged: the number of tensors"),
        ("org/name:Q8_0", "is not a GGUF file"),
        ("org/name:Q2_K", "has no GGUF file whose name ends with Q2_K"),
        ("org/other:Q2_K", "neither a folder here nor a model on the hub|rejected"),
    ):
        kind = HubError if "Q2" in name else ModelError
        with pytest.raises(kind, match=message):
            resolve_model(name, download_dir=str(tmp_path), header_only=True)
