"""Custom KV connector, which keeps full blocks in a dictionary of the worker's process."""

from collections.abc import Iterator

import msgspec
import numpy as np

from octavo import LLM, SamplingParams
from octavo.config import KVTransferConfig
from octavo.kv_connector.base import KVConnectorBase, KVConnectorMetadata
from octavo.kv_connector.pages import BlockCopy
from octavo.kv_connector.tracking import BlockTracker, longest_match

Block = tuple[int, int, bytes]  # group, block id, hash


class DictMetadata(KVConnectorMetadata, array_like=True):
    """Message of a step from the scheduler's half to the worker's half."""

    loads: list[Block] = msgspec.field(default_factory=list)
    saves: list[Block] = msgspec.field(default_factory=list)


class DictConnector(KVConnectorBase):
    """Connector with the methods that `KVConnectorBase` describes."""

    metadata_type = DictMetadata

    def __init__(self, config, role, layout):
        super().__init__(config, role, layout)
        # The scheduler's half: the saved blocks, and the blocks to load in the next step.
        self.known = [set() for _ in layout.groups]
        self.tracker = BlockTracker(layout)
        self.new_loads: list[Block] = []
        # The worker's half: the blocks themselves.
        self.copies: dict[tuple[int, bytes], np.ndarray] = {}
        self.metadata = DictMetadata()
        self.damaged: set[int] = set()

    # The scheduler's half

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        end = longest_match(self.layout, request, num_computed_tokens, self.known)
        return end * self.layout.block_size - num_computed_tokens, False

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        if num_external_tokens == 0:
            self.tracker.start(request, block_ids)
            return
        count = num_external_tokens // self.layout.block_size
        for group_id, ids in enumerate(block_ids):
            for i in range(len(ids) - count, len(ids)):
                if ids[i] != 0:  # 0 means a block that the request does not need
                    self.new_loads.append((group_id, ids[i], request.block_hashes[i]))

    def build_connector_meta(self, scheduler_output):
        saves = []
        for _, group_id, block_id, block_hash in self.tracker.full_blocks(scheduler_output):
            if block_hash not in self.known[group_id]:
                self.known[group_id].add(block_hash)
                saves.append((group_id, block_id, block_hash))
        loads, self.new_loads = self.new_loads, []
        return DictMetadata(loads, saves)

    # The worker's half

    def register_kv_caches(self, kv_caches):
        self.kv_caches = kv_caches

    def start_load_kv(self, metadata):
        self.metadata = metadata
        there = [block for block in metadata.loads if (block[0], block[2]) in self.copies]
        self.damaged = {block_id for _, block_id, _ in metadata.loads} - {b[1] for b in there}
        self.damaged |= self.kv_caches.load(list(self.places(there)))

    def wait_for_save(self):
        for group_id, _, block_hash in self.metadata.saves:
            self.copies[group_id, block_hash] = np.zeros(self.layout.copy_nbytes, np.uint8)
        self.kv_caches.save(list(self.places(self.metadata.saves)))

    def places(self, blocks) -> Iterator[BlockCopy]:
        for group_id, block_id, block_hash in blocks:
            address = self.copies[group_id, block_hash].ctypes.data
            yield BlockCopy(group_id, block_id, address, block_hash)

    def get_finished(self):
        return set(), set()  # nothing is loaded concurrently with steps

    def get_block_ids_with_load_errors(self):
        damaged, self.damaged = self.damaged, set()
        return damaged


if __name__ == "__main__":
    config = KVTransferConfig(
        kv_connector="DictConnector", kv_connector_module_path="my_kv_connector"
    )
    llm = LLM(model="octavo/stories", kv_transfer_config=config)
    prompt = "Once upon a time there was a little dog who liked to run in the park. " * 8
    for _ in range(2):
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20))
        num_tokens = len(output.prompt_token_ids)
        print(f"{output.num_cached_tokens} of {num_tokens} prompt tokens were loaded")
        print(output.outputs[0].text)
        llm.reset_prefix_cache()
