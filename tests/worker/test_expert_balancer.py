"""Moves of experts between ranks that take steps together, and the deaths of engines meanwhile."""

import ctypes
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from octavo import _native
from octavo.config.device import EplbConfig
from octavo.errors import EngineDeadError, ModelError
from octavo.kernels.weights import PackedWeight
from octavo.layers.expert_exchange import ExpertExchange
from octavo.plan.balance_layout import BalanceLayout, LayerSlots
from octavo.system.distributed import GroupMemory, Rank
from octavo.system.tensor import from_numpy
from octavo.worker import expert_balancer
from octavo.worker.expert_balancer import ExpertBalancer
from octavo.worker.expert_group import ExpertGroup, ExpertWave

UP, DOWN = 192, 128


class DeadError(BaseException):
    """The end of an engine's thread, in the middle of a step."""


@cache
def content(layer, expert):
    """Return the weights of an expert: different bytes for each."""
    numbers = np.random.default_rng([layer, expert]).integers(0, 256, UP + DOWN, np.uint8)
    return numbers[:UP], numbers[UP:]


class Source:
    """Checkpoint, and the thread that keeps packed weights."""

    def __init__(self):
        self.is_busy, self.loaded, self.error = False, [], None

    def wait(self):
        self.is_busy = False

    def load(self, block, index, up, down):
        if self.error is not None:
            raise self.error
        self.loaded.append((block, index))
        up[:], down[:] = content(int(block), index)


class Ranked:
    """Rank with mixtures of a few experts, which are bytes only."""

    def __init__(self, index, size, experts, redundant, config, source=None, layers=2):
        self.rank = Rank(index, size, redundant_experts=redundant)
        own = self.rank.experts(experts)
        self.source, self.experts = source or Source(), experts
        self.mixtures = []
        for layer in range(layers):
            stacks = []
            for part in range(2):
                weights = [
                    PackedWeight(from_numpy(content(layer, i)[part].copy()), 1, 1, "float32", 0)
                    if i in own
                    else None
                    for i in range(experts)
                ]
                addresses = from_numpy(np.zeros(experts, np.int64))
                stacks.append(SimpleNamespace(weights=weights, addresses=addresses))
            self.mixtures.append(SimpleNamespace(up=stacks[0], down=stacks[1], placed=None))
        slots = [LayerSlots(str(i), experts, len(own), UP, DOWN) for i in range(layers)]
        self.layout = BalanceLayout(tuple(slots), size)
        self.balancer = ExpertBalancer(
            self.mixtures, self.layout, self.rank, EplbConfig(**config), self.source
        )

    def compute(self, seed):
        """Compute like the kernel: check the weights that a step reads, and count tokens."""
        for layer, mixture in enumerate(self.mixtures):
            shares = mixture.placed.shares.numpy()
            for expert in range(self.experts):
                addresses = [
                    stack.addresses.numpy()[expert] for stack in (mixture.up, mixture.down)
                ]
                assert all(addresses) or not any(addresses)
                if addresses[0]:
                    for address, part in zip(addresses, content(layer, expert), strict=True):
                        assert ctypes.string_at(int(address), len(part)) == part.tobytes()
                    assert 0 <= shares[expert, 0] < shares[expert, 1]
            # What is popular changes from time to time.
            numbers = np.random.default_rng([layer, seed // 30])
            mixture.placed.loads.numpy()[:] += numbers.integers(0, 2, self.experts) * 100 + 1

    def covered(self):
        """Return, for each layer, the parts of each expert's rows that this rank computes."""
        return [
            {
                expert: tuple(mixture.placed.shares.numpy()[expert].tolist())
                for expert in np.flatnonzero(mixture.up.addresses.numpy()).tolist()
            }
            for mixture in self.mixtures
        ]


def check_coverage(ranks):
    """Each expert's rows are divided among the ranks that have it, without gaps."""
    for layer in zip(*(rank.covered() for rank in ranks), strict=True):
        for expert in range(ranks[0].experts):
            parts = sorted(each[expert] for each in layer if expert in each)
            assert parts == [(i, len(parts)) for i in range(len(parts))], (expert, parts)
            assert parts


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch):
    """An expert needs several steps."""
    monkeypatch.setattr(expert_balancer, "_STEP_NBYTES", 150)


CONFIG = {"window_size": 8, "step_interval": 10}


def run_ranks(ranks, steps, busy_until=0):
    """Take steps, with a barrier in each; return the placements of all steps."""
    memory = GroupMemory.create(ranks[0].layout.nbytes)
    together = threading.Barrier(len(ranks), timeout=100)

    def run(rank):
        group = GroupMemory(memory, rank.layout.nbytes, rank.rank, timeout=100)
        rank.balancer.attach(group, 0)
        seen = []
        for step in range(steps):
            rank.source.is_busy = step < busy_until and rank.rank.index == 0
            try:
                rank.balancer.advance()
            except EngineDeadError:
                group.break_()
                raise
            rank.compute(step)
            seen.append([placement.copy() for placement in rank.balancer.placements])
            group.barrier()
            if step % 7 == 0:  # all are in the same step here
                together.wait()
                check_coverage(ranks)
                together.wait()
        return seen

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(run, ranks))


@pytest.mark.parametrize(
    ("size", "experts", "redundant"), [(2, 6, 0), (2, 5, 3), (3, 7, 2), (3, 4, 8)]
)
@pytest.mark.parametrize("config", [CONFIG, {"window_size": 25, "step_interval": 7}], ids=str)
def test_all_ranks_decide_the_same_in_the_same_step(size, experts, redundant, config):
    ranks = [Ranked(index, size, experts, redundant, config) for index in range(size)]
    first, *others = run_ranks(ranks, 200)
    for seen in others:
        for own, theirs in zip(first, seen, strict=True):
            assert all((a == b).all() for a, b in zip(own, theirs, strict=True))
    if redundant < experts * (size - 1):  # else all ranks have all experts
        assert ranks[0].balancer.num_switches > 2
    else:
        assert ranks[0].balancer.num_switches == 0
    assert not any(rank.source.loaded for rank in ranks)


def test_nothing_moves_while_weights_are_kept_on_the_disk():
    ranks = [Ranked(index, 2, 6, 0, CONFIG) for index in range(2)]
    (first, _) = run_ranks(ranks, 120, busy_until=60)
    same = [all((a == b).all() for a, b in zip(step, first[0], strict=True)) for step in first]
    assert all(same[:60])
    assert not all(same)


def test_the_window_has_the_last_steps():
    """Loads before the window do not count, whether it is shorter than the interval or not."""
    for window, interval in ((3, 10), (10, 10), (25, 10), (30, 7)):
        config = {"window_size": window, "step_interval": interval}
        balancer = Ranked(0, 2, 2, 0, config, layers=1).balancer
        for done in range(100):
            found = balancer._take_window(done)
            assert (found is None) == (done == 0 or done % interval > 0)
            if found is not None:
                assert found[0, 0] == sum(range(max(0, done - window), done))
            balancer.loads[0, 0] += done
        assert len(balancer._earlier) <= window // interval + 1


def test_ranks_that_disagree_compute_nothing():
    """A rank that has counted other tokens would leave out experts, or compute them twice."""
    ranks = [Ranked(index, 2, 6, 0, CONFIG) for index in range(2)]
    count, before = ranks[1].compute, ranks[1].covered()

    def miscount(seed):
        count(seed)
        ranks[1].balancer.loads[:, 5] += 1000

    ranks[1].compute = miscount
    with pytest.raises((EngineDeadError, _native.GroupError), match=r"different loads|has failed"):
        run_ranks(ranks, 100)
    assert ranks[1].covered() == before


def test_reloaded_weights_are_where_they_were_at_first():
    ranks = [Ranked(index, 2, 6, 0, CONFIG) for index in range(2)]
    run_ranks(ranks, 35)
    assert ranks[0].balancer.num_switches
    for rank in ranks:
        for layer, mixture in enumerate(rank.mixtures):
            for part, stack in enumerate((mixture.up, mixture.down)):
                for expert, weight in enumerate(stack.weights):
                    if weight is not None:
                        weight.data.numpy()[:] = content(layer, expert)[part]
        rank.balancer.reset()
    check_coverage(ranks)
    assert ranks[0].covered() == Ranked(0, 2, 6, 0, CONFIG).covered()
    run_ranks(ranks, 35)


def test_the_balancedness_is_logged(caplog):
    config = CONFIG | {"log_balancedness": True, "log_balancedness_interval": 5}
    ranks = [Ranked(index, 2, 6, 0, config) for index in range(2)]
    with caplog.at_level(logging.DEBUG, expert_balancer.__name__):
        run_ranks(ranks, 100)
    lines = [r.getMessage() for r in caplog.records if "balancedness" in r.getMessage()]
    assert [line.split(":")[0] for line in lines] == [f"EPLB step {i}" for i in range(5, 100, 5)]
    assert all(0.4 <= float(line.rpartition("=")[2]) <= 1 for line in lines)
    assert any(r.getMessage().startswith("EPLB moves") for r in caplog.records)


class Engine(Ranked):
    """Engine with two barriers in a step."""

    def __init__(self, path, index, size=3, source=None):
        super().__init__(index, size, 6, size, CONFIG, source)
        self.exchange = ExpertExchange(Rank(index, size), 4, "float32")
        self.exchange.reserve(8, 2, 4)
        self.group = ExpertGroup(str(path), self.exchange, self.balancer)
        self.wave = ExpertWave([str(path)], Rank(index, size))

    def step(self, dies_at=2):
        for barrier in range(2):
            if barrier == dies_at:
                raise DeadError
            self.exchange.join()
            # All engines see the same tokens.
            self.compute(3000 * self.group._came[0].value + self.group._steps)

    def serve_until(self, end):
        while not end.is_set():
            if self.wave.wanted:
                self.group.serve(self.step)


@pytest.fixture
def memory(tmp_path):
    path = tmp_path / "memory"
    path.touch()
    return path


@pytest.mark.parametrize("victim", [0, 2])
def test_an_engine_dies_in_any_step_of_a_move(memory, victim):
    """After each number of steps, at each barrier: no weight is lost, and all agree."""
    others = [index for index in range(3) if index != victim]
    engines = [Engine(memory, index) for index in range(3)]
    loads = 0
    with ThreadPoolExecutor(3) as threads:
        for round_ in range(18):
            # Most rounds end within a move: 10 steps without, then about 9 steps for each layer.
            steps, barrier, end = 9 + round_, round_ % 2, threading.Event()

            def run(steps=steps, barrier=barrier, end=end):
                try:
                    for _ in range(steps):
                        engines[victim].group.run(engines[victim].step)
                    with pytest.raises(DeadError):
                        engines[victim].group.run(lambda: engines[victim].step(barrier))
                    engines[victim] = Engine(memory, victim)
                    engines[victim].group.run(engines[victim].step)
                finally:
                    end.set()

            futures = [threads.submit(run)]
            futures += [threads.submit(engines[i].serve_until, end) for i in others]
            for future in futures:
                future.result(60)
            loads += len(engines[victim].source.loaded)
            placements = [engine.balancer.placements for engine in engines]
            for other in placements[1:]:
                assert all((a == b).all() for a, b in zip(placements[0], other, strict=True))
            check_coverage(engines)
    assert loads > 10
    assert engines[others[0]].balancer.num_switches > 10
    assert not engines[others[0]].source.loaded, "survivors have their experts in memory"


def test_a_new_engine_has_the_first_placement_after_weights_were_reloaded(memory):
    """The weights are loaded again after experts have moved; then an engine dies."""
    engines, end = [Engine(memory, index, 2) for index in range(2)], threading.Event()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(engines[1].serve_until, end)
        for _ in range(60):
            engines[0].group.run(engines[0].step)
        end.set()
        other.result(60)
    assert engines[0].balancer.num_switches
    for engine in engines:
        for layer, mixture in enumerate(engine.mixtures):
            for part, stack in enumerate((mixture.up, mixture.down)):
                for expert, weight in enumerate(stack.weights):
                    if weight is not None:
                        weight.data.numpy()[:] = content(layer, expert)[part]
        engine.balancer.reset()
    engines[1] = Engine(memory, 1, 2)
    for engine in engines:
        engine.balancer.settle()
    check_coverage(engines)


def test_an_engine_that_cannot_read_its_experts_ends(memory):
    engines, end = [Engine(memory, index, 2) for index in range(2)], threading.Event()
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(engines[1].serve_until, end)
        while not engines[0].balancer.num_switches:
            engines[0].group.run(engines[0].step)
        source = Source()
        source.error = ModelError("the checkpoint is gone")
        with pytest.raises(ModelError, match="is gone"):
            Engine(memory, 0, 2, source)
        late = Engine(memory, 0, 2)
        late.source.error = source.error
        late.balancer._version, late.balancer._layers[0].in_slots[:] = 0, -1  # others were faster
        with pytest.raises(EngineDeadError, match="is gone"):
            late.group.run(late.step)
        engines[0] = Engine(memory, 0, 2)
        engines[0].group.run(engines[0].step)
        end.set()
        other.result(60)
    check_coverage(engines)
