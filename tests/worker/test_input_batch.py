import numpy as np
import pytest

from octavo.kv_cache.groups import KVCacheConfig, KVCacheGroup
from octavo.messages import NewRequestData
from octavo.sampling_params import SamplingParams
from octavo.worker.input_batch import InputBatch, StepBuffers, StepInputs

KV = KVCacheConfig(
    num_blocks=100,
    block_size=4,
    groups=(KVCacheGroup((0,)), KVCacheGroup((1,), 8)),
    group_size=1,
    bytes_per_block=64,
)


def new(req_id: str, tokens: list[int], blocks: list[list[int]], computed: int = 0):
    return NewRequestData(req_id, tokens, len(tokens), SamplingParams(), blocks, computed)


def gather(batch: InputBatch, scheduled: dict[str, int]) -> StepInputs:
    return batch.gather(scheduled, StepBuffers(batch.layout(sum(scheduled.values()), 3)))


@pytest.fixture
def batch():
    return InputBatch(max_num_seqs=3, max_model_len=16, kv_cache=KV)


def test_prefill_chunk_and_decode_in_one_batch(batch):
    a = batch.add(new("a", [1, 2, 3, 4, 5, 6], [[10, 11], [20, 21]]))
    b = batch.add(new("b", [7, 8, 9], [[12], [22]], computed=2))
    inputs = gather(batch, {"b": 1, "a": 5})
    assert inputs.req_ids == ["b", "a"]
    assert inputs.rows.tolist() == [b, a]
    assert inputs.input_ids.tolist() == [9, 1, 2, 3, 4, 5]
    assert inputs.positions.tolist() == [2, 0, 1, 2, 3, 4]
    assert inputs.query_start_loc.tolist() == [0, 1, 6]
    assert inputs.seq_lens.tolist() == [3, 5]
    assert inputs.slot_mappings[0].tolist() == [50, 40, 41, 42, 43, 44]
    assert inputs.slot_mappings[1].tolist() == [90, 80, 81, 82, 83, 84]
    assert inputs.block_tables[0][:, :2].tolist() == [[12, 0], [10, 11]]
    assert inputs.samples.tolist() == [True, False]


def test_sampled_tokens_are_the_next_step_s_input(batch):
    row = batch.add(new("a", [1, 2, 3, 4], [[10], [20]]))
    assert gather(batch, {"a": 4}).samples.tolist() == [True]
    batch.append_tokens(np.array([row]), np.array([77]))
    batch.num_computed_tokens[row] = 4
    batch.append_blocks(row, [[11], [21]])
    inputs = gather(batch, {"a": 1})
    assert inputs.input_ids.tolist() == [77]
    assert inputs.slot_mappings[0].tolist() == [44]
    assert inputs.samples.tolist() == [True]


def test_rows_are_reused_without_what_was_there_before(batch):
    for name in "abc":
        batch.add(new(name, [1] * 9, [[1, 2, 3], [4, 5, 6]]))
    row = batch.remove("b")
    assert batch.remove("b") is None
    assert batch.add(new("d", [5], [[9], [8]])) == row
    inputs = gather(batch, {"d": 1})
    assert inputs.block_tables[0][0, 0] == 9
    assert inputs.samples.tolist() == [True]


def test_a_full_row_keeps_what_it_has(batch):
    row = batch.add(new("a", list(range(16)), [[1, 2, 3, 4], [5, 6, 7, 8]]))
    batch.append_tokens(np.array([row]), np.array([99]))
    assert batch.num_tokens[row] == 16
    assert batch.token_ids[row].tolist() == list(range(16))
