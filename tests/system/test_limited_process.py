"""Processes under limits: messages and ends. Tests of the users of these processes break limits."""

import socket

import pytest

from octavo.system.limited_process import LimitedProcess, ProcessEndedError, receive, send


def test_messages_travel_in_parts():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, b"ab", memoryview(b"cd"), bytearray())
        send(ours)
        assert receive(theirs) == b"abcd"
        assert receive(theirs) == b""
        send(ours, b"abcd")
        with pytest.raises(OSError, match="a message of 4 bytes"):
            receive(theirs, 3)
        ours.close()
        theirs.recv(4)
        assert receive(theirs) is None


def test_a_message_that_stops_in_the_middle():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall((10).to_bytes(8, "little") + b"only")
        theirs.settimeout(0.05)
        with pytest.raises(TimeoutError):
            receive(theirs)


def test_the_status_of_a_process_that_ends_is_reported():
    process = LimitedProcess("octavo.no_such_module")
    assert process.pid is None
    with pytest.raises(ProcessEndedError) as caught:
        process.exchange([b"x"], [], 60.0)
    assert caught.value.code == 1
    assert process.end() == 0
