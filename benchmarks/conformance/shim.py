"""Octavo's replacements of the imports of vLLM's tests: the server fixture and `vllm`'s modules.

A test that uses a part of vLLM's own code without a replacement is skipped with a reason that
begins with `OWN_CODE`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from octavo.compat import vllm as compat
from octavo.models.hub import builtin_adapter

OWN_CODE = "vLLM's own code: "
MODEL_VARIABLE = "CONFORMANCE_MODEL"
"""Variable with the folder of the model that replaces all others."""
_COMMIT = "0" * 40

# Features that a whole file's server is started with, but only some of its tests need: if Octavo
# rejects the flag, the server is started without it, and those tests are rejected one by one.
OPTIONAL_FLAGS = frozenset(
    {
        "--enable-auto-tool-choice",
        "--enable-lora",
        "--exclude-tools-when-tool-choice-none",
        "--limit-mm-per-prompt",
        "--lora-module",
        "--lora-modules",
        "--max-cpu-loras",
        "--max-lora-rank",
        "--max-loras",
        "--reasoning-parser",
        "--runner",
        "--show-hidden-metrics-for-version",
        "--tool-call-parser",
    }
)
# A share of a GPU's memory has no meaning on another machine.
_LEFT_OUT = ("--gpu-memory-utilization",)
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_TAIL_CHARS = 600
_IMAGE_URL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwAD"
    "hgGAWjR9awAAAABJRU5ErkJggg=="
)

file_refusals: list[str] = []
"""Messages of Octavo about flags of this file's server that it rejected."""
test_refusals: list[str] = []
"""Answers in this test with a status of 400 or more."""


class ServerError(Exception):
    """Error: Octavo did not start; the message is its last one."""


def offer_all(source: str) -> None:
    """Call `offer` for every name in a test's source with the form of a model."""
    for name in set(re.findall(r'"([\w.-]+/[\w.-]+)"', source)):
        offer(name)


def offer(name: str, model: Path | None = None) -> None:
    """Add the replacement model, or another one, with an adapter to the hub's cache."""
    folder = Path(os.environ["HF_HOME"], "hub", f"models--{name.replace('/', '--')}")
    if Path(name).is_dir() or name.count("/") != 1 or folder.exists():
        return
    snapshot = folder / "snapshots" / _COMMIT
    snapshot.mkdir(parents=True)
    adapter = builtin_adapter("octavo/stories-letters")
    assert adapter is not None
    model = Path(os.environ[MODEL_VARIABLE]) if model is None else model
    for file in [*model.iterdir(), *adapter.glob("adapter*")]:
        (snapshot / file.name).symlink_to(file.resolve())
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(_COMMIT)


def octavo_command(words: Sequence[str]) -> list[str]:
    """Return the command that corresponds to `vllm` with these words.

    The last of repeated flags counts.
    """
    options = _options(list(words))
    for name in (*options.get("", ())[1:], *options.get("--model", ())):
        offer(name)
    offer(*options.get("--tokenizer", [""]))
    for flag in _LEFT_OUT:
        options.pop(flag, None)
    if "serve" in options[""]:
        options["--metrics-prefix"] = ["vllm"]
    return [sys.executable, "-m", "octavo", *_words(options)]


def _options(words: list[str]) -> dict[str, list[str]]:
    """Group words by the preceding flag; those before all flags by ""."""
    found: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("-") and not word.lstrip("-")[:1].isdigit():
            flag, equals, value = word.partition("=")
            found[flag] = [value] if equals else []
        else:
            found.setdefault(flag, []).append(word)
    return found


def _words(options: Mapping[str, list[str]]) -> list[str]:
    """Invert `_options`."""
    return [word for flag, values in options.items() for word in (flag, *values) if word]


def _names(said: str, flag: str) -> bool:
    """Return True if a message is about a flag, or its setting."""
    return flag in said or re.search(rf"\b{flag[2:].replace('-', '_')}\b", said) is not None


def open_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class RemoteOpenAIServer:
    """Server for a test: vLLM's fixture of this name, implemented by Octavo."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        *,
        env_dict: Mapping[str, str] | None = None,
        seed: int = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: Mapping[str, Any] | None = None,
    ) -> None:
        words = ["serve", model, *map(str, vllm_serve_args), "--seed", str(seed)]
        if override_hf_configs is not None:
            words += ["--hf-overrides", json.dumps(override_hf_configs)]
        options = _options(words)
        self.uds = options["--uds"][0] if "--uds" in options else None
        self.host = options.get("--host", ["127.0.0.1"])[0]
        self.port = int(options["--port"][0]) if "--port" in options else open_port()
        if self.uds is None and "--port" not in options:
            words += ["--port", str(self.port)]
        self._env = {**os.environ, **(env_dict or {})}
        while not self._starts(octavo_command(words)):
            said = self._said()
            dropped = [f for f in _options(words) if f in OPTIONAL_FLAGS and _names(said, f)]
            file_refusals.append(said)
            if not dropped:
                raise ServerError(said)
            words = _words({f: v for f, v in _options(words).items() if f not in dropped})

    def _starts(self, command: list[str]) -> bool:
        """Start the server and wait until it is ready; return False if it ended."""
        self._log = Path(os.environ["CONFORMANCE_LOGS"], f"{time.time_ns()}.log")
        with self._log.open("wb") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self.proc = subprocess.Popen(
                command, env=self._env, stdout=log, stderr=log, start_new_session=True
            )
        noted = len(test_refusals)
        transport = httpx.HTTPTransport(uds=self.uds)
        end = time.monotonic() + _START_SECONDS
        with httpx.Client(transport=transport) as client:
            while self.proc.poll() is None:
                try:
                    # With a proxy's path, the address without it works, too.
                    if client.get(self.url_for("ready")).status_code == 200:
                        return True
                except httpx.TransportError:
                    pass
                finally:
                    del test_refusals[noted:]
                if time.monotonic() > end:
                    self._stop()
                    raise ServerError("The server is not ready after a minute.")
                time.sleep(0.05)
        return False

    def _said(self) -> str:
        """Return the server's last message."""
        text = self._log.read_text(errors="replace").strip()
        return text[-_TAIL_CHARS:].rpartition("error: ")[2]

    def _stop(self) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.proc.pid, signal.SIGKILL)
            self.proc.wait()

    def _get_process_termination_timeout(self) -> float:
        return _STOP_SECONDS

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    @property
    def url_root(self) -> str:
        return f"http://{'localhost' if self.uds else f'{self.host}:{self.port}'}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._client_options(), **({"timeout": 600} | options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_options(), **({"timeout": 600} | options))

    def get_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(**self._client_options(""), **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(**self._client_options(""), **options)

    def _client_options(self, path: str = "v1") -> dict[str, Any]:
        url = self.url_for(path) if path else self.url_root
        return {"base_url": url, "api_key": self.DUMMY_API_KEY, "max_retries": 0}


def note_answer(status: int, body: bytes) -> None:
    """Record a rejection of Octavo in this test."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        said = body[:_TAIL_CHARS].decode(errors="replace")
    test_refusals.append(f"{status}: {said}")


def watch_clients() -> None:
    """Have the tests' clients report their answers to `note_answer`."""
    import requests

    for name in ("httpx", "httpx2"):  # OpenAI's client has the one or the other
        if importlib.util.find_spec(name) is not None:
            _watch(importlib.import_module(name))
    ask = requests.Session.send

    def send(self: requests.Session, *args: Any, **options: Any) -> requests.Response:
        response = ask(self, *args, **options)
        if response.status_code >= 400:
            note_answer(response.status_code, response.content)
        return response

    requests.Session.send = send  # type: ignore[method-assign]


def _watch(module: Any) -> None:
    ask, ask_async = module.Client.send, module.AsyncClient.send

    def send(self: Any, *args: Any, **options: Any) -> Any:
        response = ask(self, *args, **options)
        if response.status_code >= 400:
            note_answer(response.status_code, response.read())
        return response

    async def send_async(self: Any, *args: Any, **options: Any) -> Any:
        response = await ask_async(self, *args, **options)
        if response.status_code >= 400:
            note_answer(response.status_code, await response.aread())
        return response

    module.Client.send, module.AsyncClient.send = send, send_async


def _own_code(path: str) -> Any:
    pytest.skip(OWN_CODE + path, allow_module_level=True)


class _Absent(type):
    """Class of vLLM's without a counterpart: it can be imported and named, but not used."""

    path: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.path}.{name}")

    def __call__(cls, *args: object, **options: object) -> Any:
        if "PYTEST_CURRENT_TEST" not in os.environ:  # for a constant of the file
            return absent(f"{cls.path}()")
        return _own_code(cls.path)

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return False  # a setting that is off

    def __iter__(cls) -> Any:
        return _own_code(cls.path)

    def __add__(cls, other: object) -> Any:
        return _own_code(cls.path)


def absent(path: str) -> Any:
    """Return a replacement of vLLM's `path`; an exception can be used in except clauses."""
    is_error = path.endswith(("Error", "Exception"))
    bases = (Exception,) if is_error else ()
    return _Absent(path.rpartition(".")[2], bases, {"path": path})


class LocalAssetServer:
    """Images for tests of models with vision."""

    def url_for(self, name: str) -> str:
        return _IMAGE_URL

    def get_image_asset(self, name: str) -> None:
        return None


class HFRunner:
    """Model in transformers that computes the embeddings of texts."""

    def __init__(self, name: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        offer(name)
        self._model = AutoModelForCausalLM.from_pretrained(name)
        self._tokenizer = AutoTokenizer.from_pretrained(name)

    def __enter__(self) -> HFRunner:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def get_prompt_embeddings(self, prompts: Sequence[str]) -> list[Any]:
        """Return the embeddings of each prompt, (tokens, hidden size)."""
        embed = self._model.get_input_embeddings()
        ids = [self._tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts]
        return [embed(row).squeeze(0).detach() for row in ids]


class _Asset:
    """Recording that a test uses."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        return _own_code(f"vllm.assets {name}") if name != "url" else _IMAGE_URL

    def get_local_path(self) -> str:
        return os.environ[MODEL_VARIABLE] + "/config.json"


class _Platform:
    """Replacement of `vllm.platforms.current_platform`: a CPU."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: name == "is_cpu"

    def device_count(self) -> int:
        return 0


class _Hub:
    """Replacement of `hf_api()` that downloads nothing."""

    def snapshot_download(self, *args: object, **options: object) -> str:
        return os.environ["CONFORMANCE_LOGS"]


def _tokenizer(tokenizer_name: str, **options: object) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_name)


def _tensor2base64(tensor: Any) -> str:
    import base64
    import io

    import torch

    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _no_change(*args: Any, **options: Any) -> Any:
    """Decorate, with or without arguments, without a change."""
    if len(args) == 1 and callable(args[0]) and not options:
        return args[0]
    return lambda function: function


_STAND_INS: dict[str, dict[str, Any]] = {
    "vllm.assets.audio": {"AudioAsset": _Asset},
    "vllm.model_executor.model_loader.weight_utils": {
        "download_weights_from_hf": lambda *args, **options: os.environ[MODEL_VARIABLE]
    },
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.multimodal.utils": {
        "encode_image_url": lambda *args, **options: _IMAGE_URL,
        "fetch_image": lambda *args, **options: None,
    },
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.tokenizers": {"get_tokenizer": _tokenizer},
    "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
    "vllm.utils.mem_constants": {"MiB_bytes": 2**20},
    "vllm.utils.network_utils": {"get_open_port": open_port},
    "vllm.utils.serial_utils": {"tensor2base64": _tensor2base64},
    "vllm.version": {
        "_prev_minor_version": lambda: "0.0",
        "_prev_minor_version_was": lambda version: False,
    },
    "tests.conftest": {},
    "tests.utils": {
        "ROCM_EXTRA_ARGS": [],
        "VLLM_PATH": Path.cwd(),
        "RemoteLaunchRenderServer": absent("RemoteLaunchRenderServer"),
        "RemoteOpenAIServer": RemoteOpenAIServer,
        "create_new_process_for_each_test": _no_change,
        "multi_gpu_only": _no_change,
        "requires_fp8": _no_change,
        "get_open_port": open_port,
    },
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of vLLM's modules that are missing: replacements, or else `absent`."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name in _STAND_INS or name.startswith("vllm."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_STAND_INS.get(module.__name__, {}))
        _fill(module)


def _fill(module: ModuleType) -> None:
    """Add `absent` for the missing names of a module."""

    def missing(name: str) -> Any:
        path = f"{module.__name__}.{name}"
        if name.startswith("__"):
            raise AttributeError(path)
        if path in _STAND_INS:
            raise AttributeError(path)  # a module, to be imported
        return absent(path)

    module.__dict__["__getattr__"] = missing


def install() -> None:
    """Install the replacements of `vllm` and the tests' helpers in this process."""
    compat.install()
    for name, module in sys.modules.items():
        if name.partition(".")[0] == "vllm":
            module.__dict__.update(_STAND_INS.get(name, {}))
            _fill(module)
    sys.meta_path.insert(0, _Finder())
