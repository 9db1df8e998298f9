"""Module of jobs for tests of the helper process: it does what files of strangers may cause."""

import os
import signal
import socket
import time

import numpy as np

from octavo.errors import RequestError


def echo(arguments, files):
    return arguments, [np.frombuffer(file, np.uint8) for file in files]


def misbehave(how, _):
    if how == "forever":
        while True:
            pass
    if how == "memory":
        return None, [np.ones(2**40, np.uint8)]
    if how == "output":
        return None, [np.ones(3 * 2**20, np.uint8)]
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "message":
        os.write(2, b"[mp3 @ 0x5] a message of a native library\n")
    if how == "refuse":
        raise RequestError("The file is \ud800 bad.")
    if how == "fail":
        raise ZeroDivisionError("one \udfff two")
    if how == "file":
        os.open("/etc/passwd", os.O_RDONLY)
    if how == "socket":
        socket.socket()
    if how == "process":
        import subprocess

        subprocess.run(["true"], check=False)
    return None, []


def ones(count, _):
    return None, [np.ones(count, np.uint8)]


def niceness(seconds, _):
    """Compute for some seconds of processor time; return the niceness after it and before it."""
    # 0 stands for the thread that calls it.
    before, end = os.getpriority(os.PRIO_PROCESS, 0), time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return [os.getpriority(os.PRIO_PROCESS, 0), before], []


JOBS = {"echo": echo, "misbehave": misbehave, "niceness": niceness, "ones": ones}
