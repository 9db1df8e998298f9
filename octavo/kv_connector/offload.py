"""`OffloadingConnector`: copies of blocks in the host's memory and in a file.

After the step that computes blocks, they are copied to memory; another thread copies them to the
file. Each new request is looked up in both. A block of the file is loaded through memory, where it
stays.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from octavo import _native
from octavo.config import EngineConfig, KVTransferConfig
from octavo.errors import ConfigError
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
from octavo.kv_connector.copy_cache import EVICTION_POLICIES, CopyCache, Key
from octavo.kv_connector.copy_file import CopyFile, read_records
from octavo.kv_connector.layout import KVLayout
from octavo.kv_connector.pages import BlockCopy, Bytes, KVCaches, LayerSaves
from octavo.kv_connector.results import LoadResults, OnceLogger
from octavo.kv_connector.tracking import BlockTracker, find_match, item_keys, keys_to_load
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.request import Request

logger = logging.getLogger(__name__)

_NO_SLOT = -1
_PIECE = 2**24  # bytes of memory that are allocated at once


class OffloadingSettings(KVConnectorSettings, frozen=True, kw_only=True):
    """`kv_connector_extra_config`; the first three names are vLLM's."""

    cpu_bytes_to_use: int = 0
    """Bytes of memory for blocks, of all workers together."""
    eviction_policy: str = "lru"
    """Eviction policy: lru, or arc, which keeps blocks that were requested again longer."""
    file_path: str | None = None
    """Folder of the file; None: no file."""
    file_bytes_to_use: int = 0
    """Bytes of the files, of all workers together."""

    def __post_init__(self) -> None:
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ValueError(
                f"eviction_policy={self.eviction_policy!r} is not one of "
                f"{', '.join(EVICTION_POLICIES)}."
            )
        if self.cpu_bytes_to_use <= 0:
            raise ValueError(
                f"cpu_bytes_to_use={self.cpu_bytes_to_use} has no room for a block; set it to the "
                "bytes that blocks may occupy in memory."
            )
        if (self.file_path is None) != (self.file_bytes_to_use <= 0):
            raise ValueError(
                f"file_path={self.file_path!r} and file_bytes_to_use={self.file_bytes_to_use} go "
                "together: a folder, and the size of the file."
            )

    def num_slots(self, layout: KVLayout) -> tuple[int, int]:
        """Return the numbers of slots in memory and in the file.

        Raises:
            ConfigError: a block does not fit.
        """
        nbytes = layout.slot_nbytes * layout.world_size
        content = "a block and a recurrent state" if layout.states else "a block"
        sizes = {"cpu_bytes_to_use": self.cpu_bytes_to_use}
        if self.file_path is not None:
            sizes["file_bytes_to_use"] = self.file_bytes_to_use
        for name, size in sizes.items():
            if size < nbytes * layout.least_copies:
                raise ConfigError(
                    f"kv_transfer_config: {name}={size} has no room for {content}, which needs "
                    f"{nbytes * layout.least_copies} bytes; raise it."
                )
        return self.cpu_bytes_to_use // nbytes, self.file_bytes_to_use // nbytes


class Save(msgspec.Struct, array_like=True):
    """Block, or piece of a state, to copy to memory after the step; see `BlockCopy`."""

    group_id: int
    block_id: int
    slot: int
    block_hash: bytes
    file_slot: int
    """Slot in the file; -1: none."""
    number: int
    """Number of `CopyFile.write`."""


class Load(msgspec.Struct, array_like=True):
    """Block, or piece of a state, to copy to the KV cache."""

    group_id: int
    block_id: int
    slot: int
    block_hash: bytes
    file_slot: int
    """Slot in the file from which it is read first; -1: it is in memory."""


class OffloadingMetadata(KVConnectorMetadata, array_like=True):
    """Instructions for the workers in a step."""

    epoch: int = 0
    """Number of times that steps have failed."""
    saves: list[Save] = msgspec.field(default_factory=list)
    loads: dict[str, list[Load]] = msgspec.field(default_factory=dict)
    emptied: list[int] = msgspec.field(default_factory=list)
    """Slots of the file whose copies must not be found again, before the step's saves."""


class OffloadingScheduler(KVConnectorScheduler):
    """Index of the blocks in memory and in the file; the same for all ranks."""

    settings_type: type[OffloadingSettings] = OffloadingSettings

    def __init__(self, config: EngineConfig, layout: KVLayout) -> None:
        super().__init__(config, layout)
        settings = self.settings_type.of(self.transfer_config)
        num_slots, num_file_slots = settings.num_slots(layout)
        policy = EVICTION_POLICIES[settings.eviction_policy]
        self._memory = policy(num_slots)
        self._file: CopyCache | None = None
        self._next_number = 1
        if settings.file_path is not None:
            self._file = policy(num_file_slots)
            self._restore(self._file, file_of(self.transfer_config, settings, layout))
        self._tracker = BlockTracker(layout)
        self._epoch = 0
        self._saving: deque[list[Save]] = deque()
        """Saves of each step in flight."""
        self._unsure: set[Key] = set()
        """Keys of all saves in flight."""
        self._new_loads: dict[str, list[Load]] = {}
        """Loads for the next metadata."""
        self._loads: dict[str, list[Load]] = {}
        self._states: list[SavedState] = []
        """States to save in the next step."""
        self._dropped: set[Key] = set()
        """Keys of pinned copies that are to be forgotten."""
        self._emptied: list[int] = []
        """Slots of the file for the next metadata."""

    def _restore(self, file: CopyCache, path: Path) -> None:
        """Add the blocks in the file of rank 0; loading detects if another rank lacks one."""
        found = sorted(read_records(path, self.layout))
        for number, slot, group_id, block_hash in found:
            self._next_number = number + 1
            if slot < file.num_slots and (group_id, block_hash) not in file:
                file.restore((group_id, block_hash), slot)
        if found:
            logger.info("KV blocks of an earlier run", extra={"file": path, "blocks": len(found)})

    def _has(self, key: Key) -> bool:
        """Return True if a block can be loaded."""
        if key in self._unsure or key in self._dropped:
            return False
        return key in self._memory or (self._file is not None and key in self._file)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Implement `KVConnectorScheduler`."""
        return find_match(self, request, num_computed_tokens, self._has), True

    def update_state_after_alloc(
        self, request: Request, block_ids: list[list[int]], num_external_tokens: int
    ) -> None:
        """Implement `KVConnectorScheduler`."""
        if num_external_tokens == 0:
            self._tracker.start(request, block_ids)
            return
        keys = list(keys_to_load(self.layout, request, block_ids, num_external_tokens))
        keys.sort(key=lambda wanted: wanted[0] not in self._memory)  # pin before others evict
        loads = [self._load(key, block_id) for key, block_id in keys]
        self._new_loads[request.request_id] = self._loads[request.request_id] = loads

    def _load(self, key: Key, block_id: int) -> Load:
        """Return the load of a block; pin its copies in memory and file until the load ends."""
        slot, file_slot = _NO_SLOT, _NO_SLOT
        if self._file is not None and key in self._file:
            self._file.touch(key)
        if key in self._memory:
            self._memory.touch(key)
            self._memory.pin(key)
            slot = self._memory.slot(key)
        else:
            assert self._file is not None
            self._file.pin(key)
            file_slot = self._file.slot(key)
            found = self._memory.insert(key, pin=True)
            slot = _NO_SLOT if found is None else found
        group_id, block_hash = key
        return Load(group_id, block_id, slot, block_hash, file_slot)

    def note_states(self, saved: Sequence[SavedState], dropped: Sequence[bytes]) -> None:
        """Implement `KVConnectorScheduler`."""
        for block_hash in dropped:
            for key in self.layout.state_keys(block_hash):
                self._forget(key)
        self._states += saved

    def forget_items(self, request: Request) -> None:
        """Implement `KVConnectorScheduler`."""
        for key in item_keys(self.layout, request):
            self._forget(key)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadingMetadata | None:
        """Implement `KVConnectorScheduler`."""
        wanted = [
            ((block.group_id, block.block_hash), block.block_id)
            for block in self._tracker.full_blocks(scheduler_output, self._saves_all)
            if block.request.cache_scope is None
        ]
        states = [(state.state_id, state.block_hash) for state in self._states]
        states += self._tracker.sources(scheduler_output, self._saves_all)
        self._states = []
        for state_id, block_hash in states:
            wanted += [(key, state_id) for key in self.layout.state_keys(block_hash)]
        saves: list[Save] = []
        for key, block_id in wanted if self.transfer_config.saves else []:
            save = self._save(key, block_id)
            if save is not None:
                saves.append(save)
        if scheduler_output.scheduled_reqs:
            self._saving.append(saves)
            self._unsure.update((save.group_id, save.block_hash) for save in saves)
        loads, self._new_loads = self._new_loads, {}
        emptied, self._emptied = self._emptied, []
        if not (saves or loads or emptied):
            return None
        return OffloadingMetadata(self._epoch, saves, loads, emptied)

    def _saves_all(self, request: Request) -> bool:
        """Return True if a request's blocks and state from the prefix cache are saved, too."""
        return False

    def _save(self, key: Key, block_id: int) -> Save | None:
        """Allocate slots for a block; None if it is in memory already, or all slots are pinned."""
        file_slot = None
        if self._file is not None and key in self._file:
            self._file.touch(key)
        if key in self._memory:
            self._memory.touch(key)
            return None
        slot = self._memory.insert(key, pin=True)
        if slot is None:
            return None
        number = 0
        if self._file is not None and key not in self._file:
            file_slot = self._file.insert(key, pin=True)
            number, self._next_number = self._next_number, self._next_number + 1
        if file_slot is None:
            file_slot = _NO_SLOT
        group_id, block_hash = key
        return Save(group_id, block_id, slot, block_hash, file_slot, number)

    def step_succeeded(self) -> None:
        """Implement `KVConnectorScheduler`: the saved blocks can be loaded."""
        for save in self._saving.popleft():
            self._settle(save)

    def steps_failed(self) -> None:
        """Implement `KVConnectorScheduler`."""
        self._epoch += 1
        for saves in self._saving:
            for save in saves:
                self._settle(save)
                self._forget((save.group_id, save.block_hash))
        self._saving.clear()

    def _settle(self, save: Save) -> None:
        key = save.group_id, save.block_hash
        self._unsure.remove(key)
        self._unpin(key, in_file=save.file_slot != _NO_SLOT)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Implement `KVConnectorScheduler`: unpin loaded blocks, and forget damaged ones."""
        damaged = set(output.invalid_block_ids)
        for req_id in output.finished_recving:
            loads = self._loads.pop(req_id)
            for load in loads:
                key = load.group_id, load.block_hash
                self._unpin(
                    key, in_memory=load.slot != _NO_SLOT, in_file=load.file_slot != _NO_SLOT
                )
                if load.block_id in damaged:
                    self._forget(key)

    def _unpin(self, key: Key, *, in_memory: bool = True, in_file: bool = False) -> None:
        """Undo one `pin` of the copies of a block."""
        if in_memory:
            self._memory.unpin(key)
        if in_file:
            assert self._file is not None
            self._file.unpin(key)
        if key in self._dropped:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        """Forget the copies of a block, as soon as nothing writes or reads them."""
        caches = [it for it in (self._memory, self._file) if it is not None and key in it]
        if any(cache.pinned(key) for cache in caches):
            self._dropped.add(key)
            return
        self._dropped.discard(key)
        for cache in caches:
            if cache is self._file:
                self._emptied.append(cache.slot(key))
            cache.remove(key)

    def reset_cache(self) -> bool:
        """Implement `KVConnectorScheduler`; blocks that are being copied stay."""
        self._memory.clear()
        if self._file is not None:
            self._file.clear()
        return True


class OffloadingWorker(KVConnectorWorker):
    """Memory and file of one rank."""

    metadata_type = OffloadingMetadata
    settings_type: type[OffloadingSettings] = OffloadingSettings

    def __init__(
        self,
        config: EngineConfig,
        layout: KVLayout,
        notify: Callable[[], object],
        memory: Bytes | None = None,
    ) -> None:
        from octavo.kernels.memory import map_memory  # imports torch

        super().__init__(config, layout, notify)
        transfer = transfer_config_of(config)
        settings = self.settings_type.of(transfer)
        self._size = layout.copy_nbytes
        self._loaded = LoadResults(notify)
        num_slots, num_file_slots = settings.num_slots(layout)
        self._file: CopyFile | None = None
        self._num_found = 0
        if settings.file_path is not None:
            path = file_of(transfer, settings, layout)
            self._file = CopyFile(path, layout, num_file_slots)
            self._num_found = sum(1 for _ in read_records(path, layout))
        if memory is None:
            memory = map_memory(num_slots * self._size).numpy()
        self._memory = memory
        self._staging = np.zeros(self._size, np.uint8)
        """Buffer for blocks that are loaded while memory has no slot."""
        self._metadata = OffloadingMetadata()
        self._saving: LayerSaves | None = None
        self._failed_epoch = -1
        self._once = OnceLogger()
        self._loader = ThreadPoolExecutor(1, "octavo-kv-loads")
        self._spiller = ThreadPoolExecutor(1, "octavo-kv-spills")
        self._spills: dict[int, Future[None]] = {}
        """Writes to the file, by the slot in memory that they read."""
        self._file_spills: dict[int, Future[None]] = {}
        """Writes to the file, by the slot in the file that they write."""
        self._touching = ThreadPoolExecutor(1, "octavo-kv-memory")
        self._closing = False

    @classmethod
    def host_nbytes(cls, config: KVTransferConfig) -> int:
        """Implement `KVConnectorWorker`."""
        return cls.settings_type.of(config).cpu_bytes_to_use

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Implement `KVConnectorWorker`."""
        super().register_kv_caches(kv_caches)
        if self._num_found:
            self._touching.submit(self._touch)

    def _touch(self) -> None:
        """Touch the memory that blocks of an earlier run will need.

        The system allocates new pages more slowly than it reads a file: the first requests would
        wait for them.
        """
        for _ in self.kv_caches.touch(1 + self._num_found):  # after the null block
            if self._closing:
                return
        end = min(self._num_found * self._size, len(self._memory))
        for start in range(0, end, _PIECE):
            if self._closing:
                return
            address = int(self._memory.ctypes.data) + start
            _native.touch_pages(address, min(_PIECE, end - start))

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Implement `KVConnectorWorker`."""
        assert isinstance(metadata, OffloadingMetadata)
        self._metadata, self._saving = metadata, None
        for file_slot in metadata.emptied:
            self._spiller.submit(self._empty, file_slot)  # after all earlier writes
        for req_id, loads in metadata.loads.items():
            blocks = {load.block_id for load in loads}
            self._loader.submit(self._loaded.run, req_id, blocks, partial(self._copy, loads))

    def step_failed(self) -> None:
        """Note the failure: saves are invalid until the scheduler knows of it."""
        self._failed_epoch = self._metadata.epoch

    def save_kv_layer(self, layer: int) -> None:
        """Implement `KVConnectorWorker`."""
        if self._saving is None:
            self._saving = self._begin_saving()
        self._saving.save_layer(layer)

    def _begin_saving(self) -> LayerSaves:
        for save in self._saves:
            _wait(self._spills.pop(save.slot, None))
        return self.kv_caches.saving(
            [
                BlockCopy(s.group_id, s.block_id, self._address(s.slot), s.block_hash)
                for s in self._saves
            ]
        )

    @property
    def _saves(self) -> list[Save]:
        """Blocks that the step saves."""
        metadata = self._metadata
        return [] if metadata.epoch <= self._failed_epoch else metadata.saves

    def wait_for_save(self) -> None:
        """Implement `KVConnectorWorker`: start to write the step's blocks to the file, too."""
        for save in self._saves:
            if save.file_slot != _NO_SLOT:
                spill = self._spiller.submit(self._spill, save)
                self._spills[save.slot] = self._file_spills[save.file_slot] = spill

    def _spill(self, save: Save) -> None:
        assert self._file is not None
        copy = self._copy_at(save.slot)
        try:
            self._file.write(save.file_slot, copy, save.number, save.group_id, save.block_hash)
        except OSError as error:
            self._once.warning(f"KV blocks cannot be written ({error.strerror or error})")

    def _empty(self, file_slot: int) -> None:
        assert self._file is not None
        try:
            self._file.remove(file_slot)
        except OSError as error:
            self._once.warning(f"KV blocks cannot be removed ({error.strerror or error})")

    def _copy(self, loads: list[Load]) -> set[int]:
        """Copy blocks; return those that are damaged."""
        damaged: set[int] = set()
        there: list[BlockCopy] = []
        for load in loads:
            if load.file_slot != _NO_SLOT and not self._read(load):
                damaged.add(load.block_id)
            elif load.slot != _NO_SLOT:
                address = self._address(load.slot)
                there.append(BlockCopy(load.group_id, load.block_id, address, load.block_hash))
            else:
                address = self._staging.ctypes.data
                copy = BlockCopy(load.group_id, load.block_id, address, load.block_hash)
                damaged |= self.kv_caches.load([copy])
        return damaged | self.kv_caches.load(there)

    def _read(self, load: Load) -> bool:
        """Read a copy from the file; return False if that fails."""
        assert self._file is not None
        _wait(self._file_spills.pop(load.file_slot, None))
        copy = self._staging.data
        if load.slot != _NO_SLOT:
            _wait(self._spills.get(load.slot))
            copy = self._copy_at(load.slot)
        try:
            self._file.read(load.file_slot, copy)
        except OSError as error:
            self._once.warning(f"KV blocks cannot be read ({error.strerror or error})")
            copy[:] = bytes(len(copy))  # no earlier contents of the slot
            return False
        return True

    def _address(self, slot: int) -> int:
        return int(self._memory.ctypes.data) + slot * self._size

    def _copy_at(self, slot: int) -> memoryview:
        return self._memory.data[slot * self._size : (slot + 1) * self._size]

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Implement `KVConnectorWorker`."""
        return set(), self._loaded.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Implement `KVConnectorWorker`."""
        return self._loaded.take_damaged()

    def shutdown(self) -> None:
        """Write the remaining blocks, and release the file."""
        self._closing = True
        self._touching.shutdown()
        self._loader.shutdown(cancel_futures=True)
        self._spiller.shutdown()
        if self._file is not None:
            self._file.close()


OffloadingConnector = KVConnector(
    OffloadingScheduler, OffloadingWorker, OffloadingWorker.host_nbytes, accept_states
)


def file_of(config: KVTransferConfig, settings: OffloadingSettings, layout: KVLayout) -> Path:
    """Return the path of a rank's file."""
    assert settings.file_path is not None
    name = f"{layout.identity.hex()[:16]}-{config.engine_id}-{layout.rank}of{layout.world_size}"
    return Path(settings.file_path).expanduser() / f"{name}.kv"


def _wait(future: Future[None] | None) -> None:
    if future is not None:
        future.result()
