"""Workers in actors of a Ray cluster: as in processes, and with Ray's resources and failures."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.errors import ConfigError, EngineDeadError, EngineStoppedError
from octavo.executor.registry import get_executor_class
from octavo.plan.memory import Scratch
from octavo.plan.setup import WorkerSetup
from octavo.platforms.cpu import CPUPlatform
from octavo.system.distributed import Rank
from tests.executor.test_multiproc import FAKES, PATH, SPEC, check_messages, gone, run, work

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install ray)")

from ray.cluster_utils import Cluster  # noqa: E402

from octavo.executor import ray as of_ray  # noqa: E402
from octavo.executor import ray_session  # noqa: E402
from octavo.executor.ray import RayExecutor  # noqa: E402

ROOT = Path(__file__).parents[2]

# Descriptors and processes of Ray's clusters, which it leaves to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster():
    """Start two nodes, with one CPU each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        assert not ray.is_initialized(), "nobody is connected any more"
        cluster.shutdown()


def make(world_size=2, worker="FakeWorker", **settings):
    config = EngineConfig.from_kwargs(
        distributed_executor_backend="ray", tensor_parallel_size=world_size, **settings
    )
    setup = WorkerSetup(config, SPEC, PATH, "float32", 64, 32)
    setup = replace(setup, rank=Rank(0, world_size), scratches=(Scratch(0, 0, 0),))
    return RayExecutor(setup, CPUPlatform(), worker_cls=f"{FAKES}.{worker}")


def free_cpus():
    """Return Ray's free CPUs once all have been returned; for a connected process."""
    end = time.monotonic() + 60
    while (free := ray.available_resources().get("CPU", 0)) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    return free


@pytest.fixture
def connected(cluster):
    ray.init(address=cluster.address, logging_level="ERROR")
    yield
    ray.shutdown()


class TestTwoNodes:
    @pytest.fixture(scope="class")
    def two(self, cluster):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OCTAVO_OF_A_TEST", "seen")
            patch.setenv("OF_A_TEST", "not ours")
            executor = make()
        yield executor
        pids = executor.pids
        executor.shutdown()
        executor.shutdown()
        assert gone(pids)

    def test_every_rank_gets_every_message_in_order_and_rank_0_answers(self, two):
        check_messages(two, 2)

    def test_each_has_a_node_of_its_own_and_the_variables_that_count(self, two):
        assert [rank for rank, *_ in two.collective_rpc("describe")] == [0, 1]
        assert len({node for node, *_ in two.collective_rpc("ray_node")}) == 2
        names = ["OCTAVO_OF_A_TEST", "OF_A_TEST"]
        assert two.collective_rpc("environment", args=(names,)) == [["seen", None]] * 2

    def test_drafts_come_when_the_step_begins(self, two):
        step = two.execute(work("a", "late", drafts=2))
        assert step.drafts() == {"a": [7, 7], "late": [7, 7]}
        late, next_one = step.sample(), two.execute(work("b")).sample()
        assert next_one.result(20).req_ids == ["b"]
        assert late.result(20).req_ids == ["a", "late"]


class TestDeaths:
    @pytest.mark.parametrize(
        ("which", "text"),
        [(signal.SIGKILL, "has died"), (signal.SIGSTOP, "is stopped")],
    )
    def test_one_that_is_killed_or_stopped_is_named(self, connected, which, text):
        executor, seen, told = make(), [], threading.Event()
        executor.register_failure_callback(lambda error: (seen.append(error), told.set()))
        run(executor, "a")
        waiting, pids = executor.execute(work("wait")).sample(), executor.pids
        os.kill(pids[1], which)
        assert told.wait(60)
        kind = EngineStoppedError if which == signal.SIGSTOP else EngineDeadError
        assert type(seen[0]) is kind
        for part in (f"worker 1 (pid {pids[1]} on ", text, "the last submitted step was 2"):
            assert part in str(seen[0])
        with pytest.raises(EngineDeadError, match="worker 1"):
            waiting.result(30)
        with pytest.raises(EngineDeadError, match="worker 1"):
            executor.execute(work("b"))
        assert gone(pids), "the other one, too"
        executor.shutdown()
        assert free_cpus() == 2
        assert ray.is_initialized(), "it was connected by another"

    @pytest.mark.parametrize(
        ("worker", "kind", "text"),
        [
            ("Refusing", ConfigError, "^num_threads=4000 is too many$"),
            ("Broken", EngineDeadError, r"worker 1 \(pid .* could not start: ValueError: who"),
            ("Crashing", EngineDeadError, r"worker [01] \(pid .*\) (has died|could not start)"),
        ],
    )
    def test_a_start_that_fails_says_why_and_leaves_nothing(self, connected, worker, kind, text):
        with pytest.raises(kind, match=text):
            make(worker=worker)
        assert free_cpus() == 2


def test_a_cluster_that_is_too_small(connected, monkeypatch):
    monkeypatch.setattr(of_ray, "_PLACEMENT_SECONDS", 1.0)
    with pytest.raises(ConfigError) as caught:
        make(num_threads=2)
    for part in (
        "2 x {'CPU': 2} on the engine's machine",
        "2 nodes have 2 CPU",
        "Lower tensor_parallel",
    ):
        assert part in str(caught.value)
    assert free_cpus() == 2


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "nonsense"])
def test_an_address_without_a_cluster(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS='{address}' leads to no Ray cluster"):
        make()
    assert not ray.is_initialized()


def test_what_an_old_cluster_has_left_is_no_cluster(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_session._find_cluster() is None
    (tmp_path / "ray").mkdir()
    note = tmp_path / "ray" / "ray_current_cluster"
    note.write_text("127.0.0.1:1")
    assert ray_session._find_cluster() is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        note.write_text(f"127.0.0.1:{server.getsockname()[1]}")
        assert ray_session._find_cluster() == note.read_text()


def test_without_ray(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install ray"):
        get_executor_class(EngineConfig.from_kwargs(distributed_executor_backend="ray"))


@pytest.mark.parametrize("place", [(0, "elsewhere"), (0, None)])
def test_memory_that_cannot_be_shared(place):
    pid, host = place
    with pytest.raises(ConfigError, match=r"share memory|to share"):
        of_ray._open_group(pid, 3, host or of_ray._host())


def test_messages_that_ray_swaps_are_read_in_order():
    inbox = of_ray._Inbox()
    for number in (2, 0, 1):
        inbox.put(number, bytes([number]))
    assert [inbox.read() for _ in range(3)] == [b"\0", b"\1", b"\2"]


def test_tokens_are_those_of_one_process(cluster):
    from octavo import LLM, SamplingParams

    prompts, params = ["Hello", "A long time ago"], SamplingParams(max_tokens=8, logprobs=2)
    settings = {"max_model_len": 128, "max_num_seqs": 4, "num_threads": 1}
    found = []
    for layout in ({}, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}):
        llm = LLM(BUILTIN_MODEL, **settings, **layout)
        found.append([it.outputs[0] for it in llm.generate(prompts, params)])
        llm.shutdown()
    one, two = ([(it.token_ids, it.logprobs) for it in outputs] for outputs in found)
    assert one == two


class TestStages:
    """Two stages; real workers."""

    PROMPTS = ("Hello", "A long time ago")
    SETTINGS = {"max_model_len": 128, "max_num_seqs": 4, "num_threads": 1}  # noqa: RUF012

    @pytest.fixture
    def groups(self, monkeypatch):
        """Return the groups that executors have started."""
        found, make_memories = [], of_ray._ActorGroup._make_memories
        spy = lambda group: (found.append(group), make_memories(group))[1]  # noqa: E731
        monkeypatch.setattr(of_ray._ActorGroup, "_make_memories", spy)
        return found

    def make(self, **layout):
        from octavo import LLM

        layout |= {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
        return LLM(BUILTIN_MODEL, **self.SETTINGS, **layout)

    def generate(self, llm, num_tokens=16):
        from octavo import SamplingParams

        params = SamplingParams(max_tokens=num_tokens, logprobs=2, ignore_eos=True)
        outputs = [it.outputs[0] for it in llm.generate(self.PROMPTS, params)]
        return [(it.token_ids, it.logprobs) for it in outputs]

    @pytest.fixture(scope="class")
    def expected(self):
        """Return the answers of one process."""
        from octavo import LLM

        llm = LLM(BUILTIN_MODEL, **self.SETTINGS)
        yield self.generate(llm)
        llm.shutdown()

    def test_tokens_are_those_of_one_process(self, cluster, groups, expected):
        llm = self.make()
        try:
            assert len({worker.place.node_id for worker in groups[0].workers}) == 2
            assert self.generate(llm) == expected
        finally:
            llm.shutdown()
        assert gone([worker.pid for worker in groups[0].workers])

    def test_both_stages_on_one_node(self, cluster, groups, expected):
        """Each stage has two workers, for which the other two nodes are too small."""
        large = cluster.add_node(num_cpus=4, object_store_memory=80 * 2**20)
        try:
            llm = self.make(tensor_parallel_size=2)
            try:
                assert len(groups[0].workers) == 4
                assert len({worker.place.node_id for worker in groups[0].workers}) == 1
                assert self.generate(llm) == expected
            finally:
                llm.shutdown()
        finally:
            cluster.remove_node(large)

    @pytest.mark.parametrize(("how", "rank"), [("killed", 0), ("broken", 1)])
    def test_a_node_that_fails_ends_the_engine(self, connected, groups, rank, how):
        llm = self.make()
        self.generate(llm)
        worker = groups[0].workers[rank]
        if how == "killed":
            os.kill(worker.pid, signal.SIGKILL)
        else:  # its memory, as for the relay's connection
            worker.handle.tell.remote(10**9, b"")
        with pytest.raises(EngineDeadError, match=r"worker [01] \(pid \d+ on .* (failed|has died)"):
            self.generate(llm, 120)
        assert gone([it.pid for it in groups[0].workers])
        llm.shutdown()
        assert free_cpus() == 2


@pytest.fixture
def short_path():
    """Return a short folder: names of sockets have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="o-", dir="/tmp") as path:
        yield Path(path)


SCRIPT = """
import signal
import threading
import time
from tests.executor.test_ray import make

if __name__ == "__main__":
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    executor = make()
    print(*executor.pids, flush=True)
    while not asked.wait(0.1):
        pass
    time.sleep(3.5)  # after three seconds Ray's handler would have aborted it
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_cluster_of_one_s_own_ends_with_the_process(short_path, how):
    variables = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    variables |= {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(short_path)}
    command = [sys.executable, "-c", SCRIPT]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables, **streams) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        below = psutil.Process(process.pid).children(recursive=True)
        assert {*pids} < {it.pid for it in below}
        process.send_signal(how)
        told = process.communicate(timeout=100)[1]
        assert process.returncode == (0 if how == signal.SIGTERM else -how), told
        assert "SIGTERM" not in told
    assert len(pids) == 2
    assert gone([it.pid for it in below])
    end = time.monotonic() + 60
    while (left := list(short_path.iterdir())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left, "its folder, too"
