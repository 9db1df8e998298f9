"""Transfer of copies of blocks between engines through shared memory or TCP.

Each rank that keeps copies listens at a port for clients with the cluster's key. CurveZMQ uses a
key pair derived from that key; the handshake needs the public half, which is never sent. An engine
on the same host opens the memory itself, through the file descriptor of the owning process; the
system allows this only to the same user.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from zmq.utils import z85

from octavo.errors import ConfigError
from octavo.kv_connector.layout import KVLayout, KVPart
from octavo.kv_connector.pages import BlockCopy, Bytes, KVCaches

logger = logging.getLogger(__name__)

_HEADER = mmap.PAGESIZE
_NONCE_NBYTES = 16
_GET, _HAVE = b"g", b"h"
_NUMBER = struct.Struct("<Q")
# Blocks in a message, messages in flight, and seconds until a block is requested again: the
# connection may have been replaced meanwhile.
_BATCH, _IN_FLIGHT, _AGAIN_SECONDS = 4, 4, 2.0
_POLL_MILLISECONDS = 100
_LINGER = 1000
"""Milliseconds to wait for the reply to `tell`."""
_MAX_REQUEST = 2**16
_F_ADD_SEALS, _F_GET_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1034, 2, 4

Block = tuple[int, int, int, bytes]
"""(group, block, slot at the peer, hash)"""


class PeerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address of a rank's copies."""

    host: str
    port: int
    machine: str
    """Identity of the machine and its boot. The next three fields locate the memory on it."""
    pid: int
    descriptor: int
    nonce: str
    """First bytes of the memory, in hex."""
    part: KVPart
    """Part of a block that is in the copies."""
    states: str = ""
    """`KVLayout.state_division`."""


class SharedCopies:
    """Memory for copies, which other processes of the same user can open.

    It has no name in the system. The system frees it when the last process has closed it.

    Args:
        nbytes: bytes of all copies.
    """

    def __init__(self, nbytes: int) -> None:
        if sys.platform != "linux":
            raise ConfigError("P2PConnector works on Linux only.")
        self.nonce = secrets.token_bytes(_NONCE_NBYTES)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self.descriptor = os.memfd_create("octavo-kv", flags)
        os.ftruncate(self.descriptor, _HEADER + nbytes)
        # A process that maps the memory can rely on its size.
        fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
        memory = mmap.mmap(self.descriptor, _HEADER + nbytes)
        memory[:_NONCE_NBYTES] = self.nonce
        self.copies: Bytes = np.frombuffer(memory, np.uint8)[_HEADER:]

    def close(self) -> None:
        """Close the descriptor: no process can open the memory from now on. May be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class PeerServer:
    """Server of copies, on its own thread.

    Args:
        host: name or address to listen on.
        port: TCP port; 0: any free port.
        secret: key of `cluster_secret`.
        layout: layout of the copies.
        shared: memory of the copies.
        on_have: callback for each request whose blocks have been fetched.

    Raises:
        ConfigError: the server cannot listen at the address.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        layout: KVLayout,
        shared: SharedCopies,
        on_have: Callable[[str], object],
    ) -> None:
        self._copies, self._size, self._on_have = shared.copies, layout.copy_nbytes, on_have
        self._context = zmq.Context()
        self._socket = socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey = z85.encode(secret)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST)
        socket.setsockopt(zmq.LINGER, 0)
        # A client that does not read its replies receives no more; the others do not wait for it.
        socket.setsockopt(zmq.SNDHWM, 2 * _IN_FLIGHT)
        socket.setsockopt(zmq.IPV6, 1)
        where = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            socket.bind(f"{where}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_transfer_config: host={host!r}, port={port}: cannot listen there "
                f"({error.strerror}); choose an address of this machine and a free port."
            ) from None
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self.address = PeerAddress(
            host=host,
            port=int(endpoint.decode().rpartition(":")[2].rstrip("\0")),
            machine=_this_machine(),
            pid=os.getpid(),
            descriptor=shared.descriptor,
            nonce=shared.nonce.hex(),
            part=layout.part,
            states=layout.state_division,
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="octavo-kv-peers", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(_POLL_MILLISECONDS):
                continue
            peer, *frames = self._socket.recv_multipart()
            try:
                self._answer(peer, frames)
            except (ValueError, msgspec.MsgspecError, struct.error) as error:
                logger.warning("a peer has sent an invalid request for KV blocks: %s", error)
            except zmq.ZMQError:
                pass  # the peer is gone or does not read; it will send the request again

    def _answer(self, peer: bytes, frames: list[bytes]) -> None:
        match frames:
            case [kind, text] if kind == _HAVE:
                self._on_have(text.decode())
                self._socket.send_multipart([peer, _HAVE], zmq.DONTWAIT)
            case [kind, number, packed] if kind == _GET:
                _NUMBER.unpack(number)
                slots = msgspec.msgpack.decode(packed, type=list[int])
                if len(slots) > _BATCH:
                    raise ValueError(f"{len(slots)} blocks at once")
                copies = [self._copy_at(slot) for slot in slots]
                self._socket.send_multipart([peer, number, *copies], zmq.DONTWAIT)
            case _:
                raise ValueError(f"{len(frames)} parts")

    def _copy_at(self, slot: int) -> bytes:
        begin = slot * self._size
        if slot < 0 or begin + self._size > len(self._copies):
            raise ValueError(f"slot {slot} does not exist")
        return self._copies[begin : begin + self._size].tobytes()

    def close(self) -> None:
        """Stop the thread. May be called twice."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)


class PeerClient:
    """Client that fetches copies from peers.

    Args:
        secret: key of `cluster_secret`.
        kv_caches: destination of the blocks.
        timeout: seconds for the blocks of a request.
    """

    def __init__(self, secret: bytes, kv_caches: KVCaches, timeout: float) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._secret, self._kv_caches, self._timeout = secret, kv_caches, timeout
        self._layout = kv_caches.layout

    def fetch(
        self, peers: Sequence[PeerAddress], blocks: Sequence[Block], since: float
    ) -> set[int]:
        """Copy blocks to the KV cache; return the damaged ones.

        Args:
            peers: ranks that have the blocks; their division of the model may differ from this
                engine's if it has no recurrent states.
            blocks: blocks, and pieces of states, to fetch.
            since: time of the request, by `time.monotonic`; the timeout starts there.

        Raises:
            OSError: a peer is unreachable or too slow, or the peers lack a part of the blocks.
        """
        missing, end = self._layout.part.cells(), since + self._timeout
        pieces = [block for block in blocks if block[0] >= len(self._layout.groups)]
        blocks = [block for block in blocks if block[0] < len(self._layout.groups)]
        damaged: set[int] = set()
        for peer in peers:
            found = peer.part.cells() & missing
            if found:
                damaged |= self._fetch_part(peer, blocks, end)
                missing -= found
        if missing:
            raise OSError("the peers do not have all layers and heads")
        if pieces:
            damaged |= self._fetch_part(peers[self._layout.rank], pieces, end)
        return damaged

    def _fetch_part(self, peer: PeerAddress, blocks: Sequence[Block], end: float) -> set[int]:
        memory = _open(peer)
        if memory is None:
            return self._receive(peer, blocks, end)
        with contextlib.closing(memory):
            num_slots = (len(memory) - _HEADER) // peer.part.copy_nbytes
            if any(not 0 <= slot < num_slots for _, _, slot, _ in blocks):
                raise OSError("the peer does not have these blocks")
            copies = np.frombuffer(memory, np.uint8)[_HEADER:]
            try:
                return self._copy(copies, peer.part, blocks)
            finally:
                del copies  # it must not outlive the mapping

    def _copy(self, copies: Bytes, part: KVPart, blocks: Sequence[Block]) -> set[int]:
        start, size = int(copies.ctypes.data), part.copy_nbytes
        return self._kv_caches.load(
            [
                BlockCopy(group_id, block_id, start + slot * size, block_hash)
                for group_id, block_id, slot, block_hash in blocks
            ],
            part,
        )

    def _receive(self, peer: PeerAddress, blocks: Sequence[Block], end: float) -> set[int]:
        """Fetch blocks over TCP; request those that do not arrive again."""
        batches = [blocks[i : i + _BATCH] for i in range(0, len(blocks), _BATCH)]
        waiting, asked = list(range(len(batches)))[::-1], dict[int, float]()
        damaged: set[int] = set()
        with self._connect(peer) as socket:
            while waiting or asked:
                now = time.monotonic()
                if now >= end:
                    raise OSError(f"the blocks have not arrived within {self._timeout:g} s")
                for number in [n for n, since in asked.items() if now - since > _AGAIN_SECONDS]:
                    del asked[number]
                    waiting.append(number)
                while waiting and len(asked) < _IN_FLIGHT:
                    number = waiting.pop()
                    asked[number] = now
                    slots = [slot for _, _, slot, _ in batches[number]]
                    packed = msgspec.msgpack.encode(slots)
                    socket.send_multipart([_GET, _NUMBER.pack(number), packed])
                if not socket.poll(_POLL_MILLISECONDS):
                    continue
                head, *copies = socket.recv_multipart()
                number = _NUMBER.unpack(head)[0] if len(head) == _NUMBER.size else -1
                if asked.pop(number, None) is None:
                    continue  # a duplicate
                batch = batches[number]
                if [len(copy) for copy in copies] != [peer.part.copy_nbytes] * len(batch):
                    raise OSError("the peer sends blocks of another size")
                arrays = [np.frombuffer(copy, np.uint8) for copy in copies]
                damaged |= self._kv_caches.load(
                    [
                        BlockCopy(group_id, block_id, int(array.ctypes.data), block_hash)
                        for (group_id, block_id, _, block_hash), array in zip(
                            batch, arrays, strict=True
                        )
                    ],
                    peer.part,
                )
        return damaged

    def tell(self, peer: PeerAddress, request_id: str) -> None:
        """Notify a peer that it can release a request's blocks."""
        with self._connect(peer) as socket:
            socket.send_multipart([_HAVE, request_id.encode()])
            socket.poll(_LINGER)

    def _connect(self, peer: PeerAddress) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        key = z85.encode(self._secret)
        socket.curve_secretkey, socket.curve_publickey = key, zmq.curve_public(key)
        socket.curve_serverkey = zmq.curve_public(key)
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * peer.part.copy_nbytes)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        where = f"[{peer.host}]" if ":" in peer.host else peer.host
        socket.connect(f"tcp://{where}:{peer.port}")
        return socket

    def close(self) -> None:
        """Close all connections."""
        self._context.destroy(linger=0)


def _open(peer: PeerAddress) -> mmap.mmap | None:
    """Map a peer's memory; None if this process cannot: another machine, container or user."""
    if peer.machine != _this_machine():
        return None
    path = f"/proc/{peer.pid}/fd/{peer.descriptor}"
    try:
        # In another container the process may be a different one, and the file a pipe without a
        # writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None  # another container, perhaps
    try:
        # Accept only memory that cannot shrink: reading after its end would kill this process.
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
        if not seals & _F_SEAL_SHRINK:
            return None
        memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    if memory[:_NONCE_NBYTES].hex() != peer.nonce:
        memory.close()
        return None
    return memory


def _this_machine() -> str:
    """Return an identity of this machine that changes with each boot."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(text.encode()).hexdigest()[:16]
