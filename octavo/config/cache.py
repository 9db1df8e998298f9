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
"""Pattern of ZMQ addresses."""


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Publication of KV events. Names are vLLM's."""

    enable_kv_cache_events: bool = False
    """True if the engine publishes KV events."""
    publisher: Literal["zmq", "null"] = "zmq"
    """zmq: publish over ZMQ; null: do not publish."""
    endpoint: Annotated[str, Meta(pattern=_ENDPOINT)] = "tcp://127.0.0.1:5557"
    """Address to which subscribers connect. With several engines, each adds its rank to the port.
    With `tcp://*:5557`, every host that can reach the machine can read the tokens of all
    prompts."""
    replay_endpoint: Annotated[str, Meta(pattern=_ENDPOINT)] | None = None
    """Address at which subscribers request missed events. With several engines, each adds its rank
    to the port."""
    buffer_steps: Annotated[int, Meta(ge=1, le=10_000_000)] = 10_000
    """Maximum number of batches kept for `replay_endpoint`; together at most 64 MiB."""
    hwm: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    """Maximum number of batches that wait for a slow subscriber; the subscriber misses further
    batches. A subscriber with 64 MiB of unread batches is disconnected."""
    max_queue_size: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000
    """Maximum number of batches that wait to be sent."""
    topic: str = ""
    """First frame of each message."""


class KVTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Connector that saves and loads keys and values outside the KV cache. Names are vLLM's."""

    kv_connector: Annotated[str, Meta(min_length=1)]
    """OffloadingConnector, SharedStorageConnector, P2PConnector, MultiConnector, or a class of
    `kv_connector_module_path`."""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    """kv_producer: only save; kv_consumer: only load; kv_both: save and load."""
    kv_connector_extra_config: dict[str, Any] = {}
    """Settings of the connector itself; see docs/kv_connectors.md."""
    kv_connector_module_path: Annotated[str, Meta(min_length=1)] | None = None
    """Module to import that defines a custom connector."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """Action if blocks of a request cannot be loaded: recompute them, or fail the request."""
    engine_id: Annotated[str, Meta(min_length=1)] | None = None
    """Unique name of this engine; default: a random one."""

    @property
    def saves(self) -> bool:
        """True if the connector saves computed keys and values."""
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """True if the connector loads keys and values."""
        return self.kv_role != "kv_producer"


class CacheConfig(Section, frozen=True):
    """Memory for the keys and values of all tokens, in blocks of equal size."""

    block_size: Annotated[
        Literal[8, 16, 32, 64, 128], Meta(description="Tokens per KV-cache block.")
    ] = 16
    gpu_memory_utilization: Annotated[
        float, Meta(description="Share of the device's memory that the engine may use.", gt=0, le=1)
    ] = 0.92
    kv_cache_memory_bytes: Annotated[
        PositiveInt | None,
        Meta(description="Size of the KV cache (4G, 512M ...); overrides gpu_memory_utilization."),
    ] = None
    num_gpu_blocks_override: Annotated[
        PositiveInt | None,
        Meta(description="Exact number of KV-cache blocks, even if more fit."),
    ] = None
    enable_prefix_caching: Annotated[
        bool, Meta(description="Reuse the KV cache for prompts with a common prefix.")
    ] = True
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Meta(
            description="Data type of the KV cache. auto: the model's; fp8 (fp8_e4m3), fp8_e5m2 and"
            " int8 (with a scale per head and token) use half the memory of 16 bits."
        ),
    ] = "auto"
    kv_events_config: Annotated[
        KVEventsConfig | None,
        Meta(
            description="Events that inform routers of the prefix cache's content, as JSON:"
            ' {"enable_kv_cache_events": true, "endpoint": "tcp://127.0.0.1:5557"}.'
        ),
    ] = None
    kv_transfer_config: Annotated[
        KVTransferConfig | None,
        Meta(
            description="Connector that saves and loads the KV cache outside the engine, as JSON:"
            ' {"kv_connector": "OffloadingConnector", "kv_connector_extra_config":'
            ' {"cpu_bytes_to_use": 4294967296}}.'
        ),
    ] = None
