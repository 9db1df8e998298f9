"""Helper processes of sounds and pictures: transport, and jobs that break limits."""

import gc
import os
import signal
import weakref

import numpy as np
import pytest

from octavo.errors import QueueFullError, RequestError, UnsupportedError
from octavo.media.process import Limits, MediaProcesses

LIMITS = Limits(seconds=0.5, nbytes=2**30, output_nbytes=2**21)


@pytest.fixture(scope="module")
def helper():
    made = MediaProcesses("tests.media.hostile_jobs", "audio", LIMITS, num_processes=1)
    yield made
    made.close()


def echo(helper, *files, arguments=None):
    return helper.submit("echo", files, arguments, param="file", make=same).result()


def same(result):
    return result


def test_values_and_arrays_travel(helper):
    arguments = {"a": [1, 2.5, None, "ü"], "b": b"\x00"}
    value, arrays = echo(
        helper, b"abc", b"", bytearray(b"d"), memoryview(b"ef"), arguments=arguments
    )
    assert value == arguments
    assert [bytes(array) for array in arrays] == [b"abc", b"", b"d", b"ef"]
    assert arrays[0].dtype == np.uint8


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("forever", r"file .*more than 0\.5 s of processor time"),
        ("memory", "more than 1024 MiB"),
        ("output", "3145728 bytes, more than the limit of 2097152"),
        ("crash", f"ended with status -{signal.SIGSEGV.value}"),
        ("refuse", "The file is . bad"),
        ("fail", "ZeroDivisionError: one . two"),
        ("file", "OSError: .*Too many open files"),
        ("socket", "OSError: .*Too many open files"),
        ("process", "OSError: .*Too many open files|ModuleNotFoundError"),
        (None, None),
    ],
)
def test_a_bad_job_fails_alone(helper, how, message):
    future = helper.submit("misbehave", [b""], how, param="file", make=same)
    other = helper.submit("echo", [b"other"], param="file", make=same)
    if message is None:
        assert future.result() == (None, [])
    else:
        with pytest.raises(RequestError, match=message) as caught:
            future.result()
        assert caught.value.param == "file"
    assert bytes(other.result()[1][0]) == b"other"


def test_a_process_that_the_system_kills_twice(helper):
    """The file is not blamed: a client may send it again."""
    with pytest.raises(QueueFullError, match="file was not read: the system ended"):
        helper.submit("misbehave", [b""], "killed", param="file", make=same).result()
    assert bytes(echo(helper, b"other")[1][0]) == b"other"


def test_helpers_that_are_killed_while_they_wait_are_replaced():
    helper = MediaProcesses("tests.media.hostile_jobs", "audio", LIMITS)
    try:
        for _ in range(2):
            jobs = [helper.submit("echo", [b"%d" % i], param="file", make=same) for i in range(4)]
            assert [bytes(job.result()[1][0]) for job in jobs] == [b"0", b"1", b"2", b"3"]
            for process in helper._all:
                if process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)
    finally:
        helper.close()


def test_canceled_jobs_keep_no_files(helper):
    class File(bytearray):
        pass

    slow = helper.submit("misbehave", [b""], "forever", param="file", make=same)
    file = File(b"large")
    reference = weakref.ref(file)
    waiting = helper.submit("echo", [file], param="file", make=same)
    del file
    assert waiting.cancel()
    gc.collect()
    assert reference() is None
    with pytest.raises(RequestError, match="processor time"):
        slow.result()


def test_close_does_not_wait_for_a_job():
    limits = Limits(seconds=600.0, nbytes=2**30, output_nbytes=2**21)
    helper = MediaProcesses("tests.media.hostile_jobs", "audio", limits, num_processes=1)
    echo(helper, b"x")
    job = helper.submit("misbehave", [b""], "forever", param="file", make=same)
    waiting = helper.submit("echo", [b""], param="file", make=same)
    while not job.running():
        pass
    helper.close()
    with pytest.raises(RequestError, match="file was not read: Octavo stops"):
        job.result()
    assert waiting.cancelled()


def test_an_answer_leaves_its_memory_to_the_next_job():
    limits = Limits(seconds=10.0, nbytes=5 * 2**27, output_nbytes=2**28)
    helper = MediaProcesses("tests.media.hostile_jobs", "audio", limits, num_processes=1)
    try:
        for _ in range(2):
            job = helper.submit("ones", [], 2**28, param="file", make=lambda got: got[1][0].size)
            assert job.result() == 2**28
    finally:
        helper.close()


def test_long_jobs_get_less_time_than_short_ones(helper):
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    for _ in range(2):
        job = helper.submit("niceness", [], 0.2, param="file", make=same)
        assert job.result()[0] == [min(usual + 5, 19), usual]


def test_libraries_write_nothing_to_the_log(capfd):
    helper = MediaProcesses("tests.media.hostile_jobs", "audio", LIMITS, num_processes=1)
    helper.submit("misbehave", [b""], "message", param="file", make=same).result()
    helper.close()
    assert capfd.readouterr().err == ""


def test_a_process_that_hangs_is_given_up(monkeypatch):
    helper = MediaProcesses("tests.media.hostile_jobs", "audio", LIMITS, num_processes=1)
    try:
        echo(helper, b"x")
        monkeypatch.setattr("octavo.media.process._PATIENCE", 0.1)
        monkeypatch.setattr("octavo.media.process._WAIT_FACTOR", 0.0)
        os.kill(helper._all[0].pid, signal.SIGSTOP)
        with pytest.raises(RequestError, match=r"file was given up: .* 0\.1 s"):
            echo(helper, b"x")
        assert helper._all[0].pid is None
    finally:
        helper.close()


def test_a_missing_library_is_named():
    helper = MediaProcesses("tests.media.needs_absent_package", "audio", LIMITS)
    try:
        for _ in range(2):
            with pytest.raises(UnsupportedError, match=r"absent_package.*octavo\[audio\]"):
                echo(helper, b"x")
    finally:
        helper.close()
