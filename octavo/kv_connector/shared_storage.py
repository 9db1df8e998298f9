"""`SharedStorageConnector`: copies of blocks in a folder that any number of engines share.

After the step that computes blocks, they are copied to memory; threads write the copies. Each new
request is looked up in the folder.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import ConfigError, reason_of
from octavo.kv_connector.base import (
    KVConnector,
    KVConnectorMetadata,
    KVConnectorScheduler,
    KVConnectorSettings,
    KVConnectorWorker,
    SavedState,
    accept_states,
    transfer_config_of,
)
from octavo.kv_connector.copy_cache import Key
from octavo.kv_connector.layout import KVLayout, KVPart
from octavo.kv_connector.pages import BlockCopy, LayerSaves
from octavo.kv_connector.results import LoadResults, OnceLogger
from octavo.kv_connector.shared_folder import SharedFolder
from octavo.kv_connector.tracking import (
    BlockTracker,
    FullBlock,
    find_match,
    item_keys,
    keys_to_load,
)
from octavo.messages import SchedulerOutput
from octavo.request import Request

logger = logging.getLogger(__name__)

# Number of writing threads; they mostly wait for the disk.
_WRITERS = 4
# Number of blocks that are read before they are copied together.
_BATCH = 16
# Seconds of a step that may be spent waiting for blocks to be written.
_MOST_WAITING = 1.0


class SharedStorageSettings(KVConnectorSettings, frozen=True, kw_only=True):
    """`kv_connector_extra_config`; the first name is vLLM's."""

    shared_storage_path: str
    """Path of the folder."""
    max_bytes: int = 10 * 2**30
    """Bytes of the folder, of all engines and models together."""
    write_buffer_bytes: int = 256 * 2**20
    """Bytes of memory for blocks that are being written, of all workers of an engine."""

    def __post_init__(self) -> None:
        if not self.shared_storage_path:
            raise ValueError("shared_storage_path is empty; set it to a folder.")

    def num_slots(self, layout: KVLayout) -> int:
        """Return the number of blocks that can be written at a time.

        Raises:
            ConfigError: a block does not fit.
        """
        nbytes = layout.slot_nbytes * layout.world_size
        content = "a block and a recurrent state" if layout.states else "a block"
        needs = {"max_bytes": nbytes * layout.least_copies, "write_buffer_bytes": nbytes}
        for name, need in needs.items():
            if getattr(self, name) < need:
                raise ConfigError(
                    f"kv_transfer_config: {name}={getattr(self, name)} has no room for {content}, "
                    f"which needs {need} bytes; raise it."
                )
        return self.write_buffer_bytes // nbytes

    def folder(self, config: EngineConfig, layout: KVLayout) -> SharedFolder:
        """Return the folder, for a rank or the scheduler."""
        device = config.device
        tp, pp = device.tensor_parallel_size, device.pipeline_parallel_size
        division = f"{layout.world_size}.tp{tp}pp{pp}"
        if device.pipeline_layers is not None:
            division += "-" + device.pipeline_layers.replace(",", "-")
        path = Path(self.shared_storage_path).expanduser()
        return SharedFolder(path, layout, division, self.max_bytes)


class Block(msgspec.Struct, array_like=True):
    """Block to save or load."""

    group_id: int
    block_id: int
    block_hash: bytes


class SharedStorageMetadata(KVConnectorMetadata, array_like=True):
    """Instructions for the workers in a step."""

    epoch: int = 0
    """Number of times that steps have failed."""
    saves: list[Block] = msgspec.field(default_factory=list)
    loads: dict[str, list[Block]] = msgspec.field(default_factory=dict)
    forgotten: list[Key] = msgspec.field(default_factory=list)
    """Blocks whose files must be removed, also if earlier steps have saved them."""


class SharedStorageScheduler(KVConnectorScheduler):
    """Lookup of requests in the folder."""

    def __init__(self, config: EngineConfig, layout: KVLayout) -> None:
        super().__init__(config, layout)
        settings = SharedStorageSettings.of(self.transfer_config)
        settings.num_slots(layout)  # raises
        self._path = settings.shared_storage_path
        self._folder = settings.folder(config, layout)
        self._epoch = 0
        self._tracker = BlockTracker(layout)
        self._new_loads: dict[str, list[Block]] = {}
        """Loads for the next metadata."""
        self._states: list[SavedState] = []
        """States to save in the next step."""
        self._forgotten: list[Key] = []
        """Blocks for the next metadata."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Implement `KVConnectorScheduler`."""
        if not self.transfer_config.loads:
            return 0, True
        return find_match(self, request, num_computed_tokens, self._has), True

    def _has(self, key: tuple[int, bytes]) -> bool:
        division = self._folder.find(*key)
        if key[0] < len(self.layout.groups):
            return division is not None
        return division == self._folder.division  # states cannot be put together

    def update_state_after_alloc(
        self, request: Request, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """Implement `KVConnectorScheduler`."""
        if num_external_tokens == 0:
            self._tracker.start(request, block_ids)
            return
        self._new_loads[request.request_id] = [
            Block(group_id, block_id, block_hash)
            for (group_id, block_hash), block_id in keys_to_load(
                self.layout, request, block_ids, num_external_tokens
            )
        ]

    def note_states(self, saved: Sequence[SavedState], dropped: Sequence[bytes]) -> None:
        """Implement `KVConnectorScheduler`: save the states of prompts.

        Those of answers are soon replaced, and their files would remain.
        """
        self._states += [state for state in saved if state.in_prompt]

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> SharedStorageMetadata | None:
        """Implement `KVConnectorScheduler`."""
        saves = [
            Block(block.group_id, block.block_id, block.block_hash)
            for block in self._tracker.full_blocks(scheduler_output)
            if self._is_wanted(block)
        ]
        states, self._states = self._states, []
        saves += [
            Block(group_id, state.state_id, block_hash)
            for state in states
            for group_id, block_hash in self.layout.state_keys(state.block_hash)
            if self.transfer_config.saves and not self._has((group_id, block_hash))
        ]
        loads, self._new_loads = self._new_loads, {}
        forgotten, self._forgotten = self._forgotten, []
        if not (saves or loads or forgotten):
            return None
        return SharedStorageMetadata(self._epoch, saves, loads, forgotten)

    def _is_wanted(self, block: FullBlock) -> bool:
        if not self.transfer_config.saves or block.request.cache_scope is not None:
            return False
        return not self._has((block.group_id, block.block_hash))

    def steps_failed(self) -> None:
        """Implement `KVConnectorScheduler`."""
        self._epoch += 1

    def forget_items(self, request: Request) -> None:
        """Implement `KVConnectorScheduler`: remove the files; workers may be writing others."""
        keys = list(item_keys(self.layout, request))
        self._folder.forget(keys)
        self._forgotten += keys

    def reset_cache(self) -> bool:
        """Implement `KVConnectorScheduler`; other engines use the folder, too."""
        logger.warning("%s is shared and stays as it is; remove it to empty it", self._path)
        return False


class SharedStorageWorker(KVConnectorWorker):
    """Copies of a rank's blocks to the folder and back."""

    metadata_type = SharedStorageMetadata

    def __init__(
        self, config: EngineConfig, layout: KVLayout, notify: Callable[[], object]
    ) -> None:
        from octavo.kernels.memory import map_memory  # imports torch

        super().__init__(config, layout, notify)
        transfer = transfer_config_of(config)
        settings = SharedStorageSettings.of(transfer)
        num_slots = settings.num_slots(layout) if transfer.saves else 0
        self._loaded = LoadResults(notify)
        self._folder = settings.folder(config, layout)
        self._size = layout.copy_nbytes
        self._memory = map_memory(max(1, num_slots) * self._size).numpy()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Free slots in `_memory`."""
        for slot in range(num_slots):
            self._free.put(slot)
        self._metadata = SharedStorageMetadata()
        self._saving: LayerSaves | None = None
        """Copying of the blocks in `_begun`."""
        self._begun: list[tuple[Block, int]] = []
        """Blocks that the step saves, and their slots."""
        self._left: list[Block] = []
        """Blocks of the step that have no slot yet."""
        self._writes: dict[int, tuple[Key, Future[None]]] = {}
        """The last block of each slot, and its write."""
        self._failed_epoch = -1
        self._once = OnceLogger()
        self._loader = ThreadPoolExecutor(1, "octavo-kv-loads")
        self._writers = ThreadPoolExecutor(_WRITERS, "octavo-kv-writes")

    @classmethod
    def host_nbytes(cls, config: KVTransferConfig) -> int:
        """Implement `KVConnectorWorker`."""
        settings = SharedStorageSettings.of(config)
        return settings.write_buffer_bytes if config.saves else 0

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Implement `KVConnectorWorker`."""
        assert isinstance(metadata, SharedStorageMetadata)
        self._metadata, self._saving, self._begun = metadata, None, []
        self._left = [] if metadata.epoch <= self._failed_epoch else metadata.saves
        if metadata.forgotten:
            self._forget(metadata.forgotten)
        for req_id, blocks in metadata.loads.items():
            block_ids = {block.block_id for block in blocks}
            self._loader.submit(self._loaded.run, req_id, block_ids, partial(self._copy, blocks))

    def step_failed(self) -> None:
        """Note the failure: saves are invalid until the scheduler knows of it."""
        self._failed_epoch = self._metadata.epoch
        for _, slot in self._begun:
            self._free.put(slot)

    # Saving

    def save_kv_layer(self, layer: int) -> None:
        """Implement `KVConnectorWorker`: copy a layer of the blocks that have slots."""
        if self._saving is None:
            self._begun = self._take_places(0.0)
            self._saving = self.kv_caches.saving(self._copies(self._begun))
        self._saving.save_layer(layer)

    def wait_for_save(self) -> None:
        """Implement `KVConnectorWorker`: start to write, and copy the other blocks.

        Blocks for which no slot becomes free within a second are dropped.
        """
        until = time.monotonic() + _MOST_WAITING
        self._write_soon(self._begun)
        while self._left:
            some = self._take_places(max(0.0, until - time.monotonic()))
            if not some:
                self._once.warning("KV blocks are not written as fast as they are computed")
                return
            self.kv_caches.save(self._copies(some))
            self._write_soon(some)

    def _take_places(self, timeout: float) -> list[tuple[Block, int]]:
        """Allocate free slots to the remaining blocks; wait for the first one."""
        found: list[tuple[Block, int]] = []
        try:
            for block in self._left:
                found.append((block, self._free.get(timeout=0.0 if found else timeout)))
        except queue.Empty:
            pass
        self._left = self._left[len(found) :]
        return found

    def _copies(self, blocks: list[tuple[Block, int]]) -> list[BlockCopy]:
        base = int(self._memory.ctypes.data)
        return [
            BlockCopy(block.group_id, block.block_id, base + slot * self._size, block.block_hash)
            for block, slot in blocks
        ]

    def _write_soon(self, blocks: list[tuple[Block, int]]) -> None:
        for block, slot in blocks:
            key = block.group_id, block.block_hash
            self._writes[slot] = key, self._writers.submit(self._write, block, slot)

    def _forget(self, keys: Sequence[Key]) -> None:
        """Remove the files of blocks, also of those that are still being written."""
        wanted = set(keys)
        writes = [write for key, write in self._writes.values() if key in wanted]
        self._writers.submit(self._remove, keys, writes)  # they began earlier, so they end

    def _remove(self, keys: Sequence[Key], writes: Sequence[Future[None]]) -> None:
        wait(writes)
        for key in keys:
            self._folder.remove(self._folder.division, self.layout.rank, *key)

    def _write(self, block: Block, slot: int) -> None:
        copy = self._memory.data[slot * self._size : (slot + 1) * self._size]
        try:
            self._folder.write(block.group_id, block.block_hash, copy)
        except OSError as error:
            self._once.warning(f"KV blocks cannot be written ({reason_of(error)})")
        finally:
            self._free.put(slot)

    # Loading

    def _copy(self, blocks: list[Block]) -> set[int]:
        """Load blocks; return the damaged ones."""
        pieces = [block for block in blocks if block.group_id >= len(self.layout.groups)]
        blocks = [block for block in blocks if block.group_id < len(self.layout.groups)]
        damaged: set[int] = set()
        for begin in range(0, len(pieces), _BATCH):
            some = pieces[begin : begin + _BATCH]
            damaged |= self._copy_part(self._folder.division, self.layout.rank, some, None)[1]
        for begin in range(0, len(blocks), _BATCH):
            batch: dict[str, list[Block]] = {}
            for block in blocks[begin : begin + _BATCH]:
                division = self._folder.find(block.group_id, block.block_hash)
                if division is None:
                    damaged.add(block.block_id)
                else:
                    batch.setdefault(division, []).append(block)
            for division, some in batch.items():
                damaged |= self._copy_parts(division, some)
        return damaged

    def _copy_parts(self, division: str, blocks: list[Block]) -> set[int]:
        """Load blocks from the files of a division's ranks; return the damaged ones."""
        missing, damaged = self.layout.part.cells(), set[int]()
        for rank in range(int(division.partition(".")[0])):
            part, bad = self._copy_part(division, rank, blocks, missing)
            damaged |= bad
            missing -= part.cells() if part is not None else set()
            if not missing:
                return damaged
        return {block.block_id for block in blocks}

    def _copy_part(
        self,
        division: str,
        rank: int,
        blocks: list[Block],
        missing: set[tuple[int, int, int]] | None,
    ) -> tuple[KVPart | None, set[int]]:
        """Load blocks from the files of one rank, if its part has missing cells.

        Args:
            division: division whose files are read.
            rank: rank of the files.
            blocks: the blocks, or pieces of states.
            missing: the missing cells; None for pieces of states.

        Returns:
            The rank's part (None: no file could be read), and the ids of damaged blocks.
        """
        damaged: set[int] = set()
        copies: list[BlockCopy] = []
        part, memory = None, np.empty(0, np.uint8)
        for block in blocks:
            try:
                with self._folder.open(division, rank, block.group_id, block.block_hash) as file:
                    if part is None:
                        part = file.part
                        if missing is not None and not part.cells() & missing:
                            return part, set()
                        memory = np.empty(len(blocks) * part.copy_nbytes, np.uint8)
                    if file.part != part:
                        raise OSError("files of one rank have different parts")
                    at = len(copies) * part.copy_nbytes
                    file.read(memory.data[at : at + part.copy_nbytes])
            except OSError as error:
                damaged.add(block.block_id)
                self._once.warning(f"KV blocks cannot be read ({reason_of(error)})")
                self._folder.remove(division, rank, block.group_id, block.block_hash)
            else:
                address = int(memory.ctypes.data) + at
                copies.append(BlockCopy(block.group_id, block.block_id, address, block.block_hash))
        bad = self.kv_caches.load(copies, part) if copies else set()
        for block in blocks:
            if block.block_id in bad:
                self._folder.remove(division, rank, block.group_id, block.block_hash)
        return part, damaged | bad

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Implement `KVConnectorWorker`."""
        return set(), self._loaded.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Implement `KVConnectorWorker`."""
        return self._loaded.take_damaged()

    def shutdown(self) -> None:
        """Write the remaining blocks."""
        self._loader.shutdown(cancel_futures=True)
        self._writers.shutdown()


SharedStorageConnector = KVConnector(
    SharedStorageScheduler, SharedStorageWorker, SharedStorageWorker.host_nbytes, accept_states
)
