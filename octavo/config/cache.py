"""Settings of the KV cache, its events and its connectors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.config.section import PositiveInt, Section

KVCacheDtype = Literal[
    "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"
]


_ENDPOINT = r"^(tcp://[^\s/]+:\d{1,5}|ipc://\S+|inproc://\S+)$"
"""As ZMQ writes addresses."""


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether and where KV events are published. Names are vLLM's."""

    enable_kv_cache_events: bool = False
    """Whether they are at all."""
    publisher: Literal["zmq", "null"] = "zmq"
    """null: they are not, either."""
    endpoint: Annotated[str, Meta(pattern=_ENDPOINT)] = "tcp://127.0.0.1:5557"
    """Where subscribers connect to; with several engines, the first one's port. `tcp://*:5557`: all
    that can reach the machine may read the tokens of all prompts."""
    replay_endpoint: Annotated[str, Meta(pattern=_ENDPOINT)] | None = None
    """Where those who have missed some ask for them; likewise."""
    buffer_steps: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """Batches kept for these, 64 MiB of them at most."""
    hwm: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    """Batches that wait for a slow subscriber; further ones are lost for it. Slow subscribers that
    have not taken 64 MiB are disconnected."""
    max_queue_size: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    """Batches that wait to be sent."""
    topic: str = ""
    """The first frame of each message."""


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where keys and values go beside the KV cache, and come from. Names are vLLM's."""

    kv_connector: Annotated[str, Meta(min_length=1)]
    """OffloadingConnector, SharedStorageConnector, P2PConnector, MultiConnector, or a class of
    `kv_connector_module_path`."""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    """kv_producer only saves, kv_consumer only loads."""
    kv_connector_extra_config: dict[str, Any] = {}
    """What the connector itself is told; see docs/kv_connectors.md."""
    kv_connector_module_path: Annotated[str, Meta(min_length=1)] | None = None
    """Module with a connector of one's own, to be imported."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose blocks cannot be loaded: it computes them, or fails."""
    engine_id: Annotated[str, Meta(min_length=1)] | None = None
    """A name of this engine among others; default: a random one."""

    @property
    def saves(self) -> bool:
        """Whether what is computed is saved."""
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether what is known elsewhere is loaded."""
        return self.kv_role != "kv_producer"


class CacheConfig(Section, frozen=True):
    """The KV cache: what the model keeps of each token, in blocks of equal size."""

    block_size: Annotated[
        Literal[8, 16, 32, 64, 128], Meta(description="Tokens per KV-cache block.")
    ] = 16
    gpu_memory_utilization: Annotated[
        float, Meta(description="Share of the device's memory that may be used.", gt=0, le=1)
    ] = 0.92
    kv_cache_memory_bytes: Annotated[
        PositiveInt | None,
        Meta(description="Size of the KV cache (4G, 512M ...); overrides gpu_memory_utilization."),
    ] = None
    num_gpu_blocks_override: Annotated[
        PositiveInt | None,
        Meta(description="Exact number of KV-cache blocks, even if more would fit."),
    ] = None
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV cache of prompts with a common prefix.")
    ] = True
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Meta(
            description="Data type of the KV cache. auto: the model's; fp8 (fp8_e4m3), fp8_e5m2 and"
            " int8 (with a scale per head and token) take half the memory of 16 bits."
        ),
    ] = "auto"
    kv_events_config: Annotated[
        KVEventsConfig | None,
        Meta(
            description="Tells routers what the prefix cache holds, as JSON:"
            ' {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}.'
        ),
    ] = None
    kv_transfer_config: Annotated[
        KVTransferConfig | None,
        Meta(
            description="Saves the KV cache elsewhere, too, and loads it from there, as JSON:"
            ' {"kv_connector": "OffloadingConnector", "kv_connector_extra_config":'
            ' {"cpu_bytes_to_use": 4294967296}}.'
        ),
    ] = None
