"""Map of the KV cache for the engine view."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from octavo.kv_cache.block_map import AGES, OWNER_SHIFT, make_block_map
from octavo.kv_cache.states import SlotKind
from tests.fakes import STATE
from tests.kv_cache.test_manager import ManagerMachine, admit, make_manager, make_request


def read(cells):
    """Return age, known, used, references and owner of cells."""
    cells = np.frombuffer(cells, "<u4")
    return [cells >> shift & 7 for shift in (0, 3, 6, 9)] + [cells >> OWNER_SHIFT]


def check(manager):
    """Check that a map has the records of the pool and of the states."""
    found = make_block_map(manager)
    assert found.blocks_per_cell == 1
    age, known, used, refs, owner = read(found.cells)
    holders = manager.held_blocks()
    counts = {name: sum(map(bool, ids)) for name, ids in holders.items()}
    assert manager.num_held_blocks() == counts
    free = [b.block_id for b in manager.pool.free_queue.to_list() if b.block_hash is not None]
    for block in manager.pool.blocks[1:]:
        i = block.block_id - 1
        assert known[i] == (7 if block.block_hash is not None else 0)
        assert used[i] == (7 if block.ref_cnt else 0)
        assert refs[i] == min(7, block.ref_cnt)
        if block.ref_cnt:
            assert block.block_id in holders[found.owners[owner[i] - 1]]
        else:
            assert owner[i] == 0
        rank = free[::-1].index(block.block_id) if block.block_id in free else 0
        assert age[i] == rank * AGES // max(1, len(free))
    states = manager.states
    cells = np.frombuffer(found.states, "<u4")
    if states is None:
        assert len(cells) == 0
        return
    assert len(cells) == states.num_slots
    kinds = [SlotKind(cell >> 3 & 7) for cell in cells.tolist()]
    known_slots = {snapshot.slot for snapshot in states.known.values()}
    assert known_slots <= {i for i, kind in enumerate(kinds) if kind == SlotKind.SNAPSHOT}
    free_slots = {*states._free, *states._freed}
    assert free_slots == {i for i, kind in enumerate(kinds) if kind == SlotKind.FREE}
    for slot, (kind, request_id) in states.slots().items():
        if kind in (SlotKind.LIVE, SlotKind.PENDING):
            assert found.owners[(int(cells[slot]) >> OWNER_SHIFT) - 1] == request_id


class MapMachine(ManagerMachine):
    @invariant()
    def the_map_agrees(self):
        # A copy that is yet to be scheduled holds its source.
        if hasattr(self, "manager") and not self.manager._copies:
            check(self.manager)


MapMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestMap = MapMachine.TestCase


def test_a_shared_block_has_its_first_owner_and_two_references():
    manager = make_manager()
    admit(manager, make_request("a", range(10)))
    admit(manager, make_request("b", range(10)))
    found = make_block_map(manager)
    _, known, _, refs, owner = read(found.cells)
    assert found.owners == ["a", "b"]
    assert refs[:4].tolist() == [2, 2, 1, 1]
    assert owner[:4].tolist() == [1, 1, 1, 2]
    assert known[:4].tolist() == [7, 7, 0, 0]


@pytest.mark.parametrize("max_cells", [1, 3, 10, 19])
def test_a_cell_of_several_blocks_has_their_shares(max_cells):
    manager = make_manager(num_blocks=20)
    admit(manager, make_request("a", range(40)))  # blocks 1 to 10
    cells = make_block_map(manager, max_cells)
    size = cells.blocks_per_cell
    _, known, used, _, owner = read(cells.cells)
    assert len(used) == -(-19 // size) <= max_cells
    for i, share in enumerate(used):
        blocks = range(1 + i * size, min(20, 1 + (i + 1) * size))
        held = sum(block <= 10 for block in blocks)
        assert share == known[i] == -(-7 * held // len(blocks))
        assert owner[i] == (held > 0)


def test_a_snapshot_is_older_the_sooner_it_is_given_up():
    manager = make_manager(states=(STATE,))
    for i in range(3):
        request = make_request(f"r{i}", [i, *range(20)])
        admit(manager, request)
        manager.free(request)
    found = make_block_map(manager)
    cells = np.frombuffer(found.states, "<u4")
    ranked = manager.states.ranked_slots()
    ages = [int(cells[slot]) & 7 for slot in ranked]
    assert len(ranked) > 1
    assert ages == [rank * AGES // len(ranked) for rank in range(len(ranked))]
