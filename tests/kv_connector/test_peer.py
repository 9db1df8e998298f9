"""Copies of a rank, and clients that fetch them, or must not be able to."""

import gc
import os
import socket
import time

import msgspec
import numpy as np
import pytest
import zmq
from zmq.utils import z85

from octavo.errors import ConfigError
from octavo.kv_connector import peer
from octavo.kv_connector.peer import PeerClient, PeerServer, SharedCopies
from octavo.models.cache import AttentionCache
from tests.kv_connector.test_pages import copy_of, make_cache, make_layout

LAYOUT = make_layout([AttentionCache(2, 4)] * 2)
SECRET, OTHER = b"s" * 32, b"o" * 32
SLOTS = 12
HASH = b"h" * 32


@pytest.fixture
def site():
    """Return a server with copies of block 3 in all places, its notifications, and its cache."""
    shared, told = SharedCopies(SLOTS * LAYOUT.copy_nbytes), []
    server = PeerServer("127.0.0.1", 0, SECRET, LAYOUT, shared, told.append)
    tensors, caches = make_cache(LAYOUT)
    for slot in range(SLOTS):
        caches.save([copy_of(LAYOUT, shared.copies, slot)])
    yield server, shared, told, tensors
    server.close()
    server.close()
    shared.close()
    shared.close()


@pytest.fixture
def fetching():
    """Return a factory of clients with a key and a timeout in seconds."""
    clients = []

    def make(secret=SECRET, timeout=60.0):
        tensors, caches = make_cache(LAYOUT, 1)
        clients.append(PeerClient(secret, caches, timeout))
        return clients[-1], tensors

    yield make
    for client in clients:
        client.close()


def far(server):
    """Return its address as seen from another machine."""
    return msgspec.structs.replace(server.address, machine="another")


@pytest.mark.parametrize("where", [lambda server: server.address, far], ids=["memory", "tcp"])
def test_blocks_arrive(site, fetching, where):
    server, _shared, _told, theirs = site
    client, ours = fetching()
    blocks = [(0, i % 7, i, HASH) for i in range(SLOTS)]
    assert client.fetch([where(server)], blocks, time.monotonic()) == set()
    for mine, other in zip(ours, theirs, strict=True):
        assert all((mine[block_id] == other[3]).all() for block_id in range(7))


@pytest.mark.parametrize("where", [lambda server: server.address, far], ids=["memory", "tcp"])
def test_damage_is_told_of_and_so_are_other_blocks(site, fetching, where):
    server, shared, _told, _theirs = site
    shared.copies[LAYOUT.copy_nbytes + 5] ^= 1
    client, _ours = fetching()
    blocks = [(0, 1, 0, HASH), (0, 2, 1, HASH), (0, 4, 2, b"x" * 32)]
    assert client.fetch([where(server)], blocks, time.monotonic()) == {2, 4}


def test_places_that_are_not_there(site, fetching):
    server = site[0]
    client, _ = fetching(timeout=0.3)
    for slot in (-1, SLOTS, 2**62):
        for address in (server.address, far(server)):
            with pytest.raises(OSError, match=r"not have these blocks|not arrived within"):
                client.fetch([address], [(0, 1, slot, HASH)], time.monotonic())


def test_a_peer_that_has_not_all_heads(site, fetching):
    server = site[0]
    client, _ = fetching()
    part = msgspec.structs.replace(server.address.part, layers=[[0]])
    with pytest.raises(OSError, match="not have all layers"):
        client.fetch(
            [msgspec.structs.replace(server.address, part=part)],
            [(0, 1, 0, HASH)],
            time.monotonic(),
        )


def test_who_has_another_key_gets_nothing(site, fetching):
    server, _shared, told, _ = site
    client, _ = fetching(OTHER, 0.4)
    with pytest.raises(OSError, match="not arrived within"):
        client.fetch([far(server)], [(0, 1, 0, HASH)], time.monotonic())
    client.tell(server.address, "request")
    assert not told


def test_word_comes_that_blocks_have_been_fetched(site, fetching):
    server, _shared, told, _ = site
    client, _ = fetching()
    client.tell(server.address, "request")
    assert told == ["request"]


def test_rubbish_stops_nobody(site, fetching):
    server, _shared, told, _ = site
    for data in (b"", b"\0" * 100, os.urandom(2000), b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.address.port)) as plain:
            plain.sendall(data)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as bare:  # without any key
        bare.setsockopt(zmq.LINGER, 0)
        bare.connect(f"tcp://127.0.0.1:{server.address.port}")
        bare.send_multipart([b"h", b"request"])
        assert not bare.poll(200)
    with context.socket(zmq.DEALER) as known:
        key = z85.encode(SECRET)
        known.curve_secretkey, known.curve_publickey = key, zmq.curve_public(key)
        known.curve_serverkey = zmq.curve_public(key)
        known.setsockopt(zmq.LINGER, 0)
        known.connect(f"tcp://127.0.0.1:{server.address.port}")
        number, pack = (1).to_bytes(8, "little"), msgspec.msgpack.encode
        for frames in (
            [b""],
            [b"?", b"x"],
            [b"h", b"\xff\xfe"],
            [b"h", b"a", b"b"],
            [b"g", b"12", pack([0])],
            [b"g", number, b"\xc1"],
            [b"g", number, pack(["a"])],
            [b"g", number, pack([2**63])],
            [b"g", number, pack(list(range(5)))],
            [b"g"] * 100,
        ):
            known.send_multipart(frames)
        known.send_multipart([b"g", number, pack([0])])
        assert known.poll(60_000)
        assert known.recv_multipart()[0] == number  # only the last one is answered
        known.send_multipart([b"g", number, bytes(2**20)])  # too large: it is truncated
        time.sleep(0.1)
    context.destroy(linger=0)
    client, _ = fetching()
    assert client.fetch([far(server)], [(0, 1, 0, HASH)], time.monotonic()) == set()
    assert not told


def test_memory_of_another_process_is_not_taken_for_it(site, fetching, tmp_path):
    server = site[0]
    address = server.address
    assert peer._open(msgspec.structs.replace(address, nonce="00" * 16)) is None
    assert peer._open(msgspec.structs.replace(address, pid=2**22 + 1)) is None
    (tmp_path / "file").write_bytes(bytes(8192))
    os.mkfifo(tmp_path / "fifo")
    pipe = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with (tmp_path / "file").open("rb") as file:
        for descriptor in (file.fileno(), pipe):  # could be shortened; would be waited for
            assert peer._open(msgspec.structs.replace(address, descriptor=descriptor)) is None
    os.close(pipe)


def test_a_peer_that_is_dead_costs_the_timeout(site, fetching):
    server, shared, _told, _ = site
    address = server.address
    server.close()
    shared.close()
    client, _ = fetching(timeout=0.3)
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"within 0\.3 s"):
        client.fetch([address], [(0, 1, 0, HASH)], time.monotonic())
    assert time.monotonic() - begin < 30


def test_the_time_spent_in_a_queue_counts(site, fetching):
    client, _ = fetching()
    begin = time.monotonic()
    with pytest.raises(OSError, match="not arrived within"):
        client.fetch([far(site[0])], [(0, 1, 0, HASH)], begin - 61)
    assert time.monotonic() - begin < 30


def test_nothing_stays_behind():
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        shared = SharedCopies(LAYOUT.copy_nbytes)
        server = PeerServer("127.0.0.1", 0, SECRET, LAYOUT, shared, print)
        client = PeerClient(SECRET, make_cache(LAYOUT, 1)[1], 60.0)
        client.fetch([server.address], [(0, 1, 0, HASH)], time.monotonic())
        client.fetch([far(server)], [(0, 1, 0, HASH)], time.monotonic())
        client.close()
        server.close()
        shared.close()
    del shared, server  # their memory
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_port_that_is_taken(site):
    server, shared, _told, _ = site
    with pytest.raises(ConfigError, match="choose an address of this machine and a free port"):
        PeerServer("127.0.0.1", server.address.port, SECRET, LAYOUT, shared, print)


def test_copies_begin_as_zeros_and_cannot_be_shortened():
    shared = SharedCopies(10_000)
    assert not np.any(shared.copies)
    with pytest.raises(PermissionError):
        os.ftruncate(shared.descriptor, 10)
    shared.close()
