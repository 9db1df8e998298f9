"""Machines whose engines divide experts: rows travel between them, until a connection breaks."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import zmq

from octavo.errors import EngineDeadError, EngineStoppedError
from octavo.layers.expert_exchange import ExpertExchange
from octavo.plan.setup import Machine
from octavo.system.distributed import Rank
from octavo.system.tensor import from_numpy
from octavo.worker.expert_group import LOST_MACHINE, ExpertGroup, ExpertWave
from octavo.worker.expert_relay import ExpertRelay, RowCopier
from tests.e2e.harness import free_port

HIDDEN, TOP_K, EXPERTS, MOST_TOKENS = 8, 2, 7, 4


def free_address():
    return f"tcp://127.0.0.1:{free_port()}"


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

    def __init__(self, folder, counts, keys=None, generations=None, address=None):
        size, first = sum(counts), 0
        self.address, self.key = address or free_address(), zmq.curve_keypair()
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
                self.address,
                *(self.key if keys is None else keys[number]),
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
            future.result(60)


def serve(threads, engines):
    """Let engines serve until they end; return the futures and the event that ends them."""
    end = threading.Event()
    return [threads.submit(engine.serve_until, end) for engine in engines], end


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("closed", [0, 1])
def test_a_machine_that_is_lost_ends_the_generation_on_the_others(machines, closed):
    """In the middle of a step, which cannot be repeated; idle engines learn of it, too."""
    made = machines((1, 1, 1))
    engines, relays = made.engines, made.relays
    with ThreadPoolExecutor(3) as threads:
        served, end = serve(threads, engines)
        wait_until(lambda: min(engine.num_steps for engine in engines) >= 1)
        end.set()
        for future in served:
            future.result(60)
        waits = threads.submit(engines[2].group.run, engines[2].step)  # others do not come
        time.sleep(0.05)
        assert not waits.done()
        if closed == 1:  # the head only learns of it as of a lost node
            relays[1].close()
            time.sleep(0.3)
            assert not waits.done()
        relays[0].close()
        with pytest.raises(EngineStoppedError, match="another machine with a part of the experts"):
            waits.result(60)
        wait_until(lambda: engines[1].wave.wanted)
        with pytest.raises(EngineStoppedError):
            engines[1].group.serve(engines[1].step)


@pytest.mark.parametrize("stranger", ["key", "generation"])
def test_a_machine_of_another_cluster_or_generation_is_not_connected(machines, stranger):
    keys = [zmq.curve_keypair() for _ in range(2)] if stranger == "key" else None
    generations = [b"one", b"two"] if stranger == "generation" else None
    made = machines((1, 1), keys, generations)
    time.sleep(0.5)
    for engine, relay in zip(made.engines, made.relays, strict=True):
        assert not engine.wave.wanted, "the relay has not come to the group"
        assert relay._thread.is_alive()


def test_strangers_and_what_is_no_message_harm_nobody(machines):
    made = machines((1, 1))
    engines, host = made.engines, made.address.removeprefix("tcp://").split(":")
    with ThreadPoolExecutor(1) as thread, zmq.Context() as context:
        served, end = serve(thread, engines[:1])
        assert len(engines[1].group.run(engines[1].step)) == 2
        with socket.create_connection((host[0], int(host[1]))) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(200))
        peer = context.socket(zmq.DEALER)
        peer.curve_secretkey = made.key[1]
        peer.curve_publickey = peer.curve_serverkey = made.key[0]
        peer.connect(made.address)
        again = msgspec.msgpack.encode({"generation": b"one", "first_engine": 1, "num_engines": 1})
        for frames in ([b""], [b"r", bytes(8), b"x"], [b"h", b"", b"x"], [b"h", b"", again]):
            peer.send_multipart(frames)
        time.sleep(0.2)
        assert peer.poll(0) == 0
        peer.close(linger=0)
        found, expected = engines[1].group.run(lambda: engines[1].step(3, 1))
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        end.set()
        served[0].result(60)


def test_rows_that_are_not_the_next_ones_end_the_generation(machines, caplog):
    caplog.set_level("INFO")
    made = machines((1, 1))
    node = made.relays[1]._link
    with ThreadPoolExecutor(1) as thread:
        served, end = serve(thread, made.engines[:1])
        made.engines[1].group.run(made.engines[1].step)
        node._send(node._head, b"r", 2, b"again")
        wait_until(lambda: "sent rows that are not the next ones" in caplog.text)
        served[0].result(60)  # its generation has ended
        end.set()


def test_a_port_that_the_last_generation_still_has(machines):
    address, pair = free_address(), zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as last:
        last.curve_server, last.curve_secretkey = True, pair[1]
        last.bind(address)
        made = machines((1, 1), [pair, pair], address=address)
        assert last.recv_multipart()[1] == b"h", "the node meets the relay that is ending"
        assert not made.engines[1].wave.wanted
    wait_until(lambda: made.engines[1].wave.wanted)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data[:-1], "instead of"),
        (lambda data: data + b"x", "instead of"),
        (lambda data: data[:3], "3 bytes instead of 4 or more"),
        (lambda data: np.int32(MOST_TOKENS + 1).tobytes() + data[4:], "to 5 tokens for 4"),
        (lambda data: np.int32(-1).tobytes() + data[4:], "-1 to -1 tokens for 4"),
        (lambda data: data[:68] + np.int32(EXPERTS).tobytes() + data[72:], "experts 1 to 7 of 7"),
        (lambda data: data[:68] + np.int32(-1).tobytes() + data[72:], "experts -1 to 1 of 7"),
    ],
)
def test_messages_are_checked(tmp_path, change, why):
    path = tmp_path / "memory"
    path.touch()
    exchange = Engine(path, 0, 2, Rank(0, 2)).exchange
    copier = RowCopier(exchange, exchange.mixtures[0])
    exchange.send(
        *(
            from_numpy(it)
            for it in (
                np.ones((2, HIDDEN), np.float32),
                np.ones((2, TOP_K), np.int32),
                np.ones((2, TOP_K), np.float32),
            )
        )
    )
    data = copier.read_tokens([0])
    assert len(data) == 4 + 2 * (4 * HIDDEN + 8 * TOP_K) <= copier.largest
    copier.write_tokens([1], data)
    assert copier.read_tokens([0, 1]) == data[:4] * 2 + data[4:] * 2
    with pytest.raises(EngineDeadError, match=why):
        copier.write_tokens([1], change(data))
    results = copier.read_results([0, 1], [1])
    assert len(results) == 4 * 4 * HIDDEN
    with pytest.raises(EngineDeadError, match="instead of"):
        copier.write_results([0, 1], [1], results[:-1])
