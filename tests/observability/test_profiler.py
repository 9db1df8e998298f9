"""Profiles: the format of the trace, the recorded spans of an engine, the recorder's states."""

import json
import logging
import os
import threading

import pytest

from octavo import LLM, SamplingParams, _native
from octavo.errors import ConfigError, ProfilerError
from octavo.observability import profiler
from octavo.observability.profiler import Profiler, TraceEvent, span, write_chrome_trace

CONFIG = {"max_model_len": 256, "kv_cache_memory_bytes": "8M", "max_num_seqs": 4}


@pytest.fixture
def recorder(tmp_path):
    recorder = Profiler(tmp_path)
    yield recorder
    if recorder.recording:
        recorder.stop()


def read(path):
    """Return the spans of a trace in the file's order, and its threads' names by tid."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [e for e in events if e["ph"] == "X"], names


def check_nesting(events):
    """Check that spans begin in order on each track, and are nested or disjoint."""
    tracks = {}
    for event in events:
        tracks.setdefault(event["tid"], []).append(event)
    for track in tracks.values():
        starts = [e["ts"] for e in track]
        assert starts == sorted(starts)
        open_ends = []
        for event in track:
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + 1e-4:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-4, event
            open_ends.append(end)


def test_the_trace_of_given_events(tmp_path):
    path = tmp_path / "a.trace.json"
    inner = TraceEvent("linear", 10.25, 10.5, "worker", {"bytes": 8.0, "flops": 4.0, "rows": 2})
    outer = TraceEvent("forward", 10.25, 11.0, "worker", {})
    other = TraceEvent("schedule", 10.0, 10.125, "main", {"step": 1})
    write_chrome_trace(path, [inner, outer, other])
    assert path.stat().st_mode & 0o777 == 0o600
    events, names = read(path)
    assert [e["name"] for e in events] == ["schedule", "forward", "linear"]
    assert [names[e["tid"]] for e in events] == ["main", "worker", "worker"]
    assert [(e["ts"], e["dur"]) for e in events] == [(0, 125e3), (250e3, 750e3), (250e3, 250e3)]
    assert {e["pid"] for e in events} == {os.getpid()}
    assert events[2]["args"] == {"bytes": 8, "flops": 4, "rows": 2}
    check_nesting(events)


def test_a_trace_of_nothing_is_a_trace(tmp_path):
    write_chrome_trace(tmp_path / "a", [])
    assert read(tmp_path / "a") == ([], {})


def test_a_trace_that_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(TypeError):
        write_chrome_trace(path, [TraceEvent("a", 0, 1, "t", {"x": object()})])
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a"]


def test_an_engine_is_recorded(tmp_path):
    with LLM(profiler_dir=str(tmp_path / "new" / "folder"), **CONFIG) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        llm.generate("Once", params, use_tqdm=False)
        llm.start_profile()
        answers = llm.generate(["Once upon a time", "The cat"], params, use_tqdm=False)
        path = llm.stop_profile()
        assert path == tmp_path / "new" / "folder" / path.name
        assert path.name.startswith(f"octavo-{os.getpid()}-")
        llm.generate("Once", params, use_tqdm=False)
        assert _native.take_spans() == []  # nothing is recorded any more
        llm.start_profile()
        assert llm.stop_profile() != path
    events, names = read(path)
    check_nesting(events)
    by_name = {}
    for event in events:
        by_name.setdefault(event["name"], []).append(event)
    for name in ("schedule", "wait", "update_from_output", "process_outputs"):
        assert {names[e["tid"]] for e in by_name[name]} == {"MainThread"}
    (worker,) = {e["tid"] for e in by_name["execute_model"]}
    assert names[worker].startswith("octavo-worker")
    kernels = [e for e in events if "bytes" in e["args"]]
    assert {"attention", "rms_norm"} <= {e["name"] for e in kernels}
    for event in kernels:
        assert event["tid"] == worker
        assert event["args"]["bytes"] > 0
        assert event["args"]["rows"] > 0
        assert event["args"]["flops"] > 0 or not event["name"].startswith("linear")
    # Every kernel is within a step's span, and every step is numbered, counted and complete.
    steps = [*by_name["execute_model"], *by_name["sample_tokens"]]
    for event in kernels:
        assert any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in steps)
    computed = [e["args"] for e in by_name["execute_model"] if e["args"]["tokens"]]
    prompt_tokens = sum(len(a.prompt_token_ids) for a in answers)
    assert computed[0]["tokens"] == prompt_tokens
    assert computed[0]["requests"] == 2
    assert [args["tokens"] for args in computed[1:5]] == [2] * 4
    numbers = [e["args"]["step"] for e in by_name["schedule"]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[0] > 1
    assert [e["args"]["step"] for e in by_name["execute_model"]] == numbers
    assert [e["args"] for e in by_name["execute_model"]] == [e["args"] for e in by_name["schedule"]]


def test_an_engine_that_ends_writes_its_profile(tmp_path):
    with LLM(profiler_dir=str(tmp_path), **CONFIG) as llm:
        llm.start_profile()
    (path,) = tmp_path.iterdir()
    read(path)


def test_without_a_folder_there_are_no_profiles():
    with LLM(**CONFIG) as llm:
        for call in (llm.start_profile, llm.stop_profile):
            with pytest.raises(ProfilerError, match="profiler_dir"):
                call()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"profiler_dir=.*file"):
        LLM(profiler_dir=str(tmp_path / "file" / "traces"), **CONFIG)


def test_starts_and_stops_alternate(recorder, tmp_path):
    with pytest.raises(ProfilerError, match="start one first"):
        recorder.stop()
    recorder.start()
    other = Profiler(tmp_path)
    for again in (recorder, other):
        with pytest.raises(ProfilerError, match="already"):
            again.start()
    with pytest.raises(ProfilerError, match="start one first"):
        other.stop()
    first = recorder.stop()
    with pytest.raises(ProfilerError, match="start one first"):
        recorder.stop()
    other.start()
    assert other.stop() != first


def test_spans_nest_and_threads_have_their_tracks(recorder):
    recorder.start()

    def work():
        for i in range(3):
            with span("outer") as note, span("inner"):
                note(step=i)

    threads = [threading.Thread(target=work, name=f"thread {i}") for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events, names = read(recorder.stop())
    check_nesting(events)
    assert sorted(names.values()) == ["thread 0", "thread 1", "thread 2"]
    for tid in names:
        mine = [e for e in events if e["tid"] == tid]
        assert [e["name"] for e in mine] == ["outer", "inner"] * 3
        assert [e["args"] for e in mine[::2]] == [{"step": i} for i in range(3)]


def test_a_span_that_fails_is_recorded(recorder):
    recorder.start()
    with pytest.raises(ZeroDivisionError), span("outer"):
        _ = 1 / 0
    assert [e["name"] for e in read(recorder.stop())[0]] == ["outer"]


def test_a_span_that_outlives_its_profile_is_dropped(recorder):
    recorder.start()
    with span("outer"):
        first = recorder.stop()
        recorder.start()
        recorder.stop()
    assert read(first)[0] == []


def test_spans_are_off_by_default():
    with span("outer") as note:
        note(step=1)
    assert span("a") is span("b")


def test_a_long_profile_keeps_its_beginning(tmp_path, caplog):
    recorder = Profiler(tmp_path, max_events=10)
    recorder.start()
    for i in range(25):
        with span(str(i)):
            pass
    with caplog.at_level(logging.WARNING):
        path = recorder.stop()
    assert [e["name"] for e in read(path)[0]] == [str(i) for i in range(10)]
    assert "15 later ones were dropped" in caplog.text


def test_a_profile_that_cannot_be_written(recorder, monkeypatch):
    def fail(path, events):
        raise OSError(28, "No space left on device")

    recorder.start()
    monkeypatch.setattr(profiler, "write_chrome_trace", fail)
    with pytest.raises(ProfilerError, match="No space left"):
        recorder.stop()
    assert not recorder.recording
