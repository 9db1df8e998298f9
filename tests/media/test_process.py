"""Helper processes of sounds and pictures: transport, and jobs that break limits."""

import os
import signal

import numpy as np
import pytest

from octavo.errors import RequestError, UnsupportedError
from octavo.media.process import Limits, MediaProcesses

LIMITS = Limits(seconds=0.5, nbytes=2**30, output_nbytes=2**21)


@pytest.fixture(scope="module")
def helper():
    made = MediaProcesses("tests.media.hostile_jobs", "audio", LIMITS, num_processes=1)
    yield made
    made.close()


def echo(helper, *files, arguments=None):
    return helper.submit("echo", files, arguments, param="file").result()


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
        ("killed", f"ended with status -{signal.SIGKILL.value}"),
        ("refuse", "The file is . bad"),
        ("fail", "ZeroDivisionError: one . two"),
        ("file", "OSError: .*Too many open files"),
        ("socket", "OSError: .*Too many open files"),
        ("process", "OSError: .*Too many open files|ModuleNotFoundError"),
        (None, None),
    ],
)
def test_a_bad_job_fails_alone(helper, how, message):
    future = helper.submit("misbehave", [b""], how, param="file")
    other = helper.submit("echo", [b"other"], param="file")
    if message is None:
        assert future.result() == (None, [])
    else:
        with pytest.raises(RequestError, match=message) as caught:
            future.result()
        assert caught.value.param == "file"
    assert bytes(other.result()[1][0]) == b"other"


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
