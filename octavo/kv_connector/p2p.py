"""`P2PConnector`: an engine goes on with a prompt that another one has computed.

The first one keeps the prompt's blocks in memory (as `OffloadingConnector` does) until the other
one has them, or does not come in time. What it answers with (`kv_transfer_params`, as in vLLM) says
where they are, signed with the cluster's key; who gets it with a request fetches the blocks. On the
same host they are copied straight out of the other engine's memory; from elsewhere they come over
TCP, encrypted (CurveZMQ). Blocks that do not come, or not as they should be, are computed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from octavo.config import KVTransferConfig
from octavo.errors import ConfigError, RequestError
from octavo.kv_cache.block_pool import NULL_BLOCK_ID
from octavo.kv_connector.cluster_secret import cluster_secret
from octavo.kv_connector.image_cache import Key
from octavo.kv_connector.layout import KVLayout
from octavo.kv_connector.offload import (
    OffloadingConnector,
    OffloadingMetadata,
    OffloadingScheduler,
    OffloadingSettings,
    OffloadingWorker,
)
from octavo.kv_connector.pages import KVCaches
from octavo.kv_connector.peer import PeerAddress, PeerClient, PeerServer, SharedImages
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.request import Request

logger = logging.getLogger(__name__)

_NO_SLOT = -1
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Seconds = Annotated[float, Meta(gt=0, le=86400)]


class P2PSettings(OffloadingSettings, frozen=True, kw_only=True):
    """`kv_connector_extra_config`, beside that of `OffloadingConnector`."""

    host: str = "127.0.0.1"
    """Address of this machine at which others fetch blocks."""
    port: _Port = 0
    """Port of rank 0; rank i has the i-th one after it. 0: any that are free."""
    release_timeout: _Seconds = 120.0
    """Seconds for which a prompt's blocks are kept for who is to fetch them."""
    load_timeout: _Seconds = 20.0
    """Seconds after which blocks that have not come are computed."""


class Fetch(msgspec.Struct, array_like=True):
    """Blocks to be fetched from a peer."""

    request_id: str
    """What the peer calls the request."""
    peers: list[PeerAddress]
    """Of each rank."""
    blocks: list[tuple[int, int, int, bytes]]
    """(group, block, place at the peer, hash)"""


class P2PMetadata(OffloadingMetadata):
    """What workers do with a step."""

    fetches: dict[str, Fetch] = msgspec.field(default_factory=dict)
    fetched: list[tuple[str, list[PeerAddress]]] = msgspec.field(default_factory=list)
    """What all ranks have: to be told to those who keep it."""


class _Handed(msgspec.Struct):
    """A prompt's blocks that wait for a peer."""

    keys: list[Key]
    until: float


class _Offer(msgspec.Struct, forbid_unknown_fields=True):
    """`kv_transfer_params`; the first ones as vLLM calls them."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str = ""
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[list[int]] = []
    """Of each KV-cache group: the places of the prompt's blocks; -1: it is not there."""
    remote_layout: str = ""
    """`KVLayout.identity` in hex."""
    remote_peers: list[PeerAddress] = []
    signature: str = ""
    tp_size: int | None = None

    def sign(self, secret: bytes) -> str:
        """What `signature` has to be."""
        fields = msgspec.to_builtins(msgspec.structs.replace(self, signature=""))
        text = json.dumps(fields, sort_keys=True).encode()
        return hmac.new(secret, b"kv_transfer_params\0" + text, hashlib.sha256).hexdigest()


def read_offer(request: Request) -> _Offer | None:
    """A request's `kv_transfer_params`.

    Raises:
        RequestError: they are not such.
    """
    if request.options.kv_transfer_params is None:
        return None
    try:
        return msgspec.convert(request.options.kv_transfer_params, _Offer)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"kv_transfer_params: {error}. Send what the prefill server has answered, as it is.",
            "kv_transfer_params",
        ) from None


class P2PConnector(OffloadingConnector):
    """See the module."""

    metadata_type = P2PMetadata

    def _make_scheduler(self) -> P2PScheduler:
        settings = _read_settings(self.transfer_config)
        return P2PScheduler(self.transfer_config, settings, self.layout, self._secret())

    def _make_worker(self) -> P2PWorker:
        settings = _read_settings(self.transfer_config)
        secret, transfer = self._secret(), self.transfer_config
        return P2PWorker(transfer, settings, self.layout, self._notify, secret)

    def _secret(self) -> bytes:
        return cluster_secret(self.config.parallel.cluster_key_file)

    @classmethod
    def host_nbytes(cls, config: KVTransferConfig) -> int:
        """See `KVConnectorBase`."""
        return _read_settings(config).cpu_bytes_to_use

    @property
    def _p2p(self) -> P2PScheduler:
        assert isinstance(self._half, P2PScheduler)
        return self._half

    @property
    def num_expired(self) -> int:
        """See `KVConnectorBase`."""
        return self._p2p.num_expired

    def set_xfer_handshake_metadata(self, metadata: list[Any]) -> None:
        """See `KVConnectorBase`."""
        self._p2p.peers = [msgspec.convert(it, PeerAddress) for it in metadata]

    def check_request(self, request: Request) -> None:
        """See `KVConnectorBase`."""
        self._p2p.check(request)

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """See `KVConnectorBase`."""
        return self._p2p.hand_over(request)

    def get_handshake_metadata(self) -> Any:
        """See `KVConnectorBase`."""
        assert isinstance(self._half, P2PWorker)
        return msgspec.to_builtins(self._half.address)

    def get_finished(self) -> tuple[set[str], set[str]]:
        """See `KVConnectorBase`."""
        assert isinstance(self._half, P2PWorker)
        return self._half.take_fetched(), self._half.loaded.take_finished()


class P2PScheduler(OffloadingScheduler):
    """Keeps blocks for peers, and has blocks fetched from them."""

    def __init__(
        self, config: KVTransferConfig, settings: P2PSettings, layout: KVLayout, secret: bytes
    ) -> None:
        super().__init__(config, settings, layout)
        self.peers: list[PeerAddress] = []
        self.num_expired = 0
        """Prompts whose blocks nobody has fetched in time."""
        self._settings, self._secret = settings, secret
        self._handed: dict[str, _Handed] = {}
        """In the order in which they were handed over."""
        self._fetches: dict[str, Fetch] = {}
        """To be told to the workers."""
        self._fetching: dict[str, Fetch] = {}
        self._fetched: list[Fetch] = []
        self._offers: dict[str, _Offer] = {}
        """Of requests that are asked about, or loaded."""

    def check(self, request: Request) -> None:
        """See `KVConnectorBase.check_request`."""
        offer = read_offer(request)
        if offer is None:
            return
        if offer.do_remote_prefill and not hmac.compare_digest(
            offer.signature, offer.sign(self._secret)
        ):
            raise RequestError(
                "kv_transfer_params are not signed with this server's key; send what the prefill "
                "server has answered, as it is, and give both servers the same "
                "--cluster-key-file.",
                "kv_transfer_params",
            )

    def _saves_all(self, request: Request) -> bool:
        params = request.options.kv_transfer_params
        return params is not None and bool(params.get("do_remote_decode"))

    def hand_over(self, request: Request) -> dict[str, Any] | None:
        """Keeps a prompt's blocks for whoever is told of them now."""
        if not self._saves_all(request) or not self._config.saves:
            return None
        size = self._layout.block_size
        hashes = request.block_hashes[: request.num_prompt_tokens // size]
        places = [
            [self._place((group_id, h)) for h in hashes]
            for group_id in range(len(self._layout.groups))
        ]
        keys = [
            (group_id, h)
            for group_id, slots in enumerate(places)
            for h, slot in zip(hashes, slots, strict=True)
            if slot != _NO_SLOT
        ]
        for key in keys:
            self._memory.pin(key)
        self._expire()
        until = time.monotonic() + self._settings.release_timeout
        self._end_handing(request.request_id)
        self._handed[request.request_id] = _Handed(keys, until)
        offer = _Offer(
            do_remote_prefill=True,
            remote_engine_id=self._config.engine_id,
            remote_request_id=request.request_id,
            remote_host=self._settings.host,
            remote_port=self.peers[0].port,
            remote_block_ids=places,
            remote_layout=self._layout.identity.hex(),
            remote_peers=self.peers,
        )
        offer.signature = offer.sign(self._secret)
        found: dict[str, Any] = msgspec.to_builtins(offer)
        return found

    def _place(self, key: Key) -> int:
        return self._memory.slot(key) if key in self._memory and key not in self._unsure else -1

    def _end_handing(self, request_id: str) -> None:
        handed = self._handed.pop(request_id, None)
        for key in handed.keys if handed is not None else ():
            self._memory.unpin(key)

    def _expire(self) -> None:
        """Lets go of what nobody has fetched."""
        now = time.monotonic()
        for request_id in [i for i, handed in self._handed.items() if handed.until <= now]:
            self.num_expired += 1
            logger.warning("nobody has fetched the KV blocks of request %s in time", request_id)
            self._end_handing(request_id)

    def match(self, request: Request, num_computed_tokens: int) -> int:
        """Tokens that a peer has, or else that are in memory here."""
        here = super().match(request, num_computed_tokens)
        offer = read_offer(request)
        if offer is None or not offer.do_remote_prefill or not self._config.loads:
            return here
        there = self._match_offer(request, offer, num_computed_tokens)
        if there <= here:
            return here
        self._offers[request.request_id] = offer
        return there

    def _match_offer(self, request: Request, offer: _Offer, num_computed_tokens: int) -> int:
        layout = self._layout
        if offer.remote_layout != layout.identity.hex():
            logger.warning(
                "engine %s computes another model, or otherwise: its KV blocks are computed again",
                offer.remote_engine_id,
            )
            return 0
        size, places = layout.block_size, offer.remote_block_ids
        begin = num_computed_tokens // size
        end = min([len(request.block_hashes), *map(len, places)], default=0)
        while end > begin:
            position = min(end * size, request.num_tokens - 1)
            missing = [
                i
                for manager, slots in zip(layout.managers, places, strict=True)
                for i in range(max(begin, manager.first_needed_block(position)), end)
                if slots[i] < 0
            ]
            if not missing:
                return (end - begin) * size
            end = max(missing)
        return 0

    def allocated(self, request: Request, block_ids: list[list[int]], num_tokens: int) -> None:
        """Has blocks fetched or loaded, or follows a request that is started."""
        offer = self._offers.pop(request.request_id, None)
        if num_tokens == 0 and request.num_external_tokens is None:
            self._decline(request)
        if offer is None or num_tokens == 0:
            super().allocated(request, block_ids, num_tokens)
            return
        blocks = [
            (group_id, ids[i], offer.remote_block_ids[group_id][i], request.block_hashes[i])
            for group_id, ids in enumerate(block_ids)
            for i in range(len(ids) - num_tokens // self._layout.block_size, len(ids))
            if ids[i] != NULL_BLOCK_ID
        ]
        fetch = Fetch(offer.remote_request_id, offer.remote_peers, blocks)
        self._loads[request.request_id] = []
        self._fetches[request.request_id] = self._fetching[request.request_id] = fetch

    def _decline(self, request: Request) -> None:
        """Has a peer told that nothing of what it keeps is wanted: all of it was here."""
        offer = read_offer(request)
        if offer is not None and offer.do_remote_prefill:
            self._fetched.append(Fetch(offer.remote_request_id, offer.remote_peers, []))

    def build(self, step: SchedulerOutput) -> P2PMetadata | None:
        """What a step saves, and what is loaded and fetched beside it."""
        if self._handed:
            self._expire()
        found = super().build(step)
        fetches, self._fetches = self._fetches, {}
        fetched, self._fetched = self._fetched, []
        if found is None and not fetches and not fetched:
            return None
        found = found or OffloadingMetadata(self._epoch)
        told = [(fetch.request_id, fetch.peers) for fetch in fetched]
        return P2PMetadata(found.epoch, found.saves, found.loads, fetches, told)

    def finished(self, output: KVConnectorOutput) -> None:
        """Lets go of what was fetched by others, or loaded here."""
        for request_id in output.finished_sending:
            self._end_handing(request_id)
        for request_id in output.finished_recving:
            if request_id in self._fetching:
                self._fetched.append(self._fetching.pop(request_id))
        super().finished(output)


class P2PWorker(OffloadingWorker):
    """Lets peers fetch blocks, and fetches theirs."""

    def __init__(
        self,
        config: KVTransferConfig,
        settings: P2PSettings,
        layout: KVLayout,
        notify: Callable[[], object],
        secret: bytes,
    ) -> None:
        num_slots, _ = settings.num_slots(layout)
        self._shared = SharedImages(num_slots * layout.image_nbytes)
        super().__init__(config, settings, layout, notify, memory=self._shared.images)
        self._lock = threading.Lock()
        """Of what follows."""
        self._fetched: set[str] = set()
        self._notify = notify
        self._timeout, self._secret, self._layout = settings.load_timeout, secret, layout
        self._client: PeerClient | None = None
        self._fetchers = ThreadPoolExecutor(4, "octavo-kv-fetches")
        port = settings.port and settings.port + layout.rank
        self._server = PeerServer(
            *(settings.host, port, secret, layout, self._shared), self._peer_has
        )
        self.address = self._server.address

    def register(self, kv_caches: KVCaches) -> None:
        """See `OffloadingWorker`."""
        super().register(kv_caches)
        self._client = PeerClient(self._secret, kv_caches, self._timeout)

    def _peer_has(self, request_id: str) -> None:
        """A peer has fetched what was kept for it."""
        with self._lock:
            self._fetched.add(request_id)
        self._notify()

    def take_fetched(self) -> set[str]:
        """Requests whose blocks need not be kept any more."""
        with self._lock:
            fetched, self._fetched = self._fetched, set()
        return fetched

    def begin(self, metadata: OffloadingMetadata) -> None:
        """Begins to load and to fetch."""
        super().begin(metadata)
        assert isinstance(metadata, P2PMetadata)
        for req_id, wanted in metadata.fetches.items():
            blocks = {block_id for _, block_id, _, _ in wanted.blocks}
            fetch = partial(self._fetch, wanted, blocks, time.monotonic())
            self._fetchers.submit(self.loaded.run, req_id, blocks, fetch)
        if self._layout.rank == 0:
            for request_id, peers in metadata.fetched:
                self._fetchers.submit(self._tell, request_id, peers)

    def _tell(self, request_id: str, peers: list[PeerAddress]) -> None:
        assert self._client is not None
        for peer in peers:
            self._client.tell(peer, request_id)

    def _fetch(self, wanted: Fetch, blocks: set[int], since: float) -> set[int]:
        assert self._client is not None
        try:
            return self._client.fetch(wanted.peers, wanted.blocks, since)
        except Exception as error:
            hosts = ", ".join(sorted({peer.host for peer in wanted.peers}))
            logger.warning("KV blocks cannot be fetched from %s: %s", hosts, error)
            return blocks

    def shutdown(self) -> None:
        """Fetches nothing more, and lets nobody fetch."""
        self._fetchers.shutdown(cancel_futures=True)
        self._server.close()
        if self._client is not None:
            self._client.close()
        super().shutdown()
        self._shared.close()


def _read_settings(config: KVTransferConfig) -> P2PSettings:
    found = P2PSettings.of(config)
    assert isinstance(found, P2PSettings)
    if found.host in ("0.0.0.0", "::", "*"):
        raise ConfigError(
            f"kv_transfer_config: host={found.host!r} is no address that others could connect to; "
            "name one of this machine."
        )
    return found
