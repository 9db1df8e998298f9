"""Loading bar: when it is shown, and that it is erased."""

import io
import logging
import sys

import pytest

from octavo.worker import loading_bar
from octavo.worker.loading_bar import loading_bar as bar


@pytest.fixture(autouse=True)
def info(caplog, monkeypatch):
    log = logging.getLogger("octavo")  # as if logging were not set up
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "handlers", [])
    caplog.set_level(logging.INFO, "octavo.worker.loading_bar")


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


def test_a_file_gets_log_lines_now_and_then(monkeypatch, caplog):
    assert shown(monkeypatch, io.StringIO()) == ""
    assert not caplog.messages
    monkeypatch.setattr(loading_bar, "_LOG_INTERVAL", 0.0)
    assert shown(monkeypatch, io.StringIO(), total=2) == ""
    assert caplog.messages == [f"loading some/model: {part}%" for part in (3, 0, 50, 100)]


def test_nothing_is_shown_where_only_warnings_are(monkeypatch, caplog):
    monkeypatch.setattr(loading_bar, "_LOG_INTERVAL", 0.0)
    caplog.set_level(logging.WARNING, "octavo.worker.loading_bar")
    assert shown(monkeypatch, io.StringIO()) == shown(monkeypatch, Terminal()) == ""
    assert not caplog.messages


def test_a_display_of_ones_own_takes_its_place(monkeypatch, caplog):
    texts = []
    monkeypatch.setattr(loading_bar, "on_progress", texts.append)
    assert shown(monkeypatch, Terminal(), total=1) == ""
    assert texts == [f"loading some/model: {part}%" for part in (3, 0, 100)]


def fail(progress):
    progress(1, 2)
    raise ZeroDivisionError


def test_a_failure_ends_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    monkeypatch.setattr(loading_bar, "_PATIENCE", -1.0)
    with pytest.raises(ZeroDivisionError), bar("m") as progress:
        fail(progress)
    assert stream.getvalue().split("\r")[-1].strip() == ""
