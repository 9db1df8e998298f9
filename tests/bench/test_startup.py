"""`octavo bench startup`: real processes on the built-in model, and fake ones."""

import argparse
import json
import os
import subprocess
import sys

import pytest

from octavo.bench import startup
from octavo.bench.start_child import resident_nbytes
from octavo.errors import BenchError, ConfigError, OctavoError

SMALL = ["--max-model-len", "64", "--kv-cache-memory-bytes", "16M", "--max-num-seqs", "8"]


def parse(*flags):
    parser = argparse.ArgumentParser()
    startup.add_arguments(parser)
    return parser.parse_args([*SMALL, *map(str, flags)])


def test_real_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")  # the measured server needs none
    path = tmp_path / "result.json"
    flags = ["--repeats", 1, "--server", "--output-json", path, "--no-enable-prefix-caching"]
    result = startup.run(parse(*flags))
    offline, server = result["starts"]
    assert (offline["kind"], server["kind"]) == ("offline", "server")
    assert 0 < offline["import"] < offline["ready"] < offline["first_token"]
    names = ("server_health", "server_ready", "server_first_token")
    assert 0 < server["server_health"] <= server["server_ready"] < server["server_first_token"]
    for start in (offline, server):
        assert start["cache"] == "warm"
        assert start["rss"] > 50 * 2**20
    assert offline["plan"] - offline["plan_but_kv_cache"] == pytest.approx(2**24, rel=0.01)
    assert offline["rss"] < offline["plan"]
    saved = json.loads(path.read_text())
    assert [saved["starts"][1][name] for name in names] == [server[name] for name in names]
    out = capsys.readouterr().out
    for word in ("first token", "server: /health answers", "offline: planned", "server: resident"):
        assert word in out


@pytest.fixture
def fakes(monkeypatch):
    """Return starts that take no time; Ctrl-C interrupts number `stop`."""
    seen = argparse.Namespace(events=[], stop=None)

    def measure(kind):
        def start(kwargs, timeout):
            if sum(event in ("offline", "server") for event in seen.events) == seen.stop:
                raise KeyboardInterrupt
            seen.events.append(kind)
            return {"ready": 1.0}

        return start

    monkeypatch.setattr(startup, "measure_offline", measure("offline"))
    monkeypatch.setattr(startup, "measure_server", measure("server"))
    monkeypatch.setattr(startup, "read_files", lambda files: seen.events.append("read"))
    monkeypatch.setattr(startup, "forget_files", lambda files: seen.events.append("forget"))
    return seen


def test_order(fakes, tmp_path, capsys):
    startup.run(parse("--repeats", 2, "--server", "--cold", "--plot", tmp_path / "a.png"))
    assert (tmp_path / "a.png").exists()
    once = ["read", "offline", "forget", "offline", "read", "server", "forget", "server"]
    assert fakes.events == once * 2
    assert "cold file cache" in capsys.readouterr().out


def test_packed_weights_are_dropped_from_the_file_cache_too(fakes, tmp_path, monkeypatch):
    seen = {}
    for name in ("read_files", "forget_files"):
        monkeypatch.setattr(startup, name, lambda files, name=name: seen.update({name: files}))
    (tmp_path / "some.weights").touch()
    startup.run(parse("--repeats", 1, "--cold", "--weight-cache", tmp_path))
    assert tmp_path / "some.weights" in seen["read_files"]
    assert seen["read_files"] == seen["forget_files"]
    startup.run(parse("--repeats", 1, "--weight-cache", "off"))
    assert tmp_path / "some.weights" not in seen["read_files"]


def test_ctrl_c_keeps_what_there_is(fakes, tmp_path, capsys):
    fakes.stop = 3
    path = tmp_path / "result.json"
    assert startup.run(parse("--output-json", path))["interrupted"]
    assert len(json.loads(path.read_text())["starts"]) == 3
    assert "Interrupted: the figures cover 3 starts" in capsys.readouterr().out


def test_ctrl_c_before_the_first_start_leaves_nothing(fakes, tmp_path):
    fakes.stop = 0
    with pytest.raises(KeyboardInterrupt):
        startup.run(parse("--output-json", tmp_path / "result.json"))
    assert not list(tmp_path.iterdir())


def test_whole_files_are_forgotten(tmp_path, monkeypatch):
    path, calls = tmp_path / "weights", []
    path.write_bytes(b"12")
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: calls.append(args[1:]))
    startup.forget_files([path, path])
    assert calls == [(0, 0, os.POSIX_FADV_DONTNEED)] * 2  # a length of 0 is all of it


def test_memory_of_this_process_and_of_none():
    sizes = resident_nbytes("self")
    assert sizes["rss"] > 2**20
    assert sizes.get("pss", 0) <= sizes["rss"]
    assert resident_nbytes(2**30) == {}


def test_the_child_is_a_fresh_process_with_nothing_of_the_benchmark_in_it():
    code = "import sys, octavo.bench.start_child; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "rich", "httpx", "numpy", "tqdm"}


@pytest.mark.parametrize("measure", [startup.measure_offline, startup.measure_server])
def test_a_start_that_fails_is_told_with_its_reason(measure):
    with pytest.raises(BenchError, match=r"num.threads=10000 is more than"):
        measure({"num_threads": 10_000}, 60)


def test_a_start_that_takes_too_long():
    for measure in (startup.measure_offline, startup.measure_server):
        with pytest.raises(BenchError, match=r"more than 0\.01 s \(--timeout\)"):
            measure({}, 0.01)


@pytest.mark.parametrize(
    ("flags", "kind", "said"),
    [
        (["--repeats", 0], ConfigError, "--repeats 0"),
        (["--timeout", 0], ConfigError, "--timeout 0"),
        (["--model", "/nowhere"], OctavoError, "no folder /nowhere"),
        (["--max-num-batched-tokens", 0], ConfigError, "max_num_batched_tokens=0"),
        (["--output-json", "/"], BenchError, "cannot be written"),
    ],
)
def test_wrong_flags(fakes, flags, kind, said):
    with pytest.raises(kind, match=said):
        startup.run(parse(*flags))
    assert not fakes.events
