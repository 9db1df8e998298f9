"""Pictures that results hold for the web page."""

import pytest

from octavo.bench import pictures

POINTS = [
    {"name": "prefill: qkv", "flops": 4e9, "bytes": 1e7, "seconds": 0.004},
    {"name": "decode: qkv", "flops": 1e7, "bytes": 1e7, "seconds": 0.001},
]


def test_a_roofline():
    """The machine reaches 2 TFLOP/s and 20 GB/s: its arithmetic is the limit from 100 on."""
    picture = pictures.roofline(POINTS, 20e9, 2e12)
    line, prefill, decode = picture["series"]
    assert line["label"] == "peak 2000 GFLOP/s"
    assert line["points"] == [
        [pytest.approx(1 / 3), pytest.approx(20 / 3)],
        [pytest.approx(100), pytest.approx(2000)],
        [pytest.approx(1200), pytest.approx(2000)],
    ]
    assert prefill["points"] == [[400.0, pytest.approx(1000)]]
    assert prefill["label"] == "prefill: qkv: 1000 GFLOP/s, 2.5 GB/s, 50% of the roof"
    assert decode["label"] == "decode: qkv: 10 GFLOP/s, 10 GB/s, 50% of the roof"
    assert picture["marks"] == [[pytest.approx(100), "memory 20 GB/s; ridge at 100 FLOP/byte"]]
    assert pictures.roofline([], 1.0, 1.0) is None


def test_an_operation_that_is_faster_than_the_machine_raises_the_roof():
    line, *_ = pictures.roofline(POINTS, 1e9, 1e11)["series"]
    assert line["label"] == "peak 1000 GFLOP/s"
    assert line["points"][1] == [pytest.approx(100), pytest.approx(1000)]


def test_starts():
    labels = {"import": "import", "ready": "loaded", "never": "?"}
    measured = [
        {"cache": "warm", "import": 1.0, "ready": 2.0},
        {"cache": "warm", "import": 3.0},
        {"cache": "warm", "import": 8.0},
        {"cache": "cold", "ready": 4.0},
    ]
    picture = pictures.starts(measured, labels)
    assert picture["y"]["names"] == ["import", "loaded"]
    assert [(s["label"], s["points"], s.get("open", False)) for s in picture["series"]] == [
        ("warm file cache", [[1.0, 0], [3.0, 0], [8.0, 0], [2.0, 1]], False),
        ("warm file cache, median", [[3.0, 0], [2.0, 1]], True),
        ("cold file cache", [[4.0, 1]], False),
        ("cold file cache, median", [[4.0, 1]], True),
    ]
