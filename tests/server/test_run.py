"""Server as a process: listening, signals, exit status."""

import asyncio
import contextlib
import gc
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from octavo import cli
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError, OctavoError
from octavo.fleet.start import EngineProcesses
from octavo.observability.recording import RecordSettings
from octavo.server import listen, run, serve
from octavo.server.state import ServerState
from octavo.system.device import SWITCH_INTERVAL
from tests.served import stand_in

ROOT = Path(__file__).parents[2]


class Process:
    def __init__(self, mode, *flags, before=()):
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.server.fake_serve", mode, *flags],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        self.listening = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if match := re.search(r"listening on (https?://[\d.:\[\]]+)", line):
                self.url = match[1]
                self.listening.set()

    def signal(self, number):
        self.process.send_signal(number)

    def wait_for(self, text):
        end = time.monotonic() + 100
        while not any(text in line for line in self.lines):
            assert time.monotonic() < end, self.lines
            time.sleep(0.01)

    def wait(self):
        status = self.process.wait(100)
        self._reader.join()
        return status


@contextlib.contextmanager
def serving(mode, *flags, before=()):
    server = Process(mode, *flags, before=before)
    try:
        assert server.listening.wait(100), server.lines
        yield server
    finally:
        server.process.kill()
        server.wait()
        server.process.stderr.close()


def test_what_the_server_makes_of_its_process(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    before = ["prlimit", "--nofile=100:300", "--"]
    if shutil.which(before[0]) is None:
        pytest.skip("the prlimit command is not installed")
    with serving("ready", "--log-format", "json", before=before) as server:
        server.wait_for('"process"')
        (facts,) = [json.loads(line) for line in server.lines if '"process"' in line]
        assert facts["parallel"] == "false"  # the cores are the model's
        assert facts["switch_interval"] == pytest.approx(SWITCH_INTERVAL)
        assert facts["open_files"] == [300, 300]
        assert facts["frozen"]
        response = httpx.get(server.url + "/version", timeout=60)
        assert "server" not in response.headers
        httpx.get(server.url + "/v1/models", timeout=60)
        server.wait_for("/v1/models")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        lines = [json.loads(line) for line in server.lines]
        assert len([line for line in lines if "/v1/models" in line["message"]]) == 1


def test_an_address_of_six_words_and_a_setting_of_the_users_own(monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    with serving("ready", "--host", "::1", "--log-format", "json") as server:
        assert server.url.startswith("http://[::1]:")
        server.wait_for('"process"')
        (facts,) = [json.loads(line) for line in server.lines if '"process"' in line]
        assert facts["parallel"] == "true"
        assert httpx.get(server.url + "/health", timeout=60).status_code == 200


def test_listens_while_loading_and_stops_at_once_then():
    with serving("loading") as server:
        assert httpx.get(server.url + "/health", timeout=60).status_code == 200
        assert httpx.get(server.url + "/ready", timeout=60).status_code == 503
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("words", "origins"),
    [
        (['["*"]'], ["*"]),
        (["*"], ["*"]),
        (["https://a.test", "https://b.test"], ["https://a.test", "https://b.test"]),
        (['["https://b.test"]', "x"], ["https://b.test", "x"]),
    ],
)
def test_origins_as_words_or_json(words, origins, monkeypatch):
    seen = {}
    stand_in(monkeypatch, seen)
    assert cli.main(["serve", "--allowed-origins", *words]) == 0
    assert seen["server"].allowed_origins == origins


def test_an_allowed_origin():
    with serving("ready", "--allowed-origins", "https://a.test", "https://b.test") as server:
        headers = {"Origin": "https://b.test"}
        response = httpx.get(server.url + "/version", headers=headers, timeout=60)
        assert response.headers["access-control-allow-origin"] == "https://b.test"


def test_a_failure_to_load_is_the_last_line():
    with serving("broken") as server:
        assert server.wait() == 1
        assert server.lines[-1] == "octavo: error: the weights need 5 GiB, 1 GiB is free"


def test_drains_on_sigterm():
    with serving("held", "--log-format", "json") as server:
        body = {"prompt": "hi", "max_tokens": 8, "stream": True}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", server.url + "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.signal(signal.SIGTERM)
            server.wait_for("draining")
            refused = httpx.get(server.url + "/v1/models", timeout=60)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert httpx.get(server.url + "/ready", timeout=60).status_code == 503
            server.signal(signal.SIGUSR1)
            rest = [line for line in lines if line]
        assert len(rest) == 8
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 0


@pytest.mark.parametrize("loading", [True, False])
def test_who_waits_while_the_engine_is_replaced_is_answered_before_the_end(loading):
    """Before the first loading of the model, no request is."""

    async def test():
        ends = []
        state = ServerState(ServerConfig(shutdown_timeout=20), EngineConfig(), None)
        state.engine = SimpleNamespace(loading=loading, ready=False, asleep=False)
        state.num_active = 1
        state.cut = lambda: ends.append("cut")
        shutdown = serve._Shutdown(state, SimpleNamespace())
        shutdown.on_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)
        state.num_active = 0
        await shutdown._drain
        assert ends == (["cut"] if loading else [])

    asyncio.run(test())


def test_the_drain_has_an_end():
    with serving("slow", "--shutdown-timeout", "0.2") as server:
        body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", server.url + "/v1/completions", json=body) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            server.signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"error"' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.wait() == 0


def test_a_second_signal_stops_at_once():
    with serving("slow") as server:
        body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(timeout=60) as client,
            client.stream("POST", server.url + "/v1/completions", json=body) as response,
        ):
            next(response.iter_lines())
            server.signal(signal.SIGTERM)
            server.wait_for("draining")
            server.signal(signal.SIGTERM)
            assert server.wait() == 128 + signal.SIGTERM


def test_a_disconnect_over_a_real_socket_frees_the_engine():
    with serving("slow") as server:
        body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=body, timeout=0.3)
        server.wait_for("status=499")
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_an_interrupted_upload_and_a_large_one():
    with serving("ready", "--max-request-bytes", "2K") as server:
        port = httpx.URL(server.url).port
        with socket.create_connection(("127.0.0.1", port), timeout=60) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n"
            )
            raw.sendall((b"400\r\n" + b"x" * 1024 + b"\r\n") * 2)
            assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")
        assert httpx.get(server.url + "/health", timeout=60).status_code == 200


def test_keys_from_the_environment(monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "from-env")
    with serving("ready", "--api-key", "from-flag") as server:
        for key, status in (("from-env", 200), ("from-flag", 200), ("other", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            response = httpx.get(server.url + "/v1/models", headers=headers, timeout=60)
            assert response.status_code == status


@pytest.fixture
def certificate(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(
            [*command, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("the openssl command is not installed")
    return key, cert


def test_tls(certificate):
    key, cert = certificate
    with serving("ready", "--ssl-keyfile", str(key), "--ssl-certfile", str(cert)) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(server.url + "/health", verify=context, timeout=60).status_code == 200


def test_wrong_tls_settings(tmp_path):
    text = tmp_path / "x.pem"
    text.write_text("nothing")
    for settings in (
        {"ssl_keyfile": str(text)},
        {"ssl_keyfile": str(text), "ssl_certfile": str(tmp_path / "absent")},
        {"ssl_keyfile": str(text), "ssl_certfile": str(text)},
    ):
        with pytest.raises(ConfigError, match="ssl_"):
            listen.tls_context(ServerConfig(**settings))


def test_a_taken_port_is_told_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OctavoError, match=f"port {port}"):
            listen.bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="host="):
        listen.bind("no.such.host.invalid", 0)


def test_unknown_parsers():
    for setting in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"{setting}='x' is unknown; use one of .*, mistral"):
            run._check_parsers(ServerConfig(**{setting: "x"}))
    run._check_parsers(ServerConfig(tool_call_parser="hermes", reasoning_parser="none"))


def test_a_unix_socket(tmp_path):
    path = str(tmp_path / "octavo.sock")
    with socket.socket(socket.AF_UNIX) as left:  # by a server that was killed
        left.bind(path)
    server = Process("ready", "--uds", path)
    try:
        server.wait_for(f"ready: octavo/stories at the Unix socket {path}")
        transport = httpx.HTTPTransport(uds=path)
        # Names that only matter on the network: this is no loopback address.
        with httpx.Client(transport=transport, base_url="http://any.name", timeout=60) as client:
            answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == "Hel"
        with pytest.raises(OctavoError, match=f"Unix socket {path}: Address already in use"):
            listen.bind_unix(path)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not Path(path).exists()
    finally:
        server.process.kill()
        server.wait()
        server.process.stderr.close()


def test_what_is_no_unix_socket_is_left_alone(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(OctavoError, match=r"notes\.txt: Address already in use"):
        listen.bind_unix(str(file))
    assert file.read_text() == "mine"
    for path in (str(tmp_path / "no" / "folder"), str(tmp_path / ("x" * 200))):
        with pytest.raises(OctavoError, match="Choose another --uds"):
            listen.bind_unix(path)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--middleware", "no.such.module"), "middleware='no.such.module' cannot be imported"),
        (("--middleware", "subprocess.Popen"), "['subprocess.Popen'] cannot be used: TypeError"),
        (("--middleware", "os.path"), "middleware='os.path' is neither"),
        (("--default-chat-template-kwargs", '{"messages": 1}'), "has 'messages', which the server"),
    ],
)
def test_what_is_found_before_the_model_is_loaded(flags, said, monkeypatch, capsys):
    async def start(config, engine_config, processes):
        pytest.fail("the model is loaded")

    monkeypatch.setattr(serve, "start_engine", start)
    before = sys.getswitchinterval()
    try:
        assert cli.main(["serve", "--host", "127.0.0.1", "--port", "0", *flags]) != 0
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
    assert said in capsys.readouterr().err


def test_engine_processes_have_the_settings_of_the_server():
    config = ServerConfig(
        progress_timeout=7.0,
        max_engine_restarts=2,
        warm_spare=False,
        record="run.rec",
        record_prompts="hash",
        record_max_bytes=2**20,
        request_memory_bytes=2**21,
        log_level="debug",
        log_format="json",
    )
    assert run.engine_processes(config) == EngineProcesses(
        progress_timeout=7.0,
        max_engine_restarts=2,
        warm_spare=False,
        request_memory=2**21,
        log_level="debug",
        log_format="json",
        record=RecordSettings("run.rec", "hash", 2**20),
        reports_steps=True,
    )
    quiet = ServerConfig(ui=False, explain_requests=0)
    assert not run.engine_processes(quiet).reports_steps


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--chat-template", "/no/such.jinja"], 2, "--chat-template='/no/such.jinja'"),
        (["--model", "no/such/folder"], 1, "There is no folder no/such/folder"),
        (["--tokenizer", "no/such/folder"], 1, "There is no folder no/such/folder"),
        (["--model", "org/no-such-model"], 1, "org/no-such-model"),
        (["--max-model-len", "4k"], 2, "--max-model-len=4000 is more than the 2048"),
        (["--num-threads", "100000"], 2, "--num-threads=100000"),
        (["--numa-node", "100000"], 2, "--numa-node=100000"),
        (["--record", "f", "-dp", "2"], 2, "--record='f' is not supported with --data-"),
        (["--attention-backend", "triton", "-tp", "2"], 2, "--tensor-parallel-size=2 needs"),
        (["--attention-backend", "triton", "--enable-sleep-mode"], 2, "--enable-sleep-mode works"),
        (["-pp", "2", "--enable-prompt-embeds"], 2, "needs --no-enable-prompt-embeds"),
        (["--kv-offloading-size", "1", "--no-enable-prefix-caching"], 2, "--kv-transfer-config n"),
        (["--kv-cache-dtype", "float16"], 2, "--kv-cache-dtype=float16 is not"),
    ],
)
def test_what_is_missing_is_found_before_anything_starts(
    flags, status, said, monkeypatch, capfd, tmp_path
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(run, "setup_logging", lambda *_: None)
    monkeypatch.setattr(run, "bind", lambda *_: pytest.fail("it listens"))
    assert cli.main(["serve", "--port", "0", "--download-dir", str(tmp_path), *flags]) == status
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line


def test_a_start_says_first_what_it_loads_and_last_that_it_is_ready():
    with serving("ready") as server:
        server.wait_for("ready: ")
        texts = [line.partition(" INFO ")[2] for line in server.lines]
        assert texts[0] == f"loading octavo/stories, listening on {server.url}"
        assert texts[-2:] == [
            f"documentation: {server.url}/docs; chat: octavo chat --url {server.url}/v1",
            f"ready: octavo/stories at {server.url}/v1",
        ]
        for said in ("anyone who can reach", "the Host header is not checked"):
            assert not any(said in text for text in texts)


@pytest.mark.parametrize("flags", [[], ["--disable-log-stats"]])
def test_statistics_are_logged_unless_they_are_not_wanted(flags):
    flags = [*flags, "--log-stats-interval", "0.1", "--served-model-name", "fake", "other"]
    with serving("ready", *flags, "--log-format", "json") as server:
        body = {"prompt": "hi", "max_tokens": 3}
        server.wait_for("ready: fake at")
        httpx.post(server.url + "/v1/completions", json=body, timeout=60).raise_for_status()
        if len(flags) == 5:
            server.wait_for('"statistics"')
        time.sleep(0.3)
        found = [json.loads(line) for line in server.lines if '"statistics"' in line]
        assert bool(found) == (len(flags) == 5)
        counts = "prompt_tokens_per_s", "generation_tokens_per_s", "running", "waiting"
        idle = [not any(line[count] for count in counts) for line in found]
        assert (True, True) not in pairwise(idle)  # after one with tokens, and no more


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", ["--api-key", "k"], 0), ("0.0.0.0", [], 1), ("::", [], 1)],
)
def test_all_addresses_without_a_key_are_worth_one_warning(host, key, warned):
    if host == "::":
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("there is no IPv6 here")
    with serving("ready", "--host", host, *key) as server:
        port = server.url.rpartition(":")[2]
        server.wait_for(f"documentation: http://localhost:{port}/docs")
        assert len([line for line in server.lines if "anyone who can reach" in line]) == warned
        assert any("the Host header is not checked" in line for line in server.lines)
