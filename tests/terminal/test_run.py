"""`octavo run` with the built-in model, in a pseudo-terminal."""

import sys

import pytest

from tests.terminal.pseudo import NoInputError, Terminal

RUN = (sys.executable, "-m", "octavo", "run", "--max-model-len", "512")


def test_a_chat_from_the_first_to_the_last_line():
    for _ in range(4):
        try:
            return chat()
        except NoInputError:
            continue
    pytest.fail("the terminal delivers no input")


def chat():
    with Terminal(*RUN, "--kv-cache-memory-bytes", "8M") as terminal:
        start = terminal.wait_for(">>> ")
        assert " INFO " not in start
        assert "loading octavo/stories" in start
        assert "octavo/stories: Ctrl-C stops an answer" in start
        terminal.type("What is 3 + 4?\r")
        terminal.interrupt(">>> ")  # while the process for templates starts
        terminal.type("What is 3 + 4?\r")
        assert "prompt tokens cached]" in terminal.wait_for("tokens/s[^>]*>>> ")
        terminal.type("/regen\r")
        terminal.wait_for("tokens/s[^>]*>>> ")
        terminal.type("\x04")
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.output


def test_ctrl_c_while_loading_ends_without_a_traceback():
    def status():
        with Terminal(*RUN, "-", "--kv-cache-memory-bytes", "8M") as terminal:
            terminal.type("Once upon a time\r\x04")
            terminal.wait_for("loading octavo/stories")
            terminal.type("\x03")
            found = terminal.wait()
            assert found in (0, 130), terminal.output
            assert "Traceback" not in terminal.output
        return found

    # On a busy machine all may be done before Ctrl-C comes.
    assert any(status() == 130 for _ in range(10))
