"""Machines whose engines divide experts: rows travel between them, until a connection breaks."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq

from octavo.errors import EngineDeadError, EngineStoppedError
from octavo.layers.expert_exchange import ExpertExchange
from octavo.plan.setup import Machine
from octavo.system.distributed import Rank
from octavo.system.tensor import from_numpy
from octavo.worker import expert_relay as module
from octavo.worker.expert_group import LOST_MACHINE, ExpertGroup, ExpertWave
from octavo.worker.expert_relay import ExpertRelay, RowCopier

HIDDEN, TOP_K, EXPERTS, MOST_TOKENS = 8, 2, 7, 4


def free_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


def make_exchange(engine, size, meeting):
    exchange = ExpertExchange(Rank(engine, size), MOST_TOKENS, "float32", meeting=meeting)
    exchange.reserve(HIDDEN, TOP_K, EXPERTS)
    exchange.reserve(2 * HIDDEN, TOP_K - 1, EXPERTS + 3)
    return exchange


class Engine:
    """Engine with two mixtures, whose expert e multiplies a token by e + 1."""

    def __init__(self, path, engine, size, meeting):
        self.exchange = make_exchange(engine, size, meeting)
        self.engine = engine
        self.group = ExpertGroup(str(path), self.exchange, lost=LOST_MACHINE)
        self.wave = ExpertWave([str(path)], meeting)
        self.num_steps = 0

    def step(self, count=0, seed=0):
        """Compute both mixtures for random tokens; return the sums, and what is expected."""
        self.num_steps += 1
        found, expected = [], []
        for sizes in self.exchange.mixtures:
            rng = np.random.default_rng([seed, self.engine, sizes.hidden])
            x = rng.normal(size=(count, sizes.hidden)).astype(np.float32)
            ids = rng.integers(0, sizes.experts, (count, sizes.top_k)).astype(np.int32)
            factors = rng.normal(size=ids.shape).astype(np.float32)
            if count:
                self.exchange.send(*map(from_numpy, (x, ids, factors)))
            else:
                self.exchange.send_nothing()
            self.exchange.join()
            tokens = self._compute(sizes)
            own = np.flatnonzero(tokens // MOST_TOKENS == self.engine)
            self.exchange.join()
            rows = self.exchange.rows(sizes).results.view(np.float32)[own]
            result = np.zeros_like(x)
            np.add.at(result, tokens[own] % MOST_TOKENS, rows)
            found.append(result)
            expected.append((x[:, None] * ((ids + 1) * factors)[..., None]).sum(1))
        return found, expected

    def _compute(self, sizes):
        """Compute this engine's experts; return the token of each place in the results."""
        rows = self.exchange.rows(sizes)
        own = Rank(self.engine, self.exchange.num_engines).experts(sizes.experts)
        pairs = [
            (rows.ids[token, k], token, rows.factors[token, k])
            for engine, count in enumerate(rows.counts)
            for token in range(engine * MOST_TOKENS, engine * MOST_TOKENS + count)
            for k in range(sizes.top_k)
        ]
        pairs.sort(key=lambda pair: pair[0])
        for place, (expert, token, factor) in enumerate(pairs):
            if expert in own:
                x = rows.x.view(np.float32)[token]
                rows.results.view(np.float32)[place] = x * np.float32((expert + 1) * factor)
        return np.array([token for _, token, _ in pairs], int)

    def serve_until(self, end):
        with contextlib.suppress(EngineStoppedError):
            while not end.is_set():
                if self.wave.wanted:
                    self.group.serve(self.step)
                time.sleep(0.0005)


class Machines:
    """Machines of one generation, with a number of engines each."""

    def __init__(self, folder, counts, keys=None, generations=None):
        size, address, first = sum(counts), free_address(), 0
        key = zmq.curve_keypair()
        self.engines, self.relays = [], []
        for number, count in enumerate(counts):
            path = folder / f"memory-{number}"
            path.touch()
            made = []
            for index in range(count):
                made.append(Engine(path, first + index, size, Rank(index, count + 1)))
            machine = Machine(
                first,
                count,
                address,
                *(key if keys is None else keys[number]),
                b"one" if generations is None else generations[number],
            )
            self.relays.append(ExpertRelay(machine, str(path), made[0].exchange))
            self.engines += made
            first += count


@pytest.fixture
def machines(tmp_path):
    made = []

    def make(*args, **kwargs):
        made.append(Machines(tmp_path, *args, **kwargs))
        return made[-1]

    yield make
    for relay in (relay for each in made for relay in each.relays):
        relay.close()


@pytest.mark.parametrize("counts", [(1, 1), (2, 2), (1, 2, 1)], ids=str)
def test_rows_travel_to_the_machine_of_their_experts_and_back(machines, counts):
    engines, end = machines(counts).engines, threading.Event()
    with ThreadPoolExecutor(len(engines)) as threads:
        others = [threads.submit(engine.serve_until, end) for engine in engines[1:-1]]

        def run(engine):
            for seed in range(20):
                count = (seed + engine.engine) % (MOST_TOKENS + 1)
                found, expected = engine.group.run(lambda: engine.step(count, seed))  # noqa: B023
                for pair in zip(found, expected, strict=True):
                    np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)
            engine.serve_until(end)

        both = [threads.submit(run, engine) for engine in (engines[0], engines[-1])]
        while min(engine.num_steps for engine in engines) < 20:
            time.sleep(0.01)
            assert not any(future.done() for future in (*both, *others))
        end.set()
        for future in (*both, *others):
            future.result(10)
