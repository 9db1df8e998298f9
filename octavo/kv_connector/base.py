"""What a KV connector is: vLLM's V1 interface, with its names and its life cycle.

A connector is two objects that share nothing but the metadata of steps: the scheduler's half says
what is to be saved and loaded, the worker's half does it, in each of the processes that compute.
Imports no torch.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import RequestError
from octavo.kv_connector.layout import KVLayout
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.request import Request

if TYPE_CHECKING:
    from octavo.kv_connector.pages import KVCaches


class KVConnectorRole(enum.Enum):
    """Which half of a connector an object is."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(msgspec.Struct, array_like=True):
    """What the scheduler's half tells the worker's with a step; a connector adds its fields."""


class KVConnectorBase(ABC):
    """Base of connectors.

    What is loaded goes into blocks that nobody else can see until all ranks have said that they are
    right; a request is only computed once they are. So a load that fails, late or in part, costs
    time and never changes an answer.

    Args:
        config: the engine's settings; the connector's own are its `kv_transfer_config`.
        role: which half this is.
        layout: what a block is made of.
    """

    metadata_type: type[KVConnectorMetadata] = KVConnectorMetadata
    """Of what `build_connector_meta` returns."""

    def __init__(self, config: EngineConfig, role: KVConnectorRole, layout: KVLayout) -> None:
        self.config, self.role, self.layout = config, role, layout
        self.notify: Callable[[], object] = lambda: None
        """Worker: to be called, on any thread, when `get_finished` has something new."""

    @property
    def transfer_config(self) -> KVTransferConfig:
        """The connector's settings."""
        found = self.config.cache.kv_transfer_config
        assert found is not None
        return found

    @classmethod
    def host_nbytes(cls, config: KVTransferConfig) -> int:
        """Bytes of the host's memory that all workers of an engine take for it.

        Raises:
            ConfigError: the settings cannot be used.
        """
        return 0

    # The scheduler's half. All of it is called on one thread.

    @property
    def num_expired(self) -> int:
        """Requests whose blocks were kept for somebody who did not come."""
        return 0

    def set_xfer_handshake_metadata(self, metadata: list[Any]) -> None:
        """Is given what each rank's `get_handshake_metadata` returned, before any request."""
        return

    def check_request(self, request: Request) -> None:
        """Looks at a request that comes.

        Raises:
            RequestError: its `kv_transfer_params` are wrong.
        """
        if request.options.kv_transfer_params is not None:
            raise RequestError(
                f"kv_transfer_params: this server's {type(self).__name__} takes none; leave them "
                "out, or start it with another kv_connector.",
                "kv_transfer_params",
            )

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many more tokens of a request can be loaded.

        Args:
            request: one that is about to be started.
            num_computed_tokens: what the prefix cache has of it; whole blocks.

        Returns:
            Tokens behind these, in whole blocks; and whether they come beside steps, until
            `get_finished` says that they have. If not, they are there when `start_load_kv` of the
            next step, and `wait_for_layer_load` for each layer, have returned. The request waits
            either way.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """Has blocks loaded, or takes note that a request is started.

        Args:
            request: the one that was asked about.
            block_ids: its blocks from the beginning, one list for each KV-cache group; 0 stands for
                a block that it does not need.
            num_external_tokens: tokens to be loaded into the last ones of them; 0: it is started,
                in the step that is being scheduled.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        """What the workers are to do before, in and after a step that has been scheduled."""

    def step_succeeded(self) -> None:
        """The oldest step that metadata was built for has been computed: what it saved is good."""
        return

    def steps_failed(self) -> None:
        """No step in flight has computed what it should: nothing that they save is good."""
        return

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Takes in what all workers have finished."""
        return

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """A request has its last token: the `kv_transfer_params` of whoever goes on with it."""
        return None

    def reset_cache(self) -> bool:
        """Forgets all that was saved; False if that is not possible."""
        return True

    # The worker's half.

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """The KV cache of this rank is there."""
        return

    def get_handshake_metadata(self) -> Any:
        """What the scheduler's half must know of this rank, as plain values."""
        return None

    @abstractmethod
    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Begins with what is to be loaded, before a step; on the thread that computes."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Returns when what does not come beside steps is there of a layer.

        Like `save_kv_layer` it is called where a step has metadata: while a long step is computed
        on a thread beside it, otherwise behind it.
        """
        return

    def save_kv_layer(self, layer: int) -> None:
        """A layer has the keys and values of all tokens of the step."""
        return

    @abstractmethod
    def wait_for_save(self) -> None:
        """Returns when what the step had to save has been copied: blocks may be written again."""

    def step_failed(self) -> None:
        """The step was not computed; what those behind it compute is not good either.

        That is so until there is metadata that was built after `steps_failed`.
        """
        return

    @abstractmethod
    def get_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose sending, and whose loading, has ended since the last call."""

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of requests just told as loaded that are not what they should be."""
        return set()

    def shutdown(self) -> None:
        """Ends threads, and lets go of files and memory. Both halves."""
        return
