"""Result files, written whole or not at all."""

import io
import json
import math
import os
import sys

import pytest
from rich.console import Console

import octavo
from octavo.bench import results
from octavo.errors import BenchError


def test_save_and_read(tmp_path):
    path = tmp_path / "new" / "result.json"
    results.save_json(path, {"mean": 1.5, "none": math.nan, "list": [1, "ü"]})
    assert json.loads(path.read_text()) == {"mean": 1.5, "none": None, "list": [1, "ü"]}
    assert os.listdir(path.parent) == ["result.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_result(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    results.save_json(path, {"run": 1})

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        results.save_json(path, {"run": 2})
    assert json.loads(path.read_text()) == {"run": 1}
    assert os.listdir(tmp_path) == ["result.json"]


def test_unwritable_places(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match=r"file/result.json: "):
        results.save_json(tmp_path / "file" / "result.json", {})


def test_unwritable_places_are_found_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("old")
    for path in (tmp_path / "file" / "result.json", tmp_path):
        with pytest.raises(BenchError, match="cannot be written"):
            results.check_writable(path)
    results.check_writable(None)
    results.check_writable(tmp_path / "new" / "result.json")
    results.check_writable(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"
    assert not (tmp_path / "new").exists()


def test_metadata():
    data = results.metadata({"rate": math.inf, "names": ["a"], "command": print, "none": None})
    assert data["arguments"] == {"rate": "inf", "names": ["a"], "none": None}
    assert data["octavo_version"] == octavo.__version__
    assert data["num_cpus"] >= 1
    assert data["cpu"]
    assert data["python_version"] == ".".join(map(str, sys.version_info[:3]))
    assert data["date"].endswith("+00:00")
    json.dumps(data, allow_nan=False)


def test_torch_version_is_there_only_if_torch_is_in_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert results.metadata({})["torch_version"] is None
    monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"__version__": "2.99"}))
    assert results.metadata({})["torch_version"] == "2.99"


def test_progress_is_silent_without_a_terminal(capsys):
    assert list(results.progress([1, 2], desc="Runs")) == [1, 2]
    with results.progress(total=2) as bar:
        bar.update()
    assert capsys.readouterr().err == ""


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(results, "_LINE_INTERVAL", 0.0)
    with results.progress(total=2, desc="Runs") as bar:
        bar.update()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Runs: 0 of 2, 00:00 so far")
    assert lines[1].startswith("Runs: 1 of 2, ")
    assert len(lines) == 2
    list(results.progress([1], disable=True))
    assert not capsys.readouterr().err


def test_progress_on_a_terminal(monkeypatch):
    err = io.StringIO()
    err.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", err)
    list(results.progress([1, 2], desc="Runs"))
    assert "Runs: 100%" in err.getvalue()
    shown = err.getvalue()
    list(results.progress([1, 2], disable=True))
    assert err.getvalue() == shown


def test_print_table():
    out = io.StringIO()
    rows = [("toy", 1.23456, 3), ("[b]", 1000.5, 4)]
    results.print_table("Runs", ("model", "ms", "n"), rows, Console(file=out, width=60))
    text = out.getvalue()
    assert "Runs" in text
    assert "1.235" in text
    assert "[b]" in text


def test_a_table_in_a_pipe_is_whole(capsys):
    columns = [f"a_column_with_a_long_name_{i}" for i in range(10)]
    results.print_table("Runs", columns, [range(10)])
    out = capsys.readouterr().out
    assert [column for column in columns if column not in out] == []


def test_counted():
    assert [results.counted(n, "run") for n in (0, 1, 2)] == ["0 runs", "1 run", "2 runs"]
