"""When the bar is shown, and that nothing stays of it."""

import io
import sys

import pytest

from octavo.worker import loading_bar
from octavo.worker.loading_bar import loading_bar as bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stream, patience=-1.0, total=10):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(loading_bar, "_PATIENCE", patience)
    with bar("some/model") as progress:
        progress(3, 100)  # a cache that turned out to be damaged
        for done in range(total + 1):
            progress(done, total)
    return stream.getvalue()


def test_a_terminal_gets_a_bar_that_goes_away(monkeypatch):
    text = shown(monkeypatch, Terminal())
    assert "Loading some/model" in text
    assert text.split("\r")[-1].strip() == ""
    assert "\x1b[?25l" not in text  # the cursor is not hidden


def test_a_model_that_loads_quickly_has_none(monkeypatch):
    assert shown(monkeypatch, Terminal(), patience=1000.0) == ""


def test_a_file_gets_nothing(monkeypatch):
    assert shown(monkeypatch, io.StringIO()) == ""


def fail(progress):
    progress(1, 2)
    raise ZeroDivisionError


def test_a_failure_ends_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setattr(loading_bar, "_PATIENCE", -1.0)
    with pytest.raises(ZeroDivisionError), bar("m") as progress:
        fail(progress)
    assert stream.getvalue().split("\r")[-1].strip() == ""
