"""Maps of the KV cache in the engine view of a recording; tests/e2e/test_replay.py has the rest."""

import itertools
import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.engine import record
from octavo.engine.record import StepRecorder
from octavo.kv_cache.block_map import OWNER_SHIFT, make_block_map
from octavo.observability.recording import FORMAT, Head, Recorder, read_records
from octavo.observability.view_events import label_of
from octavo.scheduler.listener import StepListener
from octavo.simulation.view_file import write_view
from tests.engine.test_core import make_core
from tests.params import core_params, core_request

BUILD = {"octavo": "1"}
CONFIG = {
    "scheduler": {"max_num_batched_tokens": 32, "max_num_seqs": 4},
    "model": {"served_model_name": ["m"], "model": "m"},
    "cache": {"block_size": 16},
}
FLAGS = (1 << OWNER_SHIFT) - 1


class LiveMaps(StepListener):
    """Listener that keeps the map of each step: flags and label of the owner of each block."""

    def __init__(self):
        self.maps = []

    def on_schedule(self, step, work):
        found = make_block_map(self.core.scheduler.kv_cache_manager)
        labels = [None, *map(label_of, found.owners)]
        cells = np.frombuffer(found.cells, "<u4").tolist()
        self.maps.append([(cell & FLAGS, labels[cell >> OWNER_SHIFT]) for cell in cells])


def run(path):
    """Record a core whose requests share prefixes and need each other's blocks; return its maps."""
    recorder, live = (
        Recorder(path, Head(FORMAT, "an id", 0.0, BUILD, CONFIG, "", "full")),
        LiveMaps(),
    )
    steps = StepRecorder(recorder.put)
    core = make_core(listeners=[steps, live], blocks=12)
    live.core = core
    steps.make_map = lambda: make_block_map(core.scheduler.kv_cache_manager)
    for i in range(6):
        prompt = [1] * 20 + [i] * 10
        core.add_request(core_request(f"r#{i}", prompt, core_params(max_tokens=30)))
        for _ in range(5):
            core.step()
    while core.has_work():
        core.step()
    core.shutdown()
    recorder.close()
    return live.maps


def maps_of(path):
    """Return the map after each tick of a view's file that has changed it."""
    maps, cells, labels = [], [], {}
    for event in path.read_text().split("\n\n")[:-1]:
        data = json.loads(event.split("\ndata: ")[1])
        for found in data.get("blocks", {}).values():
            cells = [(0, None)] * found["num_cells"] if "num_cells" in found else list(cells)
            labels |= found.get("owners", {})
            runs = found["runs"]
            for first, count, cell in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
                owner = labels.get(str(cell >> OWNER_SHIFT))
                cells[first : first + count] = [(cell & FLAGS, owner)] * count
            maps.append(cells)
    return maps


def test_the_map_of_each_step_is_the_live_one(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "INTERVAL", 0.0)
    monkeypatch.setattr(record, "REST", 0.0)
    seconds = itertools.count()
    monkeypatch.setattr(record.clock, "now", lambda: float(next(seconds)))
    live = run(tmp_path / "run.rec")
    write_view(tmp_path / "run.rec", tmp_path / "run.view")
    assert maps_of(tmp_path / "run.view") == [found for found, _ in itertools.groupby(live)]
    flags = {flags for cells in live for flags, _ in cells}
    assert {refs >> 9 & 7 for refs in flags} >= {0, 1, 2}  # free, held, and shared blocks
    assert {owner for cells in live for _, owner in cells} == {None, *"012345"}
    assert all(owner is None for _, owner in live[-1])


@pytest.mark.parametrize(("rest", "number"), [(2, 2), (1e9, 1)])
def test_maps_are_rare(rest, number, tmp_path, monkeypatch):
    """Each takes a second here; the last one, of an idle engine, waits for the rest only."""
    monkeypatch.setattr(record, "INTERVAL", 1e9)
    monkeypatch.setattr(record, "REST", rest)
    clocks = {name: itertools.count(10**9) for name in ("monotonic", "thread_time")}
    looks = {name: clock.__next__ for name, clock in clocks.items()}
    fake = SimpleNamespace(perf_counter=time.perf_counter, **looks)
    monkeypatch.setattr(record, "time", fake)
    live = run(tmp_path / "run.rec")
    steps = [one for one in read_records(tmp_path / "run.rec") if hasattr(one, "block_map")]
    assert len(steps) == len(live)
    packed = [i for i, step in enumerate(steps) if step.block_map]
    assert packed == [0, len(steps) - 1][:number]
