"""Settings that several front ends reject; tests/e2e/test_front_ends.py has the rest."""

import asyncio
import socket
import subprocess
import sys

import msgspec
import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError, OctavoError
from octavo.server.api_servers import (
    APIServerSetup,
    _Processes,
    check_api_servers,
    serve_by_api_servers,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("record", "x.rec"),
        ("resume_grace", 5.0),
        ("state_dir", "x"),
        ("enable_sleep_mode", True),
        ("enable_elastic_ep", True),
    ],
)
def test_what_only_one_would_know(name, value):
    is_server = name in ServerConfig.__struct_fields__
    server, engine = ({name: value}, {}) if is_server else ({}, {name: value})
    engine_config = EngineConfig.from_kwargs(**engine)
    check_api_servers(ServerConfig(**server), engine_config)
    with pytest.raises(ConfigError, match=f"^{name} .* with api_server_count=2"):
        check_api_servers(ServerConfig(**server, api_server_count=2), engine_config)


def test_front_ends_divide_memory():
    engine = EngineConfig.from_kwargs(mm_processor_cache_gb=1.0)
    config = ServerConfig(request_memory_bytes=2**30)
    setup = APIServerSetup(config, engine, "", "", "", "", "", 0, 0, 0.0)
    processes = _Processes(setup, 4)
    assert processes._setup.config.request_memory_bytes == 2**28
    assert processes._setup.engine_config.model.mm_processor_cache_gb == 0.2  # and what they share
    assert processes._engine_config is engine  # of the coordinator, which plans for all


def test_there_is_no_room_for_processes(monkeypatch):
    def refuse(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = serve_by_api_servers(
            ServerConfig(api_server_count=2), EngineConfig.from_kwargs(), listener
        )
        with pytest.raises(OctavoError, match=r"No process can be started: Resource temp"):
            asyncio.run(serving)


def test_a_process_is_told_all_settings():
    setup = APIServerSetup(
        ServerConfig(api_key=["k"], allowed_hosts=["a"], default_chat_template_kwargs={"x": 1}),
        EngineConfig.from_kwargs(
            model="m", speculative_config={"method": "ngram", "num_speculative_tokens": 3}
        ),
        *("path", "tokenizer"),
        "folder",
        "adapters",
        "media",
        slot=1,
        number=2,
        life=5,
        listener=3,
        created=4,
        clock_epoch=7.5,
        pulse=6,
    )
    data = msgspec.msgpack.encode(setup)
    assert msgspec.msgpack.decode(data, type=APIServerSetup) == setup


@pytest.mark.parametrize("module", ["api_server_process", "coordinator_process"])
def test_processes_share_a_clock_though_the_systems_was_set(module):
    code = f"""
from types import SimpleNamespace
from octavo.server import {module} as process
def end(*args, **kwargs):
    print(process.clock.epoch())
    raise SystemExit
process.read_message = lambda kind: SimpleNamespace(
    clock_epoch=5.5, folder="", number=0, life=0,
    config=SimpleNamespace(log_level="info", log_format="text"),
)
process.CoordinatorProcess = process._coordinate = end
process.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "5.5\n", done.stderr
