"""Recording: frames, the surviving part of a file, its bounds, and hidden data."""

import contextlib
import errno
import hashlib
import os
import threading
import time
import zlib
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from octavo.errors import ConfigError, OctavoError
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    PromptEmbeds,
    RequestOptions,
)
from octavo.observability import recording
from octavo.observability.recording import (
    FORMAT,
    Arrival,
    Died,
    End,
    Head,
    Lost,
    Outputs,
    Recorder,
    Step,
    StepEnd,
    StepRequest,
    older_file,
    read_records,
)
from octavo.sampling_params import SamplingParams
from tests.params import core_request, set_options

HEAD = Head(FORMAT, "an id", 1.0, {"octavo": "1"}, {"model": {}}, "hash of a model", "full")


def end(i: int) -> End:
    return End(float(i), str(i), FinishReason.STOP, "a text" if i % 2 else i, i)


def wait_for(path, found) -> None:
    """Wait until the recorder's thread has written."""
    for _ in range(6000):
        with contextlib.suppress(OctavoError):  # it may be missing while it is replaced
            if found(list(read_records(path))):
                return
        time.sleep(0.01)
    raise AssertionError(f"{path} does not have it")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.rec"


def test_what_is_put_is_read(path):
    step = Step(1, 2.0, ["a"], ["b"], [StepRequest("a", 5, 0, 3)], ["c"], [(1, 2)])
    recorder = Recorder(path, HEAD)
    for record in (end(1), step, end(2)):
        recorder.put(record)
    recorder.close()
    recorder.close()
    assert list(read_records(path)) == [HEAD, end(1), step, end(2)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_processes_write_to_one_file(path):
    front = Recorder(path, HEAD)
    core = Recorder(path)
    for i in range(100):
        (front, core)[i % 2].put(end(i))
    core.close()
    front.close()
    records = list(read_records(path))
    assert records[0] == HEAD
    assert sorted(r.time for r in records[1:]) == list(range(100))
    assert [r.time for r in records[1:] if r.time % 2] == list(range(1, 100, 2))


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_frame_that_was_cut_off_is_read_over(path, cut):
    """At the end, or before data that another process wrote after it."""
    first = Recorder(path, HEAD)
    first.put(end(1))
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert list(read_records(path)) == [HEAD, None]
    second = Recorder(path)
    second.put(end(2))
    second.close()
    assert list(read_records(path)) == [HEAD, None, end(2)]


def test_a_byte_that_changed_costs_its_frame(path):
    for number in (1, 2):
        recorder = Recorder(path, HEAD) if number == 1 else Recorder(path)
        recorder.put(end(number))
        recorder.close()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert list(read_records(path)) == [HEAD, end(1), None]


def test_a_length_from_elsewhere_is_no_harm(path):
    recorder = Recorder(path, HEAD)
    recorder.close()
    with path.open("ab") as file:
        file.write(b"\xabOCT" + b"\xff" * 20)
    assert list(read_records(path)) == [HEAD, None]


def test_a_record_of_a_kind_that_is_not_known(path):
    recorder = Recorder(path, HEAD)
    recorder.close()
    with path.open("ab") as file:
        known = msgspec.msgpack.encode(end(1))
        file.write(recording._frame([b"\x91\xa3new", known]))
    assert list(read_records(path)) == [HEAD, None, end(1)]


@pytest.mark.parametrize(
    "records",
    [
        b"\xdd\xff\xff\xff\xff",  # a list of four billion
        b"\x91" * 100_000,  # lists in lists
        b"\x91\x97\xa4head\x01\xa1i\xcb" + bytes(8) + b"\x80\x81\xa1a" + b"\x91" * 100_000,
        b"\x91\x95\xa3end\xc0\xc0\xc0\xc0",
        b"\x91\x92\xa4l\xffst\x01",  # no text
    ],
)
def test_frames_that_lie(path, records):
    Recorder(path, HEAD).close()
    when = recording._TIME.pack(1.0)
    checksum = zlib.crc32(records, zlib.crc32(when))
    with path.open("ab") as file:
        file.write(recording._HEADER.pack(b"\xabOCT", len(records), checksum, 1.0) + records)
        file.write(recording._frame([msgspec.msgpack.encode(end(1))]))
    assert list(read_records(path)) == [HEAD, None, end(1)]


def test_damaged_arrivals_of_format_1_are_unreadable(path):
    request = ["a", [7], [0.5] * 8 + [4] * 13, 1.0, "salt", None, 1, 0, [], 0, None, None, "key"]
    Recorder(path, HEAD).close()
    damaged = [[], {}, 5, [*request, {}, {}], request[:12], ["a", [7], {}, *request[3:]]]
    records = [["arrival", fields, {}] for fields in damaged] + [["arrival"]]
    with path.open("ab") as file:
        file.write(recording._frame([msgspec.msgpack.encode(record) for record in records]))
    assert list(read_records(path)) == [HEAD] + [None] * len(records)


def test_fields_are_only_ever_added_at_the_end():
    """Records are lists: a field elsewhere is another format, and `FORMAT` must change."""
    assert FORMAT == 2
    begin = {
        EngineCoreRequest: "request_id prompt_token_ids sampling_params options n "
        "output_token_ids num_prompt_logprobs prompt_embeds answers",
        RequestOptions: "arrival_time tenant priority deadline first_token_deadline turn "
        "cache_salt kv_transfer_params flow",
        CoreSamplingParams: "temperature top_p top_k min_p presence_penalty frequency_penalty "
        "repetition_penalty seed max_tokens min_tokens logprobs logprob_token_ids prompt_logprobs "
        "stop_token_ids all_stop_token_ids allowed_token_ids logit_bias bad_words grammar "
        "extra_args",
        EngineCoreOutput: "request_id new_token_ids new_logprobs new_prompt_logprobs finish_reason "
        "stop_reason error error_kind num_cached_tokens first_scheduled_time num_preemptions",
        LogprobsLists: "token_ids logprobs ranks",
        PromptEmbeds: "data dtype size",
        Head: "format id created build config model prompts num_blocks max_model_len",
        Arrival: "request params prompt_hash",
        Outputs: "time outputs",
        End: "time request_id reason stop_reason num_tokens",
        StepRequest: "req_id num_tokens num_drafts num_computed_tokens",
        StepEnd: "number seconds host_seconds",
        Step: "number time added aborted requests freed blocks_to_copy ended",
        Died: "time reason",
        Lost: "count",
    }
    for kind, names in begin.items():
        assert " ".join(kind.__struct_fields__).startswith(names), kind


def times_in(path):
    """Return the times of the records in both files."""
    found = set()
    for file in (path, older_file(path)):
        with contextlib.suppress(OctavoError):  # it may be missing while it is replaced
            found |= {record.time for record in read_records(file) if isinstance(record, End)}
    return found


def test_the_newest_bytes_are_kept(path):
    most = 20_000
    front = Recorder(path, HEAD, most)
    core = Recorder(path)
    number = 0
    while not (older_file(path).exists() and number > 2000):
        front.put(end(number))
        core.put(end(number + 1))
        number += 2
        while number % 100 == 0 and not {number - 2, number - 1} <= times_in(path):
            time.sleep(0.01)  # all is written, so that neither is ahead of the other
    core.close()
    front.close()
    files = [older_file(path), path]
    assert sum(f.stat().st_size for f in files) < most + 4000  # a core's last frames
    records = [list(read_records(f)) for f in files]
    assert [r[0] for r in records] == [HEAD, HEAD]
    times = [r.time for part in records for r in part[1:]]
    assert times
    assert max(times) == number - 1


def test_what_a_run_before_has_left_is_kept_as_the_older_file(path):
    for number in (1, 2):
        recorder = Recorder(path, HEAD)
        recorder.put(end(number))
        recorder.close()
    assert list(read_records(older_file(path))) == [HEAD, end(1)]
    assert list(read_records(path)) == [HEAD, end(2)]


@pytest.mark.parametrize("suffix", [".1", ".new", ".crash-1", ".crash-10"])
def test_nothing_beside_it_is_overwritten(path, suffix):
    other = path.with_name(path.name + suffix)
    other.write_text("Dear diary")
    with pytest.raises(ConfigError, match="exists and is not a recording"):
        Recorder(path, HEAD)
    assert not path.exists()
    assert other.read_text() == "Dear diary"


@pytest.mark.parametrize("what", ["rename", "open"])
def test_a_file_that_cannot_be_changed_closes_nothing_of_others(path, monkeypatch, what):
    """The number of a closed file may soon be that of another socket."""
    recorder = Recorder(path, HEAD, 4000) if what == "rename" else None
    core = None
    if recorder is None:
        Recorder(path, HEAD).close()
        core = Recorder(path)
        Recorder(path, HEAD).close()  # another file exists by now

    def refuse(*args):
        raise FileNotFoundError(errno.ENOENT, "No such file") if core else OSError("refused")

    closed = []
    close = os.close
    monkeypatch.setattr(recording.os, "close", lambda fd: (closed.append(fd), close(fd)))
    monkeypatch.setattr(recording.os, "replace" if recorder else "open", refuse)
    found = recorder or core
    descriptor = found._descriptor
    for i in range(200):
        found.put(end(i))
    found.close()
    assert closed.count(descriptor) == 1
    if core:
        assert end(199) in list(read_records(older_file(path)))


def test_a_pipe_is_no_recording(path):
    os.mkfifo(path)
    with pytest.raises(OctavoError, match="is not a recording"):
        list(read_records(path))


def test_the_head_is_written_again_when_more_is_known(path):
    recorder = Recorder(path, HEAD, 8000)
    known = msgspec.structs.replace(HEAD, num_blocks=7, max_model_len=9)
    recorder.put(known)
    for i in range(1000):
        recorder.put(end(i))
    recorder.close()
    assert next(read_records(path)) == known


@pytest.mark.parametrize("what", ["text", "folder", "no folder", "pipe"])
def test_what_is_no_recording_is_left_alone(path, what):
    if what == "text":
        path.write_text("Dear diary")
    elif what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path = path / "run.rec"
    with pytest.raises(ConfigError, match="record="):
        Recorder(path, HEAD)
    if what == "text":
        assert path.read_text() == "Dear diary"
        with pytest.raises(OctavoError, match="is not a recording"):
            list(read_records(path))


def test_two_servers_do_not_share_a_file(path):
    recorder = Recorder(path, HEAD)
    with pytest.raises(ConfigError, match="another server"):
        Recorder(path, HEAD)
    recorder.put(end(1))
    recorder.close()
    assert list(read_records(path)) == [HEAD, end(1)]
    Recorder(path, HEAD).close()


def test_an_empty_file_is_taken(path):
    path.touch()
    Recorder(path, HEAD).close()
    assert list(read_records(path)) == [HEAD]
    with pytest.raises(OctavoError, match="cannot be read"):
        list(read_records(path.with_name("none")))


def test_the_last_seconds_before_a_death_are_kept(path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(recording.time, "time", lambda: now[0])
    recorder = Recorder(path, HEAD)
    recorder.put(end(1))
    wait_for(path, lambda r: len(r) == 2)
    now[0] = 1020.0
    core = Recorder(path)
    core.put(end(2))
    core.close()
    recorder.put(Died(1021.0, "killed"))
    recorder.close()
    tail = path.with_name("run.rec.crash-1")
    assert list(read_records(tail)) == [HEAD, end(2), Died(1021.0, "killed")]
    assert tail.stat().st_mode & 0o777 == 0o600


def test_the_tails_of_many_deaths_are_bounded(path):
    recorder = Recorder(path, HEAD)
    for i in range(12):
        recorder.put(Died(time.time(), str(i)))
    recorder.close()
    names = {f.name for f in path.parent.glob("*.crash-*")}
    assert names == {f"run.rec.crash-{i}" for i in range(1, 11)}


REQUEST = core_request(
    "a",
    [7, 8, 9] * 50,
    CoreSamplingParams(seed=3),
    cache_salt="a secret salt",
    tenant="a secret key",
    prompt_embeds=PromptEmbeds(b"1234" * 10, "float32", 2),
)
PARAMS = SamplingParams(stop=["end"], cache_salt="a secret salt", extra_args={"a": [1]})


@pytest.mark.parametrize("prompts", ["full", "hash"])
def test_what_is_secret_is_not_written(path, prompts):
    head = Head(FORMAT, "an id", 1.0, {}, {}, "", prompts)
    recorder = Recorder(path, head)
    for tenant in ("a secret key", "a secret key", "another", None):
        request = msgspec.structs.replace(REQUEST)
        set_options(request, tenant=tenant)
        recorder.put(Arrival(request, PARAMS))
    recorder.close()
    _, read, *others = read_records(path)
    data = path.read_bytes()
    assert b"a secret" not in data
    for secret in (b"a secret salt", b"a secret key"):  # nor data that can be guessed one by one
        assert hashlib.sha256(secret).hexdigest().encode() not in data
    assert read.request.options.cache_salt == read.params.cache_salt
    tenants = [arrival.request.options.tenant for arrival in (read, *others)]
    assert tenants[0] == tenants[1] != tenants[2]
    assert tenants[3] is None
    assert (read.params.stop, read.params.extra_args) == (["end"], {"a": [1]})
    assert read.request.sampling_params.seed == 3
    if prompts == "full":
        assert read.prompt_hash is None
        assert read.request.prompt_token_ids == REQUEST.prompt_token_ids
        assert read.request.prompt_embeds == REQUEST.prompt_embeds
    else:
        assert len(read.prompt_hash) == 64
        assert read.request.prompt_token_ids == []
        assert read.request.prompt_embeds is None
    assert REQUEST.options.cache_salt == "a secret salt"  # the engine's request is unchanged


def test_prompts_that_are_hashed_are_not_told_by_their_logprobs(path):
    rows = LogprobsLists(np.arange(70, 79, dtype="i4").tobytes(), b"1234" * 9, b"1234" * 9)
    output = EngineCoreOutput("a", [5], new_prompt_logprobs=rows)
    for prompts, kept in (("hash", None), ("full", rows)):
        recorder = Recorder(path, msgspec.structs.replace(HEAD, prompts=prompts))
        recorder.put(Outputs(1.0, [output]))
        recorder.close()
        _, read = read_records(path)
        assert (read.outputs[0].new_token_ids, read.outputs[0].new_prompt_logprobs) == ([5], kept)
    assert output.new_prompt_logprobs is rows  # the client's output is unchanged


def test_what_cannot_be_written_is_counted(path, monkeypatch):
    recorder = Recorder(path, HEAD, 40_000)
    recorder.put(End(1.0, "\ud800", FinishReason.STOP, None, 0))
    recorder.put(End(1.0, "x" * 20_000, FinishReason.STOP, None, 0))
    recorder.put(end(1))
    recorder.close()
    assert list(read_records(path)) == [HEAD, Lost(1), Lost(1), end(1)]


def test_a_slow_disk_costs_records_and_no_memory(path, monkeypatch):
    """The gap is recorded, so that no reader joins the records before and after."""
    monkeypatch.setattr(recording, "_MOST_PENDING", 10)
    go_on = threading.Event()
    clock = SimpleNamespace(time=time.time, sleep=lambda seconds: go_on.wait(60))
    monkeypatch.setattr(recording, "time", clock)
    recorder = Recorder(path, HEAD)
    for i in range(100):
        recorder.put(end(i))
    go_on.set()
    wait_for(path, lambda r: len(r) > 10)
    recorder.put(end(100))
    recorder.put(end(101))
    recorder.close()
    *_, before, lost, after, last = read_records(path)
    assert isinstance(lost, Lost)
    assert 80 <= lost.count <= 90
    assert [after, last] == [end(100), end(101)]
    assert before.time + lost.count + 1 == after.time


def test_a_full_disk_ends_the_recording_only(path, monkeypatch, caplog):
    recorder = Recorder(path, HEAD)

    def refuse(descriptor, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(recording.os, "write", refuse)
    recorder.put(end(1))
    recorder._thread.join(60)
    assert not recorder._thread.is_alive()
    assert "No space left on device" in caplog.text
    recorder.put(end(2))
    assert recorder._queue.empty()
    recorder.close()
