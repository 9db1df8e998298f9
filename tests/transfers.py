"""Worker's half of an `OffloadingConnector` on the fake worker's memory, as late as possible."""

from __future__ import annotations

import msgspec

from octavo.config import CacheConfig, EngineConfig, KVTransferConfig
from octavo.kv_cache.groups import KVCacheConfig
from octavo.kv_cache.states import slot_of_state
from octavo.kv_connector.layout import KVLayout
from octavo.kv_connector.offload import Load, OffloadingMetadata, OffloadingScheduler, Save
from octavo.messages import KVConnectorOutput, SchedulerOutput
from tests.fakes import FakeWorker

Content = list[int | None]


def make_layout(kv: KVCacheConfig, **more: object) -> KVLayout:
    states = tuple(group for group in kv.groups if group.has_states)
    groups = tuple(kv.paged_groups)
    return KVLayout("model", kv.block_size, "float32", groups, states, **more)


def make_connector(
    kv: KVCacheConfig, slots: int, file_slots: int = 0, **config: object
) -> OffloadingScheduler:
    """Return the scheduler's half, with the given number of places for blocks, and for a state."""
    layout = make_layout(kv)
    slots += len(layout.pieces)
    file_slots += len(layout.pieces) if file_slots else 0
    extra: dict[str, object] = {"cpu_bytes_to_use": slots * layout.copy_nbytes}
    extra["eviction_policy"] = config.pop("eviction_policy", "lru")
    if file_slots:
        extra |= {"file_path": "/nowhere", "file_bytes_to_use": file_slots * layout.copy_nbytes}
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", engine_id="0", kv_connector_extra_config=extra, **config
    )
    settings = EngineConfig(cache=CacheConfig(kv_transfer_config=transfer))
    return OffloadingScheduler(settings, layout)


class FakeTransfers:
    """Transfers that save at once, and load on request: places and blocks must still be right.

    Args:
        worker: the worker with the memory.
    """

    def __init__(self, worker: FakeWorker) -> None:
        self.worker, self.memory = worker, worker.memory
        self.block_size = worker.config.block_size
        self.slots: dict[int, tuple[bytes, Content]] = {}
        self.file: dict[int, tuple[bytes, Content]] = {}
        self.pending: dict[str, list[Load]] = {}
        self.num_loaded = self.num_damaged = 0

    def step(self, work: SchedulerOutput) -> None:
        """Note that a step with this metadata has been computed."""
        if work.kv_connector_metadata is None:
            return
        metadata = msgspec.msgpack.decode(work.kv_connector_metadata, type=OffloadingMetadata)
        for req_id, loads in metadata.loads.items():
            assert req_id not in self.pending
            self.pending[req_id] = loads
        written = {load.slot for loads in self.pending.values() for load in loads}
        for save in metadata.saves:
            assert save.slot not in written, "a load is to read or write there"
            self._save(save)

    def _save(self, save: Save) -> None:
        content = self._read(save.block_id)
        assert None not in content
        self.slots[save.slot] = save.block_hash, content
        if save.file_slot >= 0:
            self.file[save.file_slot] = save.block_hash, content

    def _read(self, block_id: int) -> Content:
        """Return what a block, or a state, holds; every piece of a state has all of it here."""
        if block_id > 0:
            return self.memory[block_id].copy()
        assert self.worker.states is not None
        return [self.worker.states.slots[slot_of_state(block_id)]]

    def _write(self, block_id: int, content: Content) -> None:
        if block_id > 0:
            self.memory[block_id] = content.copy()
        else:
            assert self.worker.states is not None
            (self.worker.states.slots[slot_of_state(block_id)],) = content

    def deliver(self, req_id: str, damaged: int = 0) -> KVConnectorOutput:
        """Deliver the blocks of a request; the given number of copies is damaged.

        They are the last ones, or the first ones if the number is negative.
        """
        loads = self.pending.pop(req_id)
        bad = loads[:-damaged] if damaged < 0 else loads[len(loads) - min(damaged, len(loads)) :]
        invalid = sorted({load.block_id for load in bad})
        for load in loads:
            if load.file_slot >= 0:
                found = self.file[load.file_slot]
                if load.slot >= 0:
                    self.slots[load.slot] = found
            else:
                found = self.slots[load.slot]
            block_hash, content = found
            assert block_hash == load.block_hash, "something else is there by now"
            if load.block_id in invalid:
                content = [-1] * len(content)
            self._write(load.block_id, content)
        self.num_loaded += sum(load.block_id not in invalid for load in loads)
        self.num_damaged += len(invalid)
        return KVConnectorOutput(finished_recving=[req_id], invalid_block_ids=invalid)
