"""Keys on a command line, which are hidden in the list of processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from octavo.system.hidden_keys import _find_keys


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        ("serve --api-key k1 k2 --port 80", ["k1", "k2"]),
        ("serve --api_key=k1 --admin-key k2", ["k1", "k2"]),
        ("router --server-api-key k1 --servers k2", ["k1"]),
        ("chat --api-key k1 -q hi", ["k1"]),
        ("scale 3 --admin-key=k1", ["k1"]),
        ("serve --api-key", []),
        ("serve --api-key-file k1 model", []),
        ("serve --cluster-key-file k1", []),
    ],
)
def test_which_words_are_keys(words, hidden):
    arguments = b"".join(word.encode() + b"\0" for word in words.split())
    found = [arguments[place : place + size] for place, size in _find_keys(arguments)]
    assert [word.decode() for word in found if word] == hidden


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="there is no /proc")
def test_the_process_shows_no_key_and_knows_it():
    code = """
import octavo.cli, sys
def show():
    print(open("/proc/self/cmdline").read().split("\\0")[3:])
    print(sys.argv[1:])
octavo.cli.main = show
from octavo.__main__ import main
main()
"""
    words = ["serve", "--api-key", "sk-sec", "--port", "80"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    shown, known = done.stdout.splitlines()
    assert shown == str(["serve", "--api-key", "******", "--port", "80", ""])
    assert known == str(words)
