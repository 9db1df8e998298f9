"""Interface of KV connectors: the life cycle and the method names of vLLM's V1 interface.

A connector has two halves, which share only the metadata of steps: the scheduler's half decides
which blocks to save and load; the worker's half, one in each process that computes, copies them.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import msgspec

from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import ConfigError, RequestError
from octavo.kv_connector.layout import KVLayout
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.request import Request

if TYPE_CHECKING:
    from octavo.kv_connector.pages import KVCaches


class KVConnectorRole(enum.Enum):
    """The half of a connector that a `KVConnectorBase` is."""

    SCHEDULER = 0
    WORKER = 1


class PrefixCache(Protocol):
    """Lookup in the engine's prefix cache."""

    def has_block(self, group_id: int, block_hash: bytes) -> bool:
        """Return True if it has a block."""

    def has_state(self, block_hash: bytes) -> bool:
        """Return True if it has the recurrent state at the end of a block."""


class SavedState(NamedTuple):
    """Recurrent state that a connector may save."""

    state_id: int
    """Id of the state, as in the block ids of `update_state_after_alloc`."""
    block_hash: bytes
    """Hash of the last block of its tokens."""
    in_prompt: bool
    """False if its tokens end in an answer; a later state of the answer soon replaces it."""


class KVConnectorMetadata(msgspec.Struct, array_like=True):
    """Instructions of the scheduler's half for the workers' in a step; a connector adds fields."""


class KVConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of `kv_connector_extra_config`; `__post_init__` raises ValueError for wrong values."""

    @classmethod
    def of(cls, config: KVTransferConfig) -> Self:
        """Read a connector's settings.

        Raises:
            ConfigError: a setting is wrong.
        """
        try:
            return msgspec.convert(config.kv_connector_extra_config, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kv_transfer_config: kv_connector_extra_config: {error}") from None


class KVConnectorScheduler(ABC):
    """Scheduler's half of a connector. One thread calls all of its methods.

    Blocks are loaded into blocks that no request can see until all ranks have reported success;
    a request is computed only after that. So a load that fails, late or in part, costs time and
    never changes an answer.

    Args:
        config: settings of the engine; `transfer_config` has the connector's own.
        layout: layout of a block.
    """

    def __init__(self, config: EngineConfig, layout: KVLayout) -> None:
        self.config, self.layout = config, layout
        self.prefix_cache: PrefixCache | None = None
        """Prefix cache, in models with recurrent states or cross attention."""

    @property
    def transfer_config(self) -> KVTransferConfig:
        """The connector's settings."""
        return transfer_config_of(self.config)

    @property
    def num_expired(self) -> int:
        """Number of requests whose blocks a peer did not fetch in time."""
        return 0

    def set_xfer_handshake_metadata(self, metadata: list[Any]) -> None:
        """Accept each rank's `get_handshake_metadata`, before any request."""
        return

    def bind_prefix_cache(self, prefix_cache: PrefixCache) -> None:
        """Accept the prefix cache of a model with recurrent states or cross attention."""
        self.prefix_cache = prefix_cache

    def note_states(self, saved: Sequence[SavedState], dropped: Sequence[bytes]) -> None:
        """Note changes of the known recurrent states, just before `build_connector_meta`.

        Args:
            saved: states that the step, or an earlier one, computes: the step can save them.
            dropped: hashes of the last blocks of states that are not wanted any more.
        """
        return

    def check_request(self, request: Request) -> None:
        """Check a new request.

        Raises:
            RequestError: the `kv_transfer_params` are invalid.
        """
        if request.options.kv_transfer_params is not None:
            raise RequestError(
                f"kv_transfer_params: this server's {self.transfer_config.kv_connector} does "
                "not accept them; leave them out, or start it with another kv_connector.",
                "kv_transfer_params",
            )

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return the number of further tokens of a request that can be loaded.

        Args:
            request: a request that is about to be started.
            num_computed_tokens: its tokens in the prefix cache; whole blocks. In models with
                recurrent states `prefix_cache` may have further blocks; the tokens to load must end
                where it or the connector has a state, before the request's last token. In
                encoder-decoders the encoder's rows come before the tokens: if `prefix_cache` lacks
                some of their blocks (`row_hashes`), all blocks of rows count as tokens to load; if
                the connector lacks some of these, nothing can be loaded.

        Returns:
            The number of tokens to load after `num_computed_tokens`, in whole blocks; and True if
            they are loaded concurrently with steps, until `get_finished` reports them. If False,
            they are loaded once `start_load_kv` of the next step, and `wait_for_layer_load` for
            each layer, have returned. The request waits either way.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """Schedule the loading of blocks, or note that the request starts.

        Args:
            request: the request of the last `get_num_new_matched_tokens`.
            block_ids: its blocks from the beginning, one list for each KV-cache group; 0 stands for
                a block that need not be loaded. Another list, in models with recurrent states, has
                the negative id of a state at the end if the state is to be loaded. The lists of
                groups with cross attention have the blocks of all rows; see `keys_to_load`.
            num_external_tokens: tokens to load into the last of these blocks; 0: the request
                starts in the step that is being scheduled.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        """Return the workers' instructions for a step that has been scheduled."""

    def step_succeeded(self) -> None:
        """Note that the oldest step with metadata has been computed: its saves are valid."""
        return

    def steps_failed(self) -> None:
        """Note that all steps in flight have failed: their saves are invalid."""
        return

    def forget_items(self, request: Request) -> None:
        """Forget what a request may have saved from its first item on: it may contain NaN.

        Args:
            request: a request with an item whose encoder failed; it may have ended.
        """
        return

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Process the transfers that all workers have finished."""
        return

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` that another engine needs to continue a request."""
        return None

    def reset_cache(self) -> bool:
        """Forget all saved blocks; return False if that is not possible."""
        return True

    def shutdown(self) -> None:
        """Stop threads and release files and memory."""
        return


class KVConnectorWorker(ABC):
    """Worker's half of a connector, in each process that computes.

    Args:
        config: settings of the engine.
        layout: layout of a block.
        notify: callback for new results of `get_finished`; any thread may call it.
    """

    metadata_type: type[KVConnectorMetadata] = KVConnectorMetadata
    """Type of the metadata of steps."""
    kv_caches: KVCaches
    """KV cache of this rank."""

    def __init__(
        self, config: EngineConfig, layout: KVLayout, notify: Callable[[], object]
    ) -> None:
        self.config, self.layout, self.notify = config, layout, notify

    @classmethod
    def host_nbytes(cls, config: KVTransferConfig) -> int:
        """Return the bytes of host memory that all workers of an engine allocate.

        Raises:
            ConfigError: the settings cannot be used.
        """
        return 0

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Accept the KV cache of this rank."""
        self.kv_caches = kv_caches

    def get_handshake_metadata(self) -> Any:
        """Return this rank's values for the scheduler's half, as plain values."""
        return None

    @abstractmethod
    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Start to load, before a step; called on the thread that computes."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Wait until the blocks that are not loaded concurrently with steps have a layer's values.

        Like `save_kv_layer`, it is called if a step has metadata: during a long step by a second
        thread, otherwise after the step.
        """
        return

    def save_kv_layer(self, layer: int) -> None:
        """Save a layer, which has the keys and values of all tokens of the step."""
        return

    @abstractmethod
    def wait_for_save(self) -> None:
        """Wait until the step's saves have been copied: its blocks may be written again."""

    def step_failed(self) -> None:
        """Note that the step failed: the results of later steps are invalid, too.

        Results are valid again from the first metadata that was built after `steps_failed`.
        """
        return

    @abstractmethod
    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests sent, and the requests loaded, since the last call."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the damaged blocks and states of the requests just reported as loaded."""
        return set()

    def shutdown(self) -> None:
        """Stop threads and release files and memory."""
        return


class KVConnectorBase(KVConnectorScheduler, KVConnectorWorker):
    """Base of custom connectors: as in vLLM, one class for both halves.

    Args:
        config: settings of the engine.
        role: the half that this object is.
        layout: layout of a block.
    """

    supports_states: ClassVar[bool] = False
    """True if it saves and loads recurrent states (`KVLayout.states`) and the blocks of cross
    attention (`KVLayout.cross_groups`), too."""

    def __init__(self, config: EngineConfig, role: KVConnectorRole, layout: KVLayout) -> None:
        KVConnectorScheduler.__init__(self, config, layout)
        KVConnectorWorker.__init__(self, config, layout, lambda: None)  # set by the registry
        self.role = role


def refuse_states(config: KVTransferConfig) -> None:
    """Raise ConfigError: the connector supports neither states nor cross attention."""
    raise ConfigError(
        f"kv_transfer_config: kv_connector={config.kv_connector} is not supported with models that "
        "have recurrent states or cross attention; use a built-in connector, or leave "
        "kv_transfer_config out."
    )


def accept_states(config: KVTransferConfig) -> None:
    """Accept models that have recurrent states or cross attention."""
    return


@dataclass(frozen=True)
class KVConnector:
    """A connector: its name in `kv_connector` is the name of this object in its module."""

    make_scheduler_half: Callable[[EngineConfig, KVLayout], KVConnectorScheduler]
    make_worker_half: Callable[[EngineConfig, KVLayout, Callable[[], object]], KVConnectorWorker]
    host_nbytes: Callable[[KVTransferConfig], int]
    """Implementation of `KVConnectorWorker.host_nbytes`."""
    check_states: Callable[[KVTransferConfig], None] = refuse_states
    """Raises ConfigError if it does not support models with recurrent states or cross attention."""


def transfer_config_of(config: EngineConfig) -> KVTransferConfig:
    """Return the settings of an engine's connector."""
    found = config.cache.kv_transfer_config
    assert found is not None
    return found
