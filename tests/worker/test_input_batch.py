import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import CoreSamplingParams, NewRequestData
from octavo.models.cache import AttentionCache
from octavo.worker.input_batch import UNKNOWN, InputBatch, StepBuffers, StepInputs

KV = KVCacheConfig(
    num_blocks=100,
    block_size=4,
    groups=make_kv_cache_groups([AttentionCache(1, 8), AttentionCache(1, 8, 8)]),
)


def new(req_id: str, tokens: list[int], blocks: list[list[int]], computed: int = 0):
    return NewRequestData(req_id, tokens, len(tokens), CoreSamplingParams(), blocks, computed)


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


@given(st.data())
def test_gathered_as_in_python(data):
    """Any chunks of any requests, in any order, into buffers that held another step."""
    batch = InputBatch(max_num_seqs=5, max_model_len=16, kv_cache=KV)
    lengths = data.draw(st.lists(st.integers(1, 16), min_size=1, max_size=5))
    expected, scheduled = {}, {}
    for i, length in enumerate(lengths):
        tokens = data.draw(st.lists(st.integers(0, 999), min_size=length, max_size=length))
        blocks = [data.draw(st.permutations(range(1, 100)))[: -(-length // 4)] for _ in range(2)]
        computed = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - computed))
        batch.add(new(str(i), tokens, blocks, computed))
        expected[str(i)] = tokens, blocks, computed, count
    for name in data.draw(st.permutations(list(expected))):
        scheduled[name] = expected[name][3]
    buffers = StepBuffers(batch.layout(80, 5))
    for array in (buffers.input_ids, buffers.positions, *buffers.slot_mappings):
        array[:] = -7
    inputs = batch.gather(scheduled, buffers)
    places = [(expected[r], p) for r in scheduled for p in range(*_chunk(expected[r]))]
    assert inputs.input_ids.tolist() == [tokens[p] for (tokens, *_), p in places]
    assert inputs.positions.tolist() == [p for _, p in places]
    for group in range(2):
        slots = [blocks[group][p // 4] * 4 + p % 4 for (_, blocks, *_), p in places]
        assert inputs.slot_mappings[group].tolist() == slots
    starts = np.cumsum([0, *scheduled.values()])
    assert inputs.query_start_loc.tolist() == starts.tolist()
    ends = [_chunk(expected[r])[1] for r in scheduled]
    assert inputs.seq_lens.tolist() == ends
    for i, (r, end) in enumerate(zip(scheduled, ends, strict=True)):
        for group, table in enumerate(inputs.block_tables):
            used = -(-end // 4)
            assert table[i, :used].tolist() == list(expected[r][1][group][:used])
    samples = [end == len(expected[r][0]) for r, end in zip(scheduled, ends, strict=True)]
    assert inputs.samples.tolist() == samples
    assert inputs.last_tokens.tolist() == (starts[1:][samples] - 1).tolist()


def _chunk(request):
    _, _, computed, count = request
    return computed, computed + count


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("row", -1, "row -1 of 3"),
        ("row", 3, "row 3 of 3"),
        ("computed", -1, "5 tokens from position -1"),
        ("computed", 12, "5 tokens from position 12 of 16"),
        ("count", -1, "-1 tokens"),
        ("count", 2**62, "tokens from position 0"),
        ("room", 4, "5 tokens from position 0 of 16, and room for 4"),
        ("requests", 0, "1 requests in a step for 0"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_written(batch, field, value, message):
    row = batch.add(new("a", [1, 2, 3, 4, 5, 6], [[10, 11], [20, 21]]))
    count, room, requests = 5, 5, 1
    if field == "row":
        batch.row_of["a"] = value
    elif field == "computed":
        batch.num_computed_tokens[row] = value
    elif field == "count":
        count = value
    elif field == "room":
        room = value
    else:
        requests = value
    buffers = StepBuffers(batch.layout(room, requests))
    buffers.input_ids[:] = -7
    with pytest.raises(IndexError, match=message):
        batch.gather({"a": count}, buffers)
    assert (buffers.input_ids == -7).all()


@pytest.mark.parametrize(("seqs", "length", "tokens"), [(3, 16, 20), (1, 7, 9), (8, 33, 5)])
def test_the_planned_bytes_are_what_rows_and_inputs_take(seqs, length, tokens):
    batch = InputBatch(seqs, length, KV)
    rows = sum(array.nbytes for array in (batch.token_ids, *batch.block_tables))
    inputs = StepBuffers(batch.layout(tokens, seqs))
    planned = InputBatch.nbytes(seqs, length, tokens, KV.block_size, len(KV.groups))
    assert planned == rows + inputs.input_ids.base.nbytes
    arrays = (inputs.input_ids, inputs.positions, *inputs.slot_mappings, *inputs.block_tables)
    used = sum(array.nbytes for array in arrays)
    assert used <= planned - rows <= used + 4 * (tokens + seqs + 1) + 64 * (len(arrays) + 2)


def test_a_row_given_again_has_nothing_of_its_last_request(batch):
    batch.add(new("a", [1, 2, 3, 4, 5, 6], [[10, 11], [20, 21]]))
    row = batch.row_of["a"]
    batch.append_tokens(np.array([row]), np.array([UNKNOWN]))
    assert batch.remove("a") == row
    assert batch.remove("a") is None
    assert batch.add(new("b", [7], [[12], [22]])) == row
    assert (batch.token_ids[row] >= 0).all(), "a token that nobody knows"
    assert batch.num_blocks[:, row].tolist() == [1, 1]
    assert gather(batch, {"b": 1}).slot_mappings[0].tolist() == [48]
    assert batch.owners[row] == 2
