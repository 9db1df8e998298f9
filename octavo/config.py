"""Octavo's settings: small frozen sections put together into one `EngineConfig`.

Every field carries its default, its doc line and its check in one place; command-line flags and
the keyword arguments of `LLM` are generated from them. Names and defaults are vLLM's wherever it
has the thing. Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from octavo.errors import ConfigError
from octavo.foreign import translate

BUILTIN_MODEL = "octavo/stories"
BUILTIN_DRAFT_MODEL = "octavo/stories-draft"
BUILTIN_EAGLE_HEAD = "octavo/stories-eagle"
BUILTIN_MEDUSA_HEADS = "octavo/stories-medusa"
# Where API keys are looked for beside the flag: ours, and vLLM's for those who come from there.
API_KEY_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY")
ADMIN_KEY_VARIABLE = "OCTAVO_ADMIN_KEY"
# The key that a router sends to its servers.
SERVER_API_KEY_VARIABLE = "OCTAVO_SERVER_API_KEY"
_SECRET_VARIABLES = frozenset([*API_KEY_VARIABLES, ADMIN_KEY_VARIABLE, SERVER_API_KEY_VARIABLE])
# Variables of vLLM's that may be there: nothing here does what they turn off or choose.
_NO_MEANING = (
    "DISABLE_LOG_LOGO",
    "DO_NOT_TRACK",
    "ENABLE_V1_MULTIPROCESSING",
    "NO_USAGE_STATS",
    "USAGE_SOURCE",
    "USE_V1",
    "WORKER_MULTIPROC_METHOD",
)
# What stands in messages in place of a secret.
HIDDEN = "(hidden)"

PositiveInt = Annotated[int, Meta(gt=0)]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
LogLevel = Literal["debug", "info", "warning", "error"]
KVCacheDtype = Literal[
    "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"
]
S = TypeVar("S", bound="Section")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\](:\d+)?")
_SIZE_UNITS = ("", "K", "M", "G", "T")


def _read_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _read_gib(text: str) -> int | None:
    """Bytes of a number of GiB; None for 0, which says nothing."""
    number = float(text)
    if not 0 <= number < 2**30:  # more would be no number of bytes that a setting may hold
        raise ValueError(text)
    return int(number * 2**30) or None


def _read_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _read_log_level(text: str) -> str:
    """A level of `log_level`; Python's other names for them are vLLM's, too."""
    level = text.lower()
    level = {"critical": "error", "fatal": "error", "warn": "warning"}.get(level, level)
    if level not in typing.get_args(LogLevel):
        raise ValueError(text)
    return level


ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "BATCH_INVARIANT": ("batch_invariant", _read_switch, "0 or 1"),
    "CPU_KVCACHE_SPACE": ("kv_cache_memory_bytes", _read_gib, "GiB; 0 says nothing"),
    "SERVER_DEV_MODE": ("enable_admin", _read_switch, "0 or 1"),
    "LOG_STATS_INTERVAL": ("log_stats_interval", _read_seconds, "seconds, more than 0"),
    "LOGGING_LEVEL": ("log_level", _read_log_level, "debug, info, warning or error"),
}
"""Variables after OCTAVO_ or VLLM_: the setting, how it is read, and what may stand there."""


_ENDPOINT = r"^(tcp://[^\s/]+:\d{1,5}|ipc://\S+|inproc://\S+)$"
"""As ZMQ writes addresses."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections."""

    def __repr__(self) -> str:
        """Shows the settings that differ from their defaults; secrets as `HIDDEN`."""
        shown = (
            f"{f.name}={HIDDEN if f.secret else repr(value)}"
            for f in section_fields(type(self))
            if (value := getattr(self, f.name)) != f.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class ModelConfig(Section, frozen=True):
    """Which model, and how it is read."""

    model: Annotated[
        str, Meta(description="Model folder, hub id, or octavo/stories (built in).", min_length=1)
    ] = BUILTIN_MODEL
    tokenizer: Annotated[
        str | None, Meta(description="Folder or hub id of the tokenizer; default: the model's.")
    ] = None
    skip_tokenizer_init: Annotated[
        bool,
        Meta(
            description="Do not load a tokenizer: prompts must be token ids, answers have no text."
        ),
    ] = False
    trust_remote_code: Annotated[
        bool, Meta(description="Accept models that come with their own code (it is never run).")
    ] = False
    dtype: Annotated[
        Dtype, Meta(description="Data type of weights and activations; auto: the checkpoint's.")
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        Meta(description="Quantize the linear layers while loading; default: keep the dtype."),
    ] = None
    seed: Annotated[int, Meta(description="Random seed.", ge=0)] = 0
    max_model_len: Annotated[
        Annotated[int, Meta(ge=-1)] | None,
        Meta(
            description="Longest prompt plus answer, in tokens; default: the model's limit; -1: as"
            " long as fits in memory."
        ),
    ] = None
    revision: Annotated[str | None, Meta(description="Branch, tag or commit on the hub.")] = None
    served_model_name: Annotated[
        list[str], Meta(description="Names under which the model is served.")
    ] = []
    max_logprobs: Annotated[
        int,
        Meta(description="Maximum number of logprobs a request may ask for; -1: no limit.", ge=-1),
    ] = 20
    hf_overrides: Annotated[
        dict[str, Any],
        Meta(description="Fields that count instead of those in the model's config.json."),
    ] = {}
    logits_processors: Annotated[
        list[str],
        Meta(
            description="Classes of logits processors, each as module:Class, of Octavo's interface"
            " or of vLLM's (vllm.v1.sample.logits_processor)."
        ),
    ] = []
    guided_decoding_backend: Annotated[
        Literal["auto", "xgrammar", "llguidance"],
        Meta(
            description="Backend of structured outputs, unless a request names one; auto: the "
            "first that supports the request."
        ),
    ] = "auto"
    allow_additional_properties: Annotated[
        bool,
        Meta(
            description="Let JSON have properties and items that its schema neither names nor"
            " forbids, as JSON schema allows; default: as in vLLM, only those it names."
        ),
    ] = False
    enable_prompt_embeds: Annotated[
        bool, Meta(description="Accept embeddings as prompts (prompt_embeds).")
    ] = False
    enable_sleep_mode: Annotated[
        bool,
        Meta(
            description="Allow sleep and wake_up, and their routes: while the engine sleeps, the"
            " memory of weights and KV cache is the system's. On device=cpu."
        ),
    ] = False
    enforce_eager: Annotated[
        bool,
        Meta(description="Run steps operation by operation instead of replaying a captured plan."),
    ] = False


class LoadConfig(Section, frozen=True):
    """Where weights come from."""

    load_format: Annotated[
        Literal["auto", "safetensors", "pt", "sharded_state", "dummy"],
        Meta(
            description="auto and safetensors read safetensors; pt allows PyTorch .bin files"
            " (pickle); sharded_state: what vLLM saved of each rank; dummy: random weights."
        ),
    ] = "auto"
    download_dir: Annotated[
        str | None, Meta(description="Folder for downloads; default: the hub client's cache.")
    ] = None
    weight_cache: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Folder for packed weights, which make the next start faster; default:"
            " octavo/weights in the user's cache folder; off: keep none."
        ),
    ] = None
    weight_cache_bytes: Annotated[
        PositiveInt | None,
        Meta(
            description="Maximum size of that folder (16G ...); default: a quarter of the free"
            " disk space."
        ),
    ] = None


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


class SchedulerConfig(Section, frozen=True):
    """Which requests run in a step, and how many tokens of each."""

    max_num_batched_tokens: Annotated[
        PositiveInt | None,
        Meta(
            description="Maximum number of tokens per step; default: 512 in a server, 8192 offline."
        ),
    ] = None
    max_num_seqs: Annotated[
        int, Meta(description="Maximum number of requests running at once.", ge=1, le=4096)
    ] = 256
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Meta(description="Order of service: by arrival, or by priority and then arrival."),
    ] = "fcfs"
    enable_chunked_prefill: Annotated[
        bool, Meta(description="Split long prompts across several steps.")
    ] = True
    long_prefill_token_threshold: Annotated[
        int, Meta(description="Maximum prompt tokens of one request per step; 0: no limit.", ge=0)
    ] = 0
    preemption_mode: Annotated[
        Literal["auto", "swap", "recompute"],
        Meta(
            description="How a preempted request gets its KV cache back, with kv_transfer_config:"
            " swap: from the connector; recompute: by computing it; auto: whichever took less time"
            " so far."
        ),
    ] = "auto"
    async_scheduling: Annotated[
        bool, Meta(description="Schedule the next step while the current one is being computed.")
    ] = True


class DeviceConfig(Section, frozen=True):
    """Where and how the model computes."""

    device: Annotated[
        str,
        Meta(description="cpu, cuda, or a plug-in's device; auto: a GPU if there is one."),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "cpu", "triton", "flashinfer", "reference"],
        Meta(
            description="Attention kernels; auto: cpu on a CPU, triton on CUDA; flashinfer needs"
            " that package; reference: plain torch, slow."
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Meta(
            description="CUDA: a request gets the same result, bit for bit, whatever else is in "
            "its batch; this costs some speed. On a CPU it is always so."
        ),
    ] = False
    tensor_parallel_size: Annotated[
        int,
        Meta(
            description="Processes that compute the model together, each with a part of its"
            " weights and heads; on one machine's CPU.",
            ge=1,
        ),
    ] = 1
    tensor_parallel_mode: Annotated[
        Literal["exact", "reduce"],
        Meta(
            description="exact: every number is summed by one process, and the answers are those of"
            " one process, bit for bit; reduce: the results of output projections are summed over"
            " the processes in their order, which meet half as often."
        ),
    ] = "exact"
    enable_sequence_parallel: Annotated[
        bool,
        Meta(
            description="Has each of tensor_parallel_size processes compute the norms of a part of"
            " a step's tokens only; they meet once more for each."
        ),
    ] = False
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            description="Stages into which the layers are divided; each is computed by"
            " tensor_parallel_size processes, while the others compute other steps.",
            ge=1,
        ),
    ] = 1
    pipeline_layers: Annotated[
        Annotated[str, Meta(pattern=r"^[1-9]\d*(,[1-9]\d*)*$")] | None,
        Meta(
            description="Layers of each stage, such as 8,8,6; default: so that each reads about as"
            " many weights."
        ),
    ] = None
    num_threads: Annotated[
        PositiveInt | None,
        Meta(
            description="Threads of the CPU kernels, of each process that computes; default: one"
            " per core that may be used, shared among these."
        ),
    ] = None
    numa_node: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="Run on this NUMA node's cores and in its memory; default: no binding."),
    ] = None


class ParallelConfig(Section, frozen=True):
    """Over how many engines and devices the work is spread."""

    data_parallel_size: Annotated[
        int,
        Meta(
            description="Engines, each with the whole model, among which requests are divided. They"
            " share memory and cores; what is set of these (KV cache, threads) each of them has."
            " device=cpu only.",
            ge=1,
        ),
    ] = 1
    enable_elastic_ep: Annotated[
        bool,
        Meta(
            description="Let the number of engines be changed while the server runs (POST"
            " /scale_elastic_ep, octavo scale)."
        ),
    ] = False
    distributed_executor_backend: Annotated[
        str | None,
        Meta(
            description="Where an engine's workers compute. uni: in its own process; mp: each in a"
            " process of its own, on this machine (Linux); ray: each in an actor of a Ray cluster"
            " (pip install ray); or module and name, with a dot between, of an Executor"
            " of one's own. Default: uni for one worker, mp for more."
        ),
    ] = None
    data_parallel_size_local: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="How many of these engines are on this machine; default: all. The others"
            " are on nodes that join (--headless)."
        ),
    ] = None
    data_parallel_start_rank: Annotated[
        int,
        Meta(
            description="On a node, or with data_parallel_hybrid_lb: number of its first engine;"
            " the head has 0.",
            ge=0,
        ),
    ] = 0
    data_parallel_rank: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Number of the one engine of this server, which is one of"
            " data_parallel_size servers behind a load balancer of one's own; means"
            " data_parallel_external_lb."
        ),
    ] = None
    data_parallel_external_lb: Annotated[
        bool,
        Meta(
            description="Each engine has a server of its own, and a load balancer divides the"
            " requests; needs data_parallel_rank. The servers do not talk to each other."
        ),
    ] = False
    data_parallel_hybrid_lb: Annotated[
        bool,
        Meta(
            description="Each machine has a server of its own, for data_parallel_size_local engines"
            " from data_parallel_start_rank on; a load balancer divides the requests among the"
            " machines. The servers do not talk to each other."
        ),
    ] = False
    data_parallel_address: Annotated[
        str | None,
        Meta(
            description="With engines on several machines: name or address of the head node, where"
            " it listens for the others. Not used behind a load balancer of one's own."
        ),
    ] = None
    data_parallel_rpc_port: Annotated[
        int, Meta(description="The head node's port for nodes and their engines.", ge=0, le=65535)
    ] = 29550
    cluster_key_file: Annotated[
        str | None,
        Meta(
            description="File with the secret that all machines of a cluster have in common; all"
            " that passes between them is encrypted under it."
        ),
    ] = None

    @property
    def num_local_engines(self) -> int:
        """Engines on this machine."""
        return self.data_parallel_size_local or self.data_parallel_size

    @property
    def external(self) -> bool:
        """Whether this server has one of all engines, behind a load balancer."""
        return self.data_parallel_external_lb or self.data_parallel_rank is not None

    @property
    def first_engine(self) -> int:
        """Number of this server's first engine among those of all; after `of_server`."""
        return self.data_parallel_rank or 0

    @property
    def numbered(self) -> bool:
        """Whether it has to be said which engine something is about; after `of_server`."""
        several = self.data_parallel_size > 1 or self.enable_elastic_ep
        return several or self.data_parallel_rank is not None

    def of_server(self) -> ParallelConfig:
        """As if there were no engines but this server's: to it, those of others are nothing.

        Only `data_parallel_rank`, the number of the first one, tells that there are.
        """
        if self.external:
            first, count = self.data_parallel_rank, 1
        elif self.data_parallel_hybrid_lb:
            first, count = self.data_parallel_start_rank, self.num_local_engines
        else:
            return self
        return msgspec.structs.replace(
            self,
            data_parallel_size=count,
            data_parallel_size_local=None,
            data_parallel_start_rank=0,
            data_parallel_rank=first,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=False,
            data_parallel_address=None,
        )

    def check(self, *, headless: bool) -> None:
        """Whether the settings of a cluster go together.

        Args:
            headless: this machine is a node.

        Raises:
            ConfigError: they do not.
        """
        size, local = self.data_parallel_size, self.num_local_engines
        if self.external or self.data_parallel_hybrid_lb:
            self._check_balanced(headless)
            return
        if self.enable_elastic_ep and (headless or local < size):
            raise ConfigError(
                "enable_elastic_ep is for engines on one machine: those of nodes come and go with "
                "their nodes; leave it out."
            )
        start, total = self.data_parallel_start_rank, f"data_parallel_size={size}"
        if start + local > size:
            raise ConfigError(
                f"data_parallel_start_rank={start} and data_parallel_size_local={local} are more "
                f"than {total}; {total} counts the engines of all machines."
            )
        if not headless and start:
            raise ConfigError(
                f"data_parallel_start_rank={start} is for nodes; add --headless, or leave it out. "
                "Where each machine has a server, add --data-parallel-hybrid-lb."
            )
        if headless and not start:
            raise ConfigError(
                "headless: data_parallel_start_rank=0 is the head node's first engine; give the "
                "number of this node's first one."
            )
        if not headless and local == size:
            if self.data_parallel_address is not None:  # a key may be a KV connector's
                raise ConfigError(
                    f"data_parallel_address is for engines on several machines, and all of {total} "
                    "are on this one; set data_parallel_size_local, or leave it out."
                )
            return
        for name in ("data_parallel_address", "cluster_key_file"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name} is missing: {total} has engines on other machines.")

    def _check_balanced(self, headless: bool) -> None:
        """See `check`: this server is one of several behind a load balancer."""
        size, start = self.data_parallel_size, self.data_parallel_start_rank
        rank, local = self.data_parallel_rank, self.data_parallel_size_local
        lb = "data_parallel_external_lb" if self.external else "data_parallel_hybrid_lb"
        if self.external and self.data_parallel_hybrid_lb:
            raise ConfigError(
                "data_parallel_external_lb (or data_parallel_rank) is for one engine a server, "
                "data_parallel_hybrid_lb for several; leave out one of them."
            )
        if headless:
            raise ConfigError(
                f"headless: a node has no server, and with {lb} each has one; leave out one of "
                "them."
            )
        if self.enable_elastic_ep:
            raise ConfigError(
                f"enable_elastic_ep is not supported with {lb}: each server has its engines for "
                "itself, and the load balancer knows how many there are; leave out one of them."
            )
        if not self.external:
            if local is None:
                raise ConfigError(
                    f"{lb} needs data_parallel_size_local: how many of data_parallel_size={size} "
                    "engines this machine has."
                )
            if start + local > size:
                raise ConfigError(
                    f"data_parallel_start_rank={start} and data_parallel_size_local={local} are "
                    f"more than data_parallel_size={size}, which counts the engines of all "
                    "machines."
                )
            return
        if rank is None:
            raise ConfigError(f"{lb} needs data_parallel_rank: the number of this server's engine.")
        if rank >= size:
            raise ConfigError(
                f"data_parallel_rank={rank} is not below data_parallel_size={size}, which counts "
                "the engines of all servers."
            )
        if local not in (None, 1):
            raise ConfigError(
                f"data_parallel_size_local={local} is not supported with {lb}, where a server has "
                "one engine; leave it out, or use data_parallel_hybrid_lb."
            )
        if start:
            raise ConfigError(
                f"data_parallel_start_rank={start} is not supported with {lb}, where "
                f"data_parallel_rank={rank} says which engine it is; leave it out."
            )


class ObservabilityConfig(Section, frozen=True):
    """What can be seen of the engine at work."""

    profiler_dir: Annotated[
        str | None,
        Meta(
            description="Folder for the profiles (Chrome traces) that start_profile and"
            " stop_profile record."
        ),
    ] = None
    disable_log_stats: Annotated[
        bool,
        Meta(
            description="Do not log the statistics of a server every log_stats_interval seconds;"
            " in LLM(...), where it is on unless given: collect no metrics."
        ),
    ] = False


class ServerConfig(Section, frozen=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "0.0.0.0"
    port: Annotated[int, Meta(description="Port to listen on.", ge=0, le=65535)] = 8000
    api_key: Annotated[
        list[str],
        Meta(
            description="API keys to accept, in addition to those in OCTAVO_API_KEY,"
            " VLLM_API_KEY and --api-key-file; without any, no key is required.",
            extra={"secret": True},
        ),
    ] = []
    api_key_file: Annotated[
        str | None, Meta(description="File with API keys to accept, one on each line.")
    ] = None
    admin_key: Annotated[
        list[str],
        Meta(
            description="Keys of the operator, in addition to the one in OCTAVO_ADMIN_KEY: needed"
            " for /sleep, /reset_prefix_cache, /start_profile, /server_info and the like; each is"
            " an API key as well.",
            extra={"secret": True},
        ),
    ] = []
    enable_admin: Annotated[
        bool,
        Meta(
            description="Let every client use the addresses that otherwise need an admin key; not"
            " together with --admin-key or several API keys."
        ),
    ] = False
    allowed_hosts: Annotated[
        list[str],
        Meta(
            description="Names to accept in the Host header, * for all; default: on a loopback"
            " address its own names (localhost, 127.0.0.1, ::1), with a name as --host that name"
            " and its addresses, otherwise all."
        ),
    ] = []
    allowed_origins: Annotated[
        list[str], Meta(description="CORS: origins that may call the API from a browser.")
    ] = []
    ssl_keyfile: Annotated[str | None, Meta(description="TLS private key file.")] = None
    ssl_certfile: Annotated[str | None, Meta(description="TLS certificate file.")] = None
    chat_template: Annotated[
        str | None, Meta(description="Chat template: a file, or the template itself.")
    ] = None
    response_role: Annotated[str, Meta(description="Role of the answers in a chat.")] = "assistant"
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        Meta(
            description="Leave tools out of the chat template when a request's tool_choice is none."
        ),
    ] = False
    max_num_queued_reqs: Annotated[
        int,
        Meta(
            description="Maximum number of unfinished requests; further ones get 429. 0: no limit.",
            ge=0,
        ),
    ] = 1024
    request_memory_bytes: Annotated[
        int,
        Meta(
            description="Memory that unfinished requests (prompts, parameters, answers) may take "
            "in the server's processes (4G, 512M ...); further ones get 429.",
            ge=2**20,
        ),
    ] = 2**30
    max_request_bytes: Annotated[
        int, Meta(description="Maximum size of a request body (8M ...).", ge=1024)
    ] = 8 * 2**20
    max_connections_per_client: Annotated[
        int,
        Meta(
            description="Maximum connections per address; a proxy counts as one. 0: no limit.",
            ge=0,
        ),
    ] = 2048
    request_timeout: Annotated[
        float, Meta(description="Seconds a request may take; 0: no limit.", ge=0)
    ] = 0.0
    resume_grace: Annotated[
        float,
        Meta(
            description="Seconds for which a stream goes on without its client, which may come"
            " back for what it missed and the rest; 0: the stream is cancelled at once.",
            ge=0,
            le=86400,
        ),
    ] = 0.0
    shutdown_timeout: Annotated[
        float,
        Meta(description="Seconds that requests in flight get to finish after SIGTERM.", ge=0),
    ] = 30.0
    api_server_count: Annotated[
        int,
        Meta(
            description="Number of front ends: processes that take requests from one listening"
            " socket, tokenise them and make text of what the engines bring.",
            ge=1,
            le=256,
        ),
    ] = 1
    progress_timeout: Annotated[
        float,
        Meta(
            description="Seconds without a sign of life from the engine, busy or idle, after which"
            " it is killed and another one takes over; a step may take as long.",
            gt=0,
        ),
    ] = 60.0
    headless: Annotated[
        bool,
        Meta(
            description="Be a node: no HTTP server, only engines of the server at"
            " --data-parallel-address."
        ),
    ] = False
    max_engine_restarts: Annotated[
        int,
        Meta(
            description="Maximum number of times that a dead engine is replaced within ten"
            " minutes; after these the server exits.",
            ge=0,
        ),
    ] = 5
    warm_spare: Annotated[
        bool | None,
        Meta(
            description="Keep an interpreter ready for an engine that takes over (256 MiB; where it"
            " has worker processes, as much for each); default: on, unless the KV cache would be"
            " smaller for it."
        ),
    ] = None
    record: Annotated[
        str | None,
        Meta(
            description="File to record arrivals, decisions and tokens in, for octavo replay; it"
            " holds all prompts and answers, see docs/reliability.md."
        ),
    ] = None
    record_prompts: Annotated[
        Literal["full", "hash"],
        Meta(
            description="Whether --record keeps prompts or only their hashes, which cannot be"
            " replayed."
        ),
    ] = "full"
    record_max_bytes: Annotated[
        int,
        Meta(
            description="Maximum size of a recording (2G ...): the newest part of it is kept, in"
            " FILE and, the older half, in FILE.1.",
            ge=2**20,
        ),
    ] = 2**30
    log_level: Annotated[LogLevel, Meta(description="Minimum log level.")] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="text for people, json for machines.")
    ] = "text"
    log_stats_interval: Annotated[
        float,
        Meta(
            description="Seconds between two log lines of statistics: throughput, requests, cache"
            " usage. While nothing happens there are none.",
            gt=0,
        ),
    ] = 10.0
    metrics_prefix: Annotated[
        Literal["octavo", "vllm"],
        Meta(
            description="Prefix of the metrics' names; with vllm, vLLM's dashboards and alerts work"
            " unchanged."
        ),
    ] = "octavo"
    enable_log_requests: Annotated[bool, Meta(description="Log every request.")] = False
    disable_uvicorn_access_log: Annotated[
        bool, Meta(description="Log answered requests at level debug only.")
    ] = False
    disable_access_log_for_endpoints: Annotated[
        str | None,
        Meta(description="The same for these paths only, separated by commas: /v1/models,/ping."),
    ] = None
    strict_fields: Annotated[
        bool,
        Meta(
            description="Refuse requests with unknown fields instead of naming these in the header"
            " X-Octavo-Ignored-Fields."
        ),
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        Meta(
            description="Serve /tokenizer_info, which shows the tokenizer's configuration and the"
            " chat template."
        ),
    ] = False
    root_path: Annotated[
        str,
        Meta(
            description="Path under which a proxy exposes this server, such as /llm.",
            pattern="^(/[^/]+)*$",
        ),
    ] = ""
    uds: Annotated[
        str | None,
        Meta(description="Unix socket to listen on, instead of host and port."),
    ] = None
    middleware: Annotated[
        list[str],
        Meta(
            description="ASGI middleware classes, or functions (request, call_next), by import path"
            " (package.module.name); the last one is outermost."
        ),
    ] = []
    enable_force_include_usage: Annotated[
        bool, Meta(description="Report the token usage in every chunk of every stream.")
    ] = False
    enable_prompt_tokens_details: Annotated[
        bool, Meta(description="Report in the usage how many prompt tokens were cached.")
    ] = True
    enable_per_request_metrics: Annotated[
        bool,
        Meta(
            description="Report in each answer to one prompt, and in the usage chunk of its "
            "stream, how long the request took (metrics)."
        ),
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool,
        Meta(
            description="Show tokens in logprobs as token_id:5 instead of their text, unless a "
            "request says otherwise."
        ),
    ] = False
    disable_fastapi_docs: Annotated[
        bool, Meta(description="Do not serve /docs and /openapi.json.")
    ] = False
    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug", "trace"],
        Meta(description="Minimum log level of uvicorn, the HTTP server."),
    ] = "warning"
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        Meta(description="Variables for the chat template, which requests may override."),
    ] = {}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drafted, and how drafts are verified. Names are vLLM's."""

    method: Literal["ngram", "suffix", "draft_model", "eagle", "medusa"] | None = None
    """ngram, suffix, draft_model, eagle or medusa; default: the kind of `model`."""
    model: Annotated[str, Meta(min_length=1)] | None = None
    """Folder or hub id of the draft model or of the heads."""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)] | None = None
    """Maximum drafts per request and step; default: 5, or the number of Medusa heads."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Longest sequence of last tokens to look for; default: `prompt_lookup_min`, or 5."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Shortest; default: `prompt_lookup_max`, or 5."""
    acceptance: Literal["exact", "rejection", "typical"] = "exact"
    """exact: drafts do not change the answer; rejection, typical: docs/speculative_decoding.md."""

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request in a step."""
        return self.num_speculative_tokens or 5

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The shortest and the longest sequence that is looked for."""
        longest = self.prompt_lookup_max or self.prompt_lookup_min or 5
        return self.prompt_lookup_min or longest, longest

    def check(self) -> None:
        """Refuses what contradicts itself."""
        shortest, longest = self.lookup_lengths
        if shortest > longest:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={shortest} is more than "
                f"prompt_lookup_max={longest}."
            )
        if self.method is None and self.model is None:
            raise ConfigError(
                "speculative_config has neither a method nor a model; give "
                '{"method": "ngram"}, or {"model": "..."} for a draft model.'
            )
        if self.method in ("ngram", "suffix") and self.model is not None:
            raise ConfigError(
                f"speculative_config: method={self.method} drafts without a model; leave out "
                f"model={self.model!r}."
            )
        if self.method in ("draft_model", "eagle", "medusa") and self.model is None:
            raise ConfigError(
                f"speculative_config: method={self.method} needs a model; name its folder or hub "
                'id: {"method": "' + self.method + '", "model": "..."}.'
            )
        if self.model is not None and (self.prompt_lookup_max or self.prompt_lookup_min):
            raise ConfigError(
                f"speculative_config: with model={self.model!r} nothing is looked up in prompts; "
                "leave out prompt_lookup_max and prompt_lookup_min."
            )


class SpeculationConfig(Section, frozen=True):
    """Speculative decoding: guess several tokens, and check them in one step."""

    speculative_config: Annotated[
        SpeculativeConfig | None,
        Meta(
            description='How tokens are drafted, as JSON: {"method": "ngram",'
            ' "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 3}, or'
            ' {"model": "..."}: a draft model, EAGLE or Medusa heads.'
        ),
    ] = None


class EngineConfig(Section, frozen=True):
    """All that an engine needs to know; the same for offline use and for a server's engine."""

    model: ModelConfig = ModelConfig()
    load: LoadConfig = LoadConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    parallel: ParallelConfig = ParallelConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def world_size(self) -> int:
        """Workers of an engine, which compute together."""
        return self.device.tensor_parallel_size * self.device.pipeline_parallel_size

    @property
    def executor_backend(self) -> str:
        """Where they compute: the setting, or what it is by default."""
        if (backend := self.parallel.distributed_executor_backend) is not None:
            return backend
        return "uni" if self.world_size == 1 else "mp"

    @property
    def num_worker_processes(self) -> int:
        """Processes that the workers have beside the engine's."""
        return 0 if self.executor_backend == "uni" else self.world_size

    @property
    def num_spare_workers(self) -> int:
        """Worker processes that can be started before their setup is known."""
        return self.world_size if self.executor_backend == "mp" else 0

    def __repr__(self) -> str:
        """Shows the sections that differ from their defaults."""
        default = EngineConfig()
        shown = (
            f"{name}={getattr(self, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(default, name)
        )
        return f"EngineConfig({', '.join(shown)})"

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Builds the config from flat names, as `LLM(...)` and the command line give them.

        Settings that only vLLM has are taken as long as they ask for nothing (`octavo.foreign`).

        Raises:
            ConfigError: for an unknown name, a wrong value, or settings that contradict.
        """
        settings = translate(kwargs)
        if isinstance(settings.get("model"), str):
            model, revision = read_hub_address(settings["model"])
            if revision is not None and settings.get("revision") not in (None, revision):
                raise ConfigError(
                    f"model={settings['model']!r} and revision={settings['revision']!r} name two "
                    "revisions; give one."
                )
            settings["model"] = model
            settings |= {} if revision is None else {"revision": revision}
        sections = build_sections(cls, settings)
        config = cls(**sections)
        config.check()
        return config

    def check(self) -> None:
        """Refuses settings that contradict one another."""
        sched, model = self.scheduler, self.model
        budget = sched.max_num_batched_tokens
        if model.max_model_len == 0:
            raise ConfigError("max_model_len=0 leaves no room; give -1 or more than 0.")
        backend = model.guided_decoding_backend
        if backend != "auto" and importlib.util.find_spec(backend) is None:
            raise ConfigError(
                f"guided_decoding_backend={backend!r} needs the package {backend}, which is not "
                f"installed: install it (`pip install {backend}`), or leave "
                "guided_decoding_backend out."
            )
        if budget is not None and budget < sched.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_num_seqs={sched.max_num_seqs}: "
                "a step could not serve every running request. Raise the first or lower the second."
            )
        if (
            budget is not None
            and not sched.enable_chunked_prefill
            and model.max_model_len is not None
            and budget < model.max_model_len
        ):
            raise ConfigError(
                f"max_num_batched_tokens={budget} is less than max_model_len="
                f"{model.max_model_len}, so a long prompt would never be scheduled. Raise it, "
                "lower max_model_len, or leave enable_chunked_prefill on."
            )
        if self.cache.kv_cache_memory_bytes and self.cache.num_gpu_blocks_override:
            raise ConfigError(
                "kv_cache_memory_bytes and num_gpu_blocks_override both set the size of the KV "
                "cache; give one of them."
            )
        if model.skip_tokenizer_init and model.tokenizer is not None:
            raise ConfigError(
                "skip_tokenizer_init and tokenizer contradict each other; give one of them."
            )
        if self.speculation.speculative_config is not None:
            self.speculation.speculative_config.check()
        self._check_executor()

    def _check_executor(self) -> None:
        backend = self.executor_backend
        if backend == "uni" and self.world_size > 1:
            raise ConfigError(
                "distributed_executor_backend=uni has one worker, and tensor_parallel_size times "
                f"pipeline_parallel_size is {self.world_size}; set "
                "distributed_executor_backend=mp."
            )
        if self.device.enable_sequence_parallel and self.device.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_sequence_parallel divides norms among the processes of "
                "tensor_parallel_size, and that is 1; set it to 2 or more, or leave the other out."
            )
        layers, stages = self.device.pipeline_layers, self.device.pipeline_parallel_size
        if layers is not None and layers.count(",") + 1 != stages:
            raise ConfigError(
                f"pipeline_layers={layers!r} is for {layers.count(',') + 1} stages, and "
                f"pipeline_parallel_size={stages}; give a number of layers for each."
            )
        if backend not in ("uni", "mp", "ray") and "." not in backend.strip("."):
            raise ConfigError(
                f"distributed_executor_backend={backend!r} is unknown; choose uni, mp or ray, or "
                "give module and name, with a dot between, of an Executor of your own."
            )
        directory = self.observability.profiler_dir
        if backend in ("mp", "ray") and directory is not None:
            raise ConfigError(
                f"profiler_dir={directory!r} records one process, and with "
                f"distributed_executor_backend={backend} the workers are in others; leave one of "
                "them out."
            )


@dataclass(frozen=True)
class ConfigField:
    """One setting, as the command line needs it."""

    section: str
    name: str
    type: Any
    """Type without the Meta annotation; `X | None` where None is allowed."""
    default: Any
    doc: str
    secret: bool
    """Whether its value must not be shown."""

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_json(self) -> bool:
        """Whether it is a dict, of settings or of anything: JSON on the command line."""
        plain, _ = optional_type(self.type)
        return isinstance(plain, type(msgspec.Struct)) or typing.get_origin(plain) is dict

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """The allowed values beside None, if they are a fixed set."""
        plain, _ = optional_type(self.type)
        return typing.get_args(plain) if typing.get_origin(plain) is Literal else None


def section_fields(section: type[Section], section_name: str = "") -> Iterator[ConfigField]:
    """Lists the settings of one section."""
    hints = typing.get_type_hints(section, include_extras=True)
    for info in msgspec.structs.fields(section):
        hint = hints[info.name]
        meta = hint.__metadata__[0]
        secret = bool((meta.extra or {}).get("secret"))
        default = (
            info.default_factory()
            if info.default_factory is not msgspec.NODEFAULT
            else info.default
        )
        kind = typing.get_args(hint)[0]
        yield ConfigField(section_name, info.name, kind, default, meta.description, secret)


def section_doc(section: str) -> str:
    """The first line of what a section of `EngineConfig` is for."""
    doc = typing.get_type_hints(EngineConfig)[section].__doc__
    return str(doc).partition("\n")[0]


def config_fields(config: type[EngineConfig] = EngineConfig) -> list[ConfigField]:
    """Lists the settings of all sections of `config`."""
    hints = typing.get_type_hints(config)
    return [f for name, section in hints.items() for f in section_fields(section, name)]


def build_sections(config: type[EngineConfig], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Sorts flat settings into the sections of `config` and checks each."""
    fields = {f.name: f for f in config_fields(config)}
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in kwargs.items():
        if name not in fields:
            raise ConfigError(_unknown(name, list(fields)))
        by_section.setdefault(fields[name].section, {})[name] = value
    hints = typing.get_type_hints(config)
    return {name: build_section(hints[name], values) for name, values in by_section.items()}


def build_section(section: type[S], values: dict[str, Any]) -> S:
    """Makes one section from plain values, sizes such as "4G" included.

    Raises:
        ConfigError: naming the setting, the value and what is allowed.
    """
    fields = {f.name: f for f in section_fields(section)}
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(_unknown(name, list(fields)))
        if name.endswith("_bytes") and isinstance(value, str):
            value = parse_size(name, value)
        if fields[name].type == list[str]:
            value = _texts(name, value, fields[name].secret)
        if fields[name].is_json and isinstance(value, str):
            value = _json(name, value)
        choices, (_, optional) = fields[name].choices, optional_type(fields[name].type)
        if choices is not None and value not in choices and not (optional and value is None):
            allowed = ", ".join(str(choice) for choice in choices)
            raise ConfigError(f"{name}={value!r} is not allowed; choose one of {allowed}.")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{name}={_shorten(value)} is not allowed: it is too large.")
        if fields[name].is_json and isinstance(value, dict):
            _check_parts(name, fields[name].type, value)
        try:
            plain[name] = getattr(msgspec.convert({name: value}, section), name)
        except msgspec.ValidationError as error:
            reason = _expected(str(error))
            shown = HIDDEN if fields[name].secret else repr(value)
            raise ConfigError(f"{name}={shown} is not allowed: {reason}.") from None
    return section(**plain)


def _check_parts(name: str, kind: Any, value: dict[str, Any]) -> None:
    """Refuses what a setting that is a JSON object has no part for, or no choice of a part."""
    plain, _ = optional_type(kind)
    if not isinstance(plain, type(msgspec.Struct)):
        return
    parts = {part: optional_type(hint)[0] for part, hint in typing.get_type_hints(plain).items()}
    for part, item in value.items():
        if part not in parts:
            near = difflib.get_close_matches(part, parts, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(parts)}."
            raise ConfigError(f"{name} has no part called {part!r}; {hint}")
        choices = typing.get_args(parts[part]) if typing.get_origin(parts[part]) is Literal else ()
        if choices and item is not None and item not in choices:
            raise ConfigError(
                f"{name}: {part}={item!r} is not allowed; choose one of {', '.join(choices)}."
            )


_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a JSON object",
}


def _expected(error: str) -> str:
    """msgspec's reason in words: "expected an integer >= 1", and where, inside of a JSON object."""
    reason, _, where = error.partition(" - at `$.")
    worded = re.sub(r"`([\w |]+)`", _kinds, reason)
    inside = where.rstrip("`").partition(".")[2]
    return worded[:1].lower() + worded[1:] + (f" ({inside})" if inside else "")


def _kinds(found: re.Match[str]) -> str:
    names = [name for name in found[1].split(" | ") if name != "null"]
    return " or ".join(_KINDS.get(name, f"`{name}`") for name in names)


def _texts(name: str, value: Any, secret: bool) -> Any:
    """A list of texts from one text or several, any of which may be a JSON list of more.

    So `--flag a b`, `--flag a --flag b` and `--flag '["a", "b"]'` say the same.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    texts: list[Any] = []
    for item in value:
        # An IPv6 address begins with a bracket, too.
        if not isinstance(item, str) or not item.startswith("[") or _IPV6.fullmatch(item):
            texts.append(item)
            continue
        try:
            texts += msgspec.json.decode(item, type=list[str])
        except msgspec.MsgspecError:
            raise ConfigError(
                f"{name}={HIDDEN if secret else repr(item)} is not allowed: what begins with [ is"
                ' a JSON list of texts, such as ["a", "b"]; mind the shell\'s quotes.'
            ) from None
    return texts


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{name}={text!r} is not valid JSON ({error}); mind the shell's quotes."
        ) from None


def parse_size(name: str, text: str) -> int:
    """Reads a number such as 4096, 512M, 1.5GiB or 4k: K is 1,024, and k is 1,000."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name}={text!r} is not a size; write for example 512M or 4G.")
    unit = match[2]
    if unit.islower() and not match[3]:
        return int(float(match[1]) * 1000 ** _SIZE_UNITS.index(unit.upper()))
    return int(float(match[1]) * 1024 ** _SIZE_UNITS.index(unit.upper()))


def optional_type(hint: Any) -> tuple[Any, bool]:
    """Splits `X | None` into X, without its Meta annotation, and whether None is allowed."""
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        hint = next(t for t in typing.get_args(hint) if t is not types.NoneType)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    return hint, optional


def hub_offline() -> bool:
    """Whether the hub must not be asked (HF_HUB_OFFLINE)."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def read_hub_address(model: str) -> tuple[str, str | None]:
    """Return the hub id and the revision that the address (URL) of a model's page names.

    Any other name of a model comes back as it is, with no revision.

    Raises:
        ConfigError: it is a URL, but not that of a model on the hub.
    """
    _, separator, rest = model.rpartition("://")
    if not separator and not re.match(r"[\w-]+(\.[\w-]+)+(:\d+)?/[^/]+/", rest):
        return model, None
    from huggingface_hub import constants  # knows where the hub is

    hub = constants.ENDPOINT.rpartition("://")[2].rstrip("/")
    page = re.fullmatch(
        rf"{re.escape(hub)}/([\w.-]+/[\w.-]+?)(?:/(?:tree|blob|resolve)/([^/?#]+).*)?/?([?#].*)?",
        rest,
    )
    if page is not None and page[1].partition("/")[0] not in ("datasets", "spaces"):
        return page[1], page[2]
    if separator:
        raise ConfigError(
            f"model={model!r} is not the address of a model on the hub; give a hub id (org/name) "
            "or a folder."
        )
    return model, None


def cache_folder() -> Path | None:
    """Octavo's folder in the user's cache folder (XDG_CACHE_HOME); None if the user has none."""
    # As the XDG specification wants it, a relative path counts as none.
    for folder in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(folder):
            return Path(folder) / "octavo"
    return None


def api_keys_from_environment() -> dict[str, str]:
    """The API keys of the environment by their variable, the one that clients use first."""
    return {name: key for name in API_KEY_VARIABLES if (key := os.environ.get(name))}


def admin_keys_from_environment() -> list[str]:
    """The admin key of the environment, if there is one."""
    key = os.environ.get(ADMIN_KEY_VARIABLE)
    return [key] if key else []


def server_api_key_from_environment() -> dict[str, str]:
    """The router's setting `server_api_key`, if the environment has it."""
    key = os.environ.get(SERVER_API_KEY_VARIABLE)
    return {"server_api_key": key} if key else {}


def environment_without_keys() -> dict[str, str]:
    """The environment for a server that is not to accept this process' keys."""
    return {name: text for name, text in os.environ.items() if name not in _SECRET_VARIABLES}


def settings_from_environment() -> dict[str, Any]:
    """The settings that variables of the environment say, by name; flags win over them.

    OCTAVO_CPU_KVCACHE_SPACE and the others of `ENVIRONMENT`; if there is none, the same of vLLM's.

    Raises:
        ConfigError: a variable's value is wrong; the message names it.
    """
    settings: dict[str, Any] = {}
    for name, (setting, read, allowed) in ENVIRONMENT.items():
        for variable in (f"OCTAVO_{name}", f"VLLM_{name}"):
            text = os.environ.get(variable, "").strip()
            if not text:
                continue
            try:
                value = read(text)
            except ValueError:
                raise ConfigError(f"{variable}={text!r} is not allowed; give {allowed}.") from None
            if value is not None:
                settings[setting] = value
            break
    return settings


def unknown_variables() -> list[str]:
    """Variables of the environment that vLLM would read and Octavo does not."""
    known = {f"VLLM_{name}" for name in (*ENVIRONMENT, *_NO_MEANING)} | {*API_KEY_VARIABLES}
    return sorted(name for name in os.environ if name.startswith("VLLM_") and name not in known)


def _shorten(value: int) -> str:
    return f"{'-' if value < 0 else ''}(about 2**{value.bit_length()})"


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"There is no setting called {name!r}{hint}"
