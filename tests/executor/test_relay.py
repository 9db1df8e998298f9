"""Two memories of one group: data written to one appears in the other, until a host is lost."""

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import zmq

from octavo import LLM, SamplingParams, _native
from octavo.config import BUILTIN_MODEL
from octavo.errors import EngineDeadError
from octavo.executor import relay as of_relay
from octavo.executor.relay import Relay, RelayKey, Stream, find_streams
from octavo.layers.step_table import StepSize
from octavo.plan.group_layout import GroupLayout
from octavo.system.distributed import GroupMemory, Rank
from octavo.system.tensor import from_numpy, zeros
from octavo.worker.group import _Channel
from octavo.worker.token_broadcast import TokenBroadcast
from tests.models.cases import CASES
from tests.models.harness import make_hf
from tests.ranks import RanksExecutor, use_ranks

ANY = "tcp://127.0.0.1:*"
HIDDEN = 12
LAYOUT = GroupLayout(StepSize(8, 4, 6), 5, 3, Rank(0, 1, 0, 2), 2 * 4 * HIDDEN, [0, 0])


def make_key():
    return RelayKey(*zmq.curve_keypair())


@dataclass
class Host:
    """Host, one of two, with one of two stages."""

    number: int
    key: RelayKey
    descriptor: int = field(default_factory=lambda: GroupMemory.create(LAYOUT.nbytes, 2))
    failures: list[EngineDeadError] = field(default_factory=list)

    def __post_init__(self):
        self.memory = self.open()
        streams = find_streams(LAYOUT, [0, 1])
        failed = self.failures.append
        self.relay = Relay(self.open(), streams, self.number, self.key, ANY, failed)
        self.broadcast = TokenBroadcast(self.memory, LAYOUT)
        self.channel = _Channel(self.memory, LAYOUT, 0, 0)

    def open(self):
        return GroupMemory(self.descriptor, LAYOUT.nbytes, Rank(0, 1, self.number, 2))

    def wait_until_broken(self):
        end = time.monotonic() + 60
        while not self.failures and time.monotonic() < end:
            time.sleep(0.01)
        assert self.memory.broken
        return str(self.failures[0])


def connect(hosts):
    """Connect both at once; return their errors."""
    errors = []

    def run(host, other):
        try:
            host.relay.connect({other.number: (f"h{other.number}", other.relay.address)})
        except EngineDeadError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=pair) for pair in (hosts, hosts[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@contextlib.contextmanager
def made(*keys):
    hosts = [Host(number, key) for number, key in enumerate(keys)]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.relay.close()
            os.close(host.descriptor)


def held():
    """Return descriptors and threads, except those of memory, which ends with its last view."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum("memfd:" not in link for link in links), threading.active_count()


@pytest.fixture
def hosts():
    before = held()
    key = make_key()
    with made(key, key) as hosts:
        assert connect(hosts) == []
        yield hosts
    assert held() == before


def test_what_a_stage_hands_on_crosses_and_no_more_than_that(hosts):
    first, second = hosts
    steps = np.random.default_rng(1).normal(size=(50, 2, 8, HIDDEN)).astype(np.float32)
    rows = [1 + i % 8 for i in range(50)]
    sent = []
    send = first.relay.send
    first.relay.send = lambda *args: (sent.append(args[3].nbytes), send(*args))

    def run():
        for (x, residual), n in zip(steps, rows, strict=True):
            first.channel.send((from_numpy(x), from_numpy(residual)), n, {})

    thread = threading.Thread(target=run)
    thread.start()
    into = [zeros(8, HIDDEN, dtype="float32") for _ in range(2)]
    for step, n in zip(steps, rows, strict=True):
        assert second.channel.receive(into, n) == {}
        for got, expected in zip(into, step, strict=True):
            assert (got.numpy()[:n] == expected[:n]).all()
    thread.join(60)
    assert [size - 64 for size in sent] == [2 * 4 * HIDDEN * n for n in rows]


def test_errors_cross_as_far_as_there_is_room(hosts):
    first, second = hosts
    x, into = from_numpy(np.ones((8, HIDDEN), np.float32)), zeros(8, HIDDEN, dtype="float32")
    many = {str(i): f"{i} " + 1000 * "é" for i in range(9)}
    for errors, rows in (({"a": "bad", "b": "worse"}, 8), (many, 8), ({}, 3)):
        first.channel.send((x, None), rows, errors)
        found = second.channel.receive((into, None), rows)
        assert found == {name: errors[name][:500] for name in found}
        assert [*found] == [*errors][: len(found)]
        assert len(found) == min(len(errors), 4)
        assert (into.numpy() == 1).all()


def test_who_sends_waits_for_who_takes(hosts):
    first, second = hosts
    x = np.zeros((8, HIDDEN), np.float32)
    thread = threading.Thread(
        target=lambda: [first.channel.send((from_numpy(x + i), None), 8, {}) for i in (1, 2, 3)]
    )
    thread.start()
    thread.join(0.3)
    assert thread.is_alive(), "two steps ahead is as far as it may be"
    into = zeros(8, HIDDEN, dtype="float32")
    for i in (1, 2, 3):
        second.channel.receive((into, None), 8)
        assert (into.numpy() == x + i).all()
    thread.join(60)
    assert not thread.is_alive()


def test_tokens_go_back_and_drafts_go_forth(hosts):
    first, second = hosts
    for step in range(1, 30):
        drafts = {"b": [step, 2]} if step % 2 else {}
        first.broadcast.post_drafts(step, ["a", "b"], drafts)
        assert second.broadcast.read_drafts(step, ["a", "b"]) == drafts
        if step % 3:  # not every step samples
            second.broadcast.post_tokens(step, np.array([step, 5, 6]), np.array([1, 2]))
            tokens, kept = first.broadcast.read_tokens(step, 2)
            assert (tokens.tolist(), kept.tolist()) == ([step, 5, 6], [1, 2])


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_lost_ends_the_waiting_on_the_other(hosts, lost):
    errors = []

    def wait():
        with pytest.raises(_native.GroupError):
            (hosts[0].broadcast.read_tokens if lost else hosts[1].broadcast.read_drafts)(
                1, 1 if lost else [""]
            )
        errors.append(1)

    thread = threading.Thread(target=wait)
    thread.start()
    hosts[lost].relay.close()
    assert f"the host h{lost}" in hosts[1 - lost].wait_until_broken()
    thread.join(60)
    assert errors
    assert hosts[lost].failures == [], "who closes has not failed"


def test_a_process_that_fails_breaks_the_group_on_all_hosts(hosts):
    GroupMemory.end(hosts[1].descriptor, 2)
    assert "on this host failed" in hosts[1].wait_until_broken()
    hosts[1].relay.close()  # as its executor then does
    assert "the host h1" in hosts[0].wait_until_broken()


def test_strangers_break_nothing(hosts):
    first, second = hosts
    port = first.relay.address.rpartition(":")[2]
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(200))
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.connect(first.relay.address)
    push.send_multipart([bytes(16), b""])
    time.sleep(0.3)
    context.destroy(linger=0)
    second.broadcast.post_tokens(1, np.array([7]), np.array([1]))
    assert first.broadcast.read_tokens(1, 1)[0].tolist() == [7]
    assert first.failures == second.failures == []


def test_what_is_not_the_next_step_is_no_step(hosts):
    first, second = hosts
    second.relay.send(0, 0, 2, np.zeros(8, np.uint8))
    assert "the host h1 sent step 2 of stream 0" in first.wait_until_broken()


def test_another_key_reaches_nobody(monkeypatch):
    monkeypatch.setattr(of_relay, "CONNECT_SECONDS", 0.5)
    with made(make_key(), make_key()) as hosts:
        errors = connect(hosts)
        assert len(errors) == 2
        assert all("cannot be reached at tcp://" in error for error in errors)


def test_streams_lead_from_who_writes_to_who_reads():
    layout = GroupLayout(StepSize(8, 4, 6), 5, 3, Rank(0, 2, 0, 3), 8, [0, 0, 0])
    assert find_streams(layout, [0, 0, 0]) == []
    streams = find_streams(layout, [0, 0, 1])  # the first two are on one host
    ways = [(stream.source, stream.target, stream.has_head) for stream in streams]
    assert ways == [(1, 0, False), (0, 1, False)] + 2 * [(0, 1, True), (1, 0, False)]
    assert Stream(1, 0, layout.handed(1, 1) + 128) in streams
    ends = {stream.target for stream in find_streams(layout, [0, 1, 2]) if stream.source == 2}
    assert ends == {0, 1}, "the tokens go to all, what was taken to the one before"


class HostsExecutor(RanksExecutor):
    """Executor with a separate memory for each stage, as on separate hosts."""

    def open_memories(self, setup):
        stages = setup.rank.num_stages
        hosts, key = range(stages), make_key()
        streams = find_streams(setup.group_layout, hosts)
        descriptors = [GroupMemory.create(setup.group_nbytes, stages) for _ in hosts]
        self.failures, self.relays = [], []
        for host, descriptor in enumerate(descriptors):
            rank = replace(setup.rank, stage=host)
            memory = GroupMemory(descriptor, setup.group_nbytes, rank)
            self.relays.append(Relay(memory, streams, host, key, ANY, self.failures.append))
        addresses = {host: (f"h{host}", relay.address) for host, relay in enumerate(self.relays)}
        threads = [
            threading.Thread(
                target=relay.connect, args=[{k: v for k, v in addresses.items() if k != host}]
            )
            for host, relay in enumerate(self.relays)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return descriptors

    def shutdown(self):
        assert self.failures == []
        for relay in self.relays:
            relay.close()
        super().shutdown()


@pytest.mark.parametrize(
    ("size", "stages", "settings"),
    [
        (1, 2, {"async_scheduling": True}),
        (2, 2, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        (1, 3, {"async_scheduling": False}),
    ],
)
def test_stages_on_hosts_of_their_own_have_the_bits_of_one_process(
    monkeypatch, size, stages, settings
):
    prompts = ["Hello", "A long time ago, a long time ago, a long", "One two one two one"]
    params = SamplingParams(max_tokens=16, logprobs=2, ignore_eos=True)
    found = []
    for several in (False, True):
        if several:
            use_ranks(monkeypatch, size, stages, executor=HostsExecutor)
        llm = LLM(BUILTIN_MODEL, max_model_len=128, max_num_seqs=4, num_threads=1, **settings)
        outputs = [it.outputs[0] for it in llm.generate(prompts, params)]
        found.append([(it.token_ids, it.logprobs) for it in outputs])
        llm.shutdown()
    assert found[0] == found[1]


@pytest.mark.parametrize("executor", [RanksExecutor, HostsExecutor])
def test_each_stage_divides_the_experts_of_its_layers(monkeypatch, executor, tmp_path):
    """Among the processes of its host, whether the stages share a host or not."""
    architecture, config = CASES["qwen3-moe"]
    make_hf(architecture, **config).save_pretrained(tmp_path)
    prompts = [{"prompt_token_ids": [seed, 3, 7 * seed, 1]} for seed in range(1, 6)]
    params = SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True)
    found = []
    for several in (False, True):
        if several:
            use_ranks(monkeypatch, 2, 2, splits_experts=True, executor=executor)
        settings = {"max_model_len": 32, "num_threads": 1, "skip_tokenizer_init": True}
        llm = LLM(str(tmp_path), **settings)
        outputs = [it.outputs[0] for it in llm.generate(prompts, params)]
        found.append([(it.token_ids, it.logprobs) for it in outputs])
        llm.shutdown()
    assert found[0] == found[1]
