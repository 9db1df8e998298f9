"""`P2PConnector`: one engine computes a prompt, another engine generates its answer.

The first engine keeps the prompt's blocks in memory (as `OffloadingConnector` does) until the
second one has fetched them, or until a timeout. Its answer contains their addresses
(`kv_transfer_params`, as in vLLM), signed with the cluster's key; an engine that receives these
with a request fetches the blocks: on the same host from the first engine's memory, otherwise over
TCP, encrypted (CurveZMQ). The engine computes blocks that do not arrive or are damaged. Models with
recurrent states hand over the last state of the prompt that the first engine has kept, too.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.kv_connector.base import (
    KVConnector,
    KVConnectorMetadata,
    accept_states,
    transfer_config_of,
)
from octavo.kv_connector.cluster_secret import cluster_secret
from octavo.kv_connector.copy_cache import Key
from octavo.kv_connector.layout import KVLayout
from octavo.kv_connector.offload import (
    OffloadingMetadata,
    OffloadingScheduler,
    OffloadingSettings,
    OffloadingWorker,
)
from octavo.kv_connector.pages import KVCaches
from octavo.kv_connector.peer import PeerAddress, PeerClient, PeerServer, SharedCopies
from octavo.kv_connector.tracking import block_hashes, find_match, keys_to_load
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.request import Request

logger = logging.getLogger(__name__)

_NO_SLOT = -1
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Seconds = Annotated[float, Meta(gt=0, le=86400)]


class P2PSettings(OffloadingSettings, frozen=True, kw_only=True):
    """`kv_connector_extra_config`, in addition to that of `OffloadingConnector`."""

    host: str = "127.0.0.1"
    """Address of this machine from which peers fetch blocks."""
    port: _Port = 0
    """Port of rank 0; rank i uses port + i. 0: any free ports."""
    release_timeout: _Seconds = 120.0
    """Seconds for which a prompt's blocks are kept for a peer."""
    load_timeout: _Seconds = 20.0
    """Seconds after which blocks that have not arrived are computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host in ("0.0.0.0", "::", "*"):
            raise ValueError(
                f"host={self.host!r} is no address that others could connect to; name one of this "
                "machine."
            )


class Fetch(msgspec.Struct, array_like=True):
    """Blocks to fetch from a peer."""

    request_id: str
    """Request ID at the peer."""
    peers: list[PeerAddress]
    """Address of each rank."""
    blocks: list[tuple[int, int, int, bytes]]
    """(group, block, slot at the peer, hash)"""


class P2PMetadata(OffloadingMetadata):
    """Instructions for the workers in a step."""

    fetches: dict[str, Fetch] = msgspec.field(default_factory=dict)
    fetched: list[tuple[str, list[PeerAddress]]] = msgspec.field(default_factory=list)
    """Requests that all ranks have fetched, and the peers that may release the blocks."""


class _KeptPrompt(msgspec.Struct):
    """Copies of a prompt's blocks and state that wait for a peer."""

    keys: list[Key]
    until: float


class _Offer(msgspec.Struct, forbid_unknown_fields=True):
    """`kv_transfer_params`; the first names are vLLM's."""

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str = ""
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_ids: list[list[int]] = []
    """Slots of the blocks, for each KV-cache group; -1: the block is missing. They are those of the
    prompt, or of all rows of an encoder."""
    remote_state_blocks: int = 0
    """Number of blocks of tokens that precede the recurrent state; 0: there is no state."""
    remote_state_ids: list[int] = []
    """Slots of the state's pieces."""
    remote_layout: str = ""
    """`KVLayout.identity` in hex."""
    remote_peers: list[PeerAddress] = []
    signature: str = ""
    tp_size: int | None = None

    def slots(self, layout: KVLayout, request: Request) -> dict[Key, int]:
        """Return the slots of the copies that the peer has, by their keys."""
        hashes = block_hashes(layout, request)
        found = {
            (group_id, block_hash): slot
            for group_id, slots in enumerate(self.remote_block_ids[: len(layout.groups)])
            for block_hash, slot in zip(hashes[group_id], slots, strict=False)
            if slot != _NO_SLOT
        }
        for block_hash in request.block_hashes[: self.remote_state_blocks][-1:]:
            keys = layout.state_keys(block_hash)
            found.update(zip(keys, self.remote_state_ids, strict=False))
        return found

    def sign(self, secret: bytes) -> str:
        """Return the correct `signature`."""
        fields = msgspec.to_builtins(msgspec.structs.replace(self, signature=""))
        text = json.dumps(fields, sort_keys=True).encode()
        return hmac.new(secret, b"kv_transfer_params\0" + text, hashlib.sha256).hexdigest()


def read_offer(request: Request) -> _Offer | None:
    """Parse a request's `kv_transfer_params`.

    Raises:
        RequestError: the parameters are invalid.
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


class P2PScheduler(OffloadingScheduler):
    """Index of the blocks that are kept for peers, and of those that peers keep."""

    settings_type = P2PSettings

    def __init__(self, config: EngineConfig, layout: KVLayout) -> None:
        super().__init__(config, layout)
        self._settings = P2PSettings.of(self.transfer_config)
        self._peers: list[PeerAddress] = []
        self._num_expired = 0
        self._secret = cluster_secret(config.parallel.cluster_key_file)
        self._kept: dict[str, _KeptPrompt] = {}
        """Kept prompts by request ID, oldest first."""
        self._fetches: dict[str, Fetch] = {}
        """Fetches for the next metadata."""
        self._fetching: dict[str, Fetch] = {}
        self._fetched: list[Fetch] = []
        self._offers: dict[str, tuple[_Offer, dict[Key, int]]] = {}
        """Offers of requests that are being looked up or loaded, and the slots of their copies."""

    @property
    def num_expired(self) -> int:
        """Number of requests whose blocks a peer did not fetch in time."""
        return self._num_expired

    def set_xfer_handshake_metadata(self, metadata: list[Any]) -> None:
        """Implement `KVConnectorScheduler`."""
        self._peers = [msgspec.convert(it, PeerAddress) for it in metadata]

    def check_request(self, request: Request) -> None:
        """Implement `KVConnectorScheduler`."""
        offer = read_offer(request)
        if offer is None:
            return
        if offer.do_remote_prefill and not hmac.compare_digest(
            offer.signature, offer.sign(self._secret)
        ):
            raise RequestError(
                "kv_transfer_params are not signed with this server's key; send what the prefill "
                "server has answered, as it is, and start both servers with the "
                "same --cluster-key-file.",
                "kv_transfer_params",
            )

    def _saves_all(self, request: Request) -> bool:
        params = request.options.kv_transfer_params
        return params is not None and bool(params.get("do_remote_decode"))

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Implement `KVConnectorScheduler`: keep the prompt's blocks and state for a peer."""
        if not self._saves_all(request) or not self.transfer_config.saves:
            return None
        size = self.layout.block_size
        hashes = block_hashes(self.layout, request, request.num_prompt_tokens // size)
        places = [
            [self._place((group_id, h)) for h in of_group]
            for group_id, of_group in enumerate(hashes)
        ]
        keys = [
            (group_id, h)
            for group_id, slots in enumerate(places)
            for h, slot in zip(hashes[group_id], slots, strict=True)
            if slot != _NO_SLOT
        ]
        before_last = request.block_hashes[: (request.num_prompt_tokens - 1) // size]
        state_blocks, state = self._last_state(before_last)
        keys += state
        for key in keys:
            self._memory.pin(key)
        self._expire()
        until = time.monotonic() + self._settings.release_timeout
        self._release(request.request_id)
        self._kept[request.request_id] = _KeptPrompt(keys, until)
        offer = _Offer(
            do_remote_prefill=True,
            remote_engine_id=self.transfer_config.engine_id,
            remote_request_id=request.request_id,
            remote_host=self._settings.host,
            remote_port=self._peers[0].port,
            remote_block_ids=places,
            remote_state_blocks=state_blocks,
            remote_state_ids=[self._memory.slot(key) for key in state],
            remote_layout=self.layout.identity.hex(),
            remote_peers=self._peers,
        )
        offer.signature = offer.sign(self._secret)
        found: dict[str, Any] = msgspec.to_builtins(offer)
        return found

    def _place(self, key: Key) -> int:
        known = key in self._memory and not (key in self._unsure or key in self._dropped)
        return self._memory.slot(key) if known else _NO_SLOT

    def _last_state(self, hashes: Sequence[bytes]) -> tuple[int, list[Key]]:
        """Return the number of blocks before the last state in memory, and the state's keys."""
        for count in range(len(hashes) if self.layout.states else 0, 0, -1):
            keys = self.layout.state_keys(hashes[count - 1])
            if all(self._place(key) != _NO_SLOT for key in keys):
                return count, list(self.layout.state_keys(hashes[count - 1]))
        return 0, []

    def _release(self, request_id: str) -> None:
        kept = self._kept.pop(request_id, None)
        for key in kept.keys if kept is not None else ():
            self._unpin(key)

    def _expire(self) -> None:
        """Release blocks that were not fetched in time."""
        now = time.monotonic()
        for request_id in [i for i, kept in self._kept.items() if kept.until <= now]:
            self._num_expired += 1
            logger.warning("no peer has fetched the KV blocks of request %s in time", request_id)
            self._release(request_id)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Implement `KVConnectorScheduler`: blocks of a peer, or else those in memory here."""
        here, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        offer = read_offer(request)
        if offer is None or not offer.do_remote_prefill or not self.transfer_config.loads:
            return here, True
        slots = self._slots_of(offer, request)
        there = find_match(self, request, num_computed_tokens, slots.__contains__)
        if there <= here:
            return here, True
        self._offers[request.request_id] = offer, slots
        return there, True

    def _slots_of(self, offer: _Offer, request: Request) -> dict[Key, int]:
        """Return the slots of the copies that a peer offers and this engine can use."""
        divisions = [[peer.states for peer in of] for of in (offer.remote_peers, self._peers)]
        if offer.remote_layout != self.layout.identity.hex():
            reason = "has another model or other settings"
        elif self.layout.states and divisions[0] != divisions[1]:
            reason = "divides recurrent states among its processes in another way"
        else:
            return offer.slots(self.layout, request)
        logger.warning(
            "engine %s %s: its KV blocks are computed again", offer.remote_engine_id, reason
        )
        return {}

    def update_state_after_alloc(
        self, request: Request, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """Implement `KVConnectorScheduler`."""
        found = self._offers.pop(request.request_id, None)
        if num_external_tokens == 0 and request.num_external_tokens is None:
            self._decline(request)
        if found is None or num_external_tokens == 0:
            super().update_state_after_alloc(request, block_ids, num_external_tokens)
            return
        offer, slots = found
        wanted = keys_to_load(self.layout, request, block_ids, num_external_tokens)
        blocks = [(key[0], block_id, slots[key], key[1]) for key, block_id in wanted]
        fetch = Fetch(offer.remote_request_id, offer.remote_peers, blocks)
        self._loads[request.request_id] = []
        self._fetches[request.request_id] = self._fetching[request.request_id] = fetch

    def _decline(self, request: Request) -> None:
        """Schedule a release of the peer's blocks without a fetch: this engine has them all."""
        offer = read_offer(request)
        if offer is not None and offer.do_remote_prefill:
            self._fetched.append(Fetch(offer.remote_request_id, offer.remote_peers, []))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> P2PMetadata | None:
        """Implement `KVConnectorScheduler`."""
        if self._kept:
            self._expire()
        found = super().build_connector_meta(scheduler_output)
        fetches, self._fetches = self._fetches, {}
        fetched, self._fetched = self._fetched, []
        if found is None and not fetches and not fetched:
            return None
        found = found or OffloadingMetadata(self._epoch)
        told = [(fetch.request_id, fetch.peers) for fetch in fetched]
        return P2PMetadata(found.epoch, found.saves, found.loads, found.emptied, fetches, told)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Implement `KVConnectorScheduler`: release the blocks that peers have fetched."""
        for request_id in output.finished_sending:
            self._release(request_id)
        for request_id in output.finished_recving:
            if request_id in self._fetching:
                self._fetched.append(self._fetching.pop(request_id))
        super().update_connector_output(output)


class P2PWorker(OffloadingWorker):
    """Server of this rank's blocks for peers, and client of the peers' servers."""

    metadata_type = P2PMetadata
    settings_type = P2PSettings

    def __init__(
        self, config: EngineConfig, layout: KVLayout, notify: Callable[[], object]
    ) -> None:
        settings = P2PSettings.of(transfer_config_of(config))
        secret = cluster_secret(config.parallel.cluster_key_file)
        num_slots, _ = settings.num_slots(layout)
        self._shared = SharedCopies(num_slots * layout.copy_nbytes)
        super().__init__(config, layout, notify, memory=self._shared.copies)
        self._lock = threading.Lock()
        """Lock of `_fetched`."""
        self._fetched: set[str] = set()
        self._timeout, self._secret = settings.load_timeout, secret
        self._client: PeerClient | None = None
        self._fetchers = ThreadPoolExecutor(4, "octavo-kv-fetches")
        port = settings.port and settings.port + layout.rank
        self._server = PeerServer(
            *(settings.host, port, secret, layout, self._shared), self._peer_has
        )

    def get_handshake_metadata(self) -> Any:
        """Implement `KVConnectorWorker`."""
        return msgspec.to_builtins(self._server.address)

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Implement `KVConnectorWorker`."""
        super().register_kv_caches(kv_caches)
        self._client = PeerClient(self._secret, kv_caches, self._timeout)

    def _peer_has(self, request_id: str) -> None:
        """Note that a peer has fetched the blocks kept for it."""
        with self._lock:
            self._fetched.add(request_id)
        self.notify()

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Implement `KVConnectorWorker`."""
        with self._lock:
            fetched, self._fetched = self._fetched, set()
        return fetched, self._loaded.take_finished()

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Implement `KVConnectorWorker`."""
        super().start_load_kv(metadata)
        assert isinstance(metadata, P2PMetadata)
        for req_id, wanted in metadata.fetches.items():
            blocks = {block_id for _, block_id, _, _ in wanted.blocks}
            fetch = partial(self._fetch, wanted, blocks, time.monotonic())
            self._fetchers.submit(self._loaded.run, req_id, blocks, fetch)
        if self.layout.rank == 0:
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
        """Implement `KVConnectorWorker`: end all transfers."""
        self._fetchers.shutdown(cancel_futures=True)
        self._server.close()
        if self._client is not None:
            self._client.close()
        super().shutdown()
        self._shared.close()


P2PConnector = KVConnector(P2PScheduler, P2PWorker, P2PWorker.host_nbytes, accept_states)
