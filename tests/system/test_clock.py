"""Clock of messages."""

import time

import pytest

from octavo.system import clock


def test_it_runs_as_the_monotonic_clock_does(monkeypatch):
    before = clock.now()
    monkeypatch.setattr(time, "time", lambda: 0.0)  # the wall clock is set
    assert before <= clock.now() < before + 60
    assert clock.to_monotonic(clock.from_monotonic(5.0)) == pytest.approx(5.0, abs=1e-6)


def test_it_can_be_another_process_one(monkeypatch):
    monkeypatch.setattr(clock, "_EPOCH", clock.epoch())  # restored afterwards
    clock.set_epoch(-1000.0)
    assert clock.epoch() == -1000.0
    assert clock.now() == pytest.approx(time.monotonic() - 1000.0, abs=60.0)
