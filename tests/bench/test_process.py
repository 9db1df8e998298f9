"""Servers as processes: awaited, and always stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest

from octavo.bench.process import free_port, running_server
from octavo.errors import BenchError
from tests.bench.fake_openai import fake_server, good


def command(port, *flags):
    return [sys.executable, "-m", "tests.bench.fake_openai", "--port", str(port), *flags]


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "server.log"


def start(log, *flags, **settings):
    port = free_port()
    settings = {"timeout": 100.0, **settings}
    return running_server(command(port, *flags), f"http://127.0.0.1:{port}", log, **settings)


def alive(pid):
    """Return whether a process runs; an unreaped one does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid):
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_a_server_and_its_descendants_are_stopped(log):
    before = signal.getsignal(signal.SIGTERM)
    with start(log, "--child") as server:
        server.check()
        assert server.seconds > 0
        child = int(log.read_text().split()[1])
        assert alive(child)
    assert gone(child)
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(BenchError, match="The server ended with status"):
        server.check()


def test_a_server_that_ignores_sigterm(log):
    with start(log, "--stubborn", grace=0.1) as server:
        pass
    with pytest.raises(BenchError, match="status -9"):
        server.check()


def test_stopped_when_the_body_fails(log):
    with pytest.raises(RuntimeError, match="oops"), start(log) as server:
        raise RuntimeError("oops")
    with pytest.raises(BenchError, match="status -15"):
        server.check()


def test_a_server_that_fails_to_start(log):
    reason = "\n".join(f"line {i}" for i in range(20))
    with (
        pytest.raises(BenchError, match=r"ended with status 1. Its log \(") as caught,
        start(log, "--fail", reason),
    ):
        pass
    assert str(caught.value).endswith("line 18\nline 19")
    assert "line 9\n" not in str(caught.value)


def test_a_server_that_never_listens(log):
    with (
        pytest.raises(BenchError, match=r"/health within 0.2 s \(--ready-timeout\)") as caught,
        start(log, "--hang", timeout=0.2),
    ):
        pass
    assert "(nothing)" in str(caught.value)


def test_no_such_program(log):
    with (
        pytest.raises(BenchError, match=r"cannot be started: .*no-such-program"),
        running_server(["no-such-program"], "http://127.0.0.1:1", log, timeout=1),
    ):
        pass


def test_a_log_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="cannot be started"), start(tmp_path / "file" / "log"):
        pass


def test_the_address_is_taken(log):
    with (
        fake_server(good()) as other,
        pytest.raises(BenchError, match="Another server answers"),
        running_server(["true"], other.url, log, timeout=1),
    ):
        pass


@pytest.mark.parametrize(
    ("number", "setup"),
    [
        (signal.SIGINT, ""),
        (signal.SIGTERM, ""),
        (signal.SIGHUP, ""),
        (signal.SIGTERM, "signal.signal(signal.SIGINT, signal.SIG_IGN)"),
    ],
)
def test_the_server_ends_with_the_benchmark(number, setup, log):
    port = free_port()
    code = (
        f"import pathlib, signal, time\nfrom octavo.bench.process import running_server\n{setup}\n"
        f"with running_server({command(port, '--child')!r}, 'http://127.0.0.1:{port}',"
        f" pathlib.Path({str(log)!r}), timeout=100):\n"
        "    print('runs', flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "runs\n"
    child = int(log.read_text().split()[1])
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=100)
    assert "KeyboardInterrupt" in err
    assert gone(child)


def test_nohup_is_respected(log):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with start(log):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
