"""Measurements of a processor that are kept: octavo/kernels/tuning.py."""

import fcntl
import itertools
import logging
import os
import time

import msgspec
import pytest
import torch

from octavo import _native
from octavo.kernels import native, tuning
from octavo.kernels.tuning import DEFAULT, GRAINS, SPINS, Tuning, choose, measure, tune
from tests.torch_ops import native_ops

OTHER = Tuning(not DEFAULT.past_caches, 200, 2500)


@pytest.fixture(autouse=True)
def as_before():
    yield
    DEFAULT.apply()
    native.set_num_threads(0)


@pytest.fixture
def measured(monkeypatch):
    """Return the calls of the measurement, with `OTHER` as its result."""
    calls = []
    monkeypatch.setattr(tuning, "measure", lambda: calls.append(1) or OTHER)
    return calls


def current():
    return Tuning(*_native.tuning())


@pytest.mark.parametrize("threads", [1, 2])
def test_a_measurement_changes_nothing_by_itself(threads):
    native.set_num_threads(threads)
    found = measure()
    assert found.spin_us in SPINS
    assert found.grain in GRAINS
    assert current() == DEFAULT
    if threads == 1:
        assert found == msgspec.structs.replace(DEFAULT, past_caches=found.past_caches)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({10: 0.002, 50: 0.002, 200: 0.001}, 200),
        ({10: 0.001, 50: 0.002, 200: 0.0005}, 200),
        ({10: 0.00195, 50: 0.002, 200: 0.003}, 50),
    ],
)
def test_only_what_is_clearly_better_replaces_the_default(seconds, expected, monkeypatch):
    now = 0.0

    def run():
        nonlocal now
        now += seconds[current().spin_us]

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert choose("spin_us", SPINS, run) == expected
    assert current() == DEFAULT


def test_what_is_better_at_times_only_is_not_taken(monkeypatch):
    now, turns = 0.0, itertools.count()

    def run():
        nonlocal now
        slow = current().spin_us == 200 and next(turns) == 2
        now += 0.003 if slow else 0.001 if current().spin_us == 200 else 0.002

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert choose("spin_us", SPINS, run) == DEFAULT.spin_us


def test_no_choice_changes_a_bit():
    generator = torch.Generator().manual_seed(0)
    ops = native_ops()
    native.set_num_threads(2)
    for dtype in (torch.bfloat16, torch.float32):
        weight = ops.pack_weight(torch.randn(320, 256, generator=generator).to(dtype))
        for rows in (1, 2, 9):
            x = torch.randn(rows, 256, generator=generator).to(dtype)
            DEFAULT.apply()
            expected = ops.linear(x, weight)
            for fields in itertools.product((False, True), SPINS, GRAINS):
                Tuning(*fields).apply()
                assert torch.equal(ops.linear(x, weight), expected)


def test_it_is_measured_once(tmp_path, measured, caplog):
    caplog.set_level(logging.DEBUG, "octavo.kernels.tuning")
    folder = tmp_path / "tuning"
    tune(folder, "a processor")
    assert current() == OTHER
    assert "measured in" in caplog.text
    DEFAULT.apply()
    tune(folder, "a processor")
    assert current() == OTHER
    assert f"from {folder}" in caplog.text
    assert len(measured) == 1
    tune(folder, "another processor")
    native.set_num_threads(1)
    tune(folder, "a processor")
    assert len(measured) == 3
    assert sorted(file.suffix for file in folder.iterdir()) == ["", *[".json"] * 3]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"a": ' + b"[" * 4000,
        b'{"past_caches": 1, "spin_us": 50, "grain": 10000}',
        b'{"past_caches": true, "spin_us": 1000000000, "grain": 10000}',
        b'{"past_caches": true, "spin_us": 50, "grain": -1}',
    ],
)
def test_a_file_that_says_nothing_of_the_kind_is_written_anew(data, tmp_path, measured):
    tune(tmp_path, "a processor")
    (file,) = tmp_path.glob("*.json")
    written = file.read_bytes()
    file.write_bytes(data)
    tune(tmp_path, "a processor")
    assert len(measured) == 2
    assert file.read_bytes() == written


@pytest.mark.parametrize("make", ["fifo", "link", "large"])
def test_a_file_that_would_never_end_is_written_anew(make, tmp_path, measured):
    tune(tmp_path, "a processor")
    (file,) = tmp_path.glob("*.json")
    written = file.read_bytes()
    file.unlink()
    if make == "fifo":
        os.mkfifo(file)
    elif make == "link":
        file.symlink_to("/dev/zero")
    else:
        file.write_bytes(written + b" " * 2**16)
    tune(tmp_path, "a processor")
    assert len(measured) == 2
    assert file.is_file()
    assert not file.is_symlink()
    assert file.read_bytes() == written


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, measured):
    tune(tmp_path, "a processor")
    (file,) = tmp_path.glob("*.json")
    file.unlink()
    file.mkdir()
    DEFAULT.apply()
    tune(tmp_path, "a processor")
    assert sorted(tmp_path.iterdir()) == sorted([file, tmp_path / "lock"])
    assert current() == DEFAULT


def test_without_a_folder_the_defaults_stay(tmp_path, measured, caplog):
    caplog.set_level(logging.DEBUG, "octavo.kernels.tuning")
    tune(None, "a processor")
    (tmp_path / "file").write_bytes(b"")
    tune(tmp_path / "file", "a processor")
    assert "kernels are not tuned: " in caplog.text
    assert (measured, current()) == ([], DEFAULT)


def test_while_another_process_measures_the_defaults_stay(tmp_path, measured):
    with open(tmp_path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tune(tmp_path, "a processor")
        assert (measured, current()) == ([], DEFAULT)
    tune(tmp_path, "a processor")
    assert (len(measured), current()) == (1, OTHER)


@pytest.mark.parametrize("values", [(True, -1, 1), (True, 10001, 1), (True, 50, -1)])
def test_values_that_make_no_sense_are_refused(values):
    with pytest.raises(ValueError, match="are needed"):
        _native.set_tuning(*values)
