import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.layers.step_table import StepSize, input_batch_nbytes
from octavo.messages import CoreSamplingParams, NewRequestData, ScheduledRequest
from octavo.models.cache import AttentionCache
from octavo.worker.input_batch import UNKNOWN, HostTable, InputBatch, StepBuffers, StepInputs
from tests.fakes import picture

KV = KVCacheConfig(
    num_blocks=100,
    block_size=4,
    groups=make_kv_cache_groups([AttentionCache(1, 8), AttentionCache(1, 8, 8)]),
)


def add(batch: InputBatch, req_id: str, tokens, blocks, computed=0) -> int:
    row = batch.add(req_id, NewRequestData(tokens, len(tokens), CoreSamplingParams(), computed))
    batch.append_blocks(row, blocks)
    return row


def one_each(batch: InputBatch, rows: list[int], tokens: list[int]) -> list[int]:
    """Append one token to each of some rows."""
    return batch.append(np.array(rows), np.array(tokens), np.ones(len(rows), np.int64)).tolist()


def gather(
    batch: InputBatch, scheduled: dict[str, int], drafts: dict[str, list[int]] | None = None
) -> tuple[StepInputs, HostTable]:
    """Return the inputs, and the step's part of their arrays."""
    drafts = drafts or {}
    requests = [
        # One place has no draft.
        ScheduledRequest(req_id, count + 1, num_drafts=1 + len(drafts.get(req_id, [])))
        for req_id, count in scheduled.items()
    ]
    size = StepSize(sum(scheduled.values()), 3, 3 + sum(map(len, drafts.values())))
    inputs = batch.gather(requests, drafts, StepBuffers(batch.layout(size)))
    return inputs, inputs.table.first(inputs.size)


@pytest.fixture
def batch():
    return InputBatch(max_num_seqs=3, max_model_len=16, kv_cache=KV)


def test_prefill_chunk_and_decode_in_one_batch(batch):
    a = add(batch, "a", [1, 2, 3, 4, 5, 6], [[10, 11], [20, 21]])
    b = add(batch, "b", [7, 8, 9], [[12], [22]], computed=2)
    inputs, table = gather(batch, {"b": 1, "a": 5})
    assert inputs.req_ids == ["b", "a"]
    assert inputs.rows.tolist() == [b, a]
    assert inputs.counts.tolist() == [1, 5]
    assert inputs.size == StepSize(6, 2, 1)
    assert table.input_ids.tolist() == [9, 1, 2, 3, 4, 5]
    assert table.positions.tolist() == [2, 0, 1, 2, 3, 4]
    assert table.query_start_loc.tolist() == [0, 1, 6]
    assert table.seq_lens.tolist() == [3, 5]
    assert table.slot_mappings[0].tolist() == [50, 40, 41, 42, 43, 44]
    assert table.slot_mappings[1].tolist() == [90, 80, 81, 82, 83, 84]
    assert table.block_tables[0][:, :2].tolist() == [[12, 0], [10, 11]]
    assert inputs.num_samples.tolist() == [1, 0]
    assert inputs.sampling.tolist() == [0]
    assert inputs.sampling_rows.tolist() == [b]


def test_drafts_are_computed_behind_the_known_tokens(batch):
    """A row of logits for the last known token and for each draft."""
    a = add(batch, "a", [1, 2, 3, 4, 5, 6], [[10, 11], [20, 21]], computed=5)
    b = add(batch, "b", [7, 8, 9], [[12], [22]])
    c = add(batch, "c", [3, 2], [[13], [23]], computed=1)
    inputs, table = gather(batch, {"c": 2, "b": 2, "a": 3}, {"a": [77, 78], "c": [79]})
    assert table.input_ids.tolist() == [2, 79, 7, 8, 6, 77, 78]
    assert table.positions.tolist() == [1, 2, 0, 1, 5, 6, 7]
    assert table.logits_indices.tolist() == [0, 1, 4, 5, 6]
    assert inputs.num_samples.tolist() == [2, 0, 3]
    assert inputs.sampling.tolist() == [0, 2]
    assert inputs.sampling_rows.tolist() == [c, c, a, a, a]
    assert inputs.size == StepSize(7, 3, 5)
    assert batch.num_tokens[[a, b, c]].tolist() == [6, 3, 2], "drafts do not count yet"
    # One of a's is right; wrong drafts leave no trace.
    places = batch.append(np.array([a, c]), np.array([77, 50, 79, 51]), np.array([2, 2]))
    assert places.tolist() == [6, 7, 2, 3]
    assert batch.token_ids[a, :8].tolist() == [1, 2, 3, 4, 5, 6, 77, 50]
    assert batch.token_ids[c, :4].tolist() == [3, 2, 79, 51]
    assert batch.num_tokens[[a, c]].tolist() == [8, 4]


def test_sampled_tokens_are_the_next_step_s_input(batch):
    row = add(batch, "a", [1, 2, 3, 4], [[10], [20]])
    assert gather(batch, {"a": 4})[0].num_samples.tolist() == [1]
    assert one_each(batch, [row], [77]) == [4]
    batch.num_computed_tokens[row] = 4
    batch.append_blocks(row, [[11], [21]])
    inputs, table = gather(batch, {"a": 1})
    assert table.input_ids.tolist() == [77]
    assert table.slot_mappings[0].tolist() == [44]
    assert inputs.num_samples.tolist() == [1]


def test_rows_are_reused_without_what_was_there_before(batch):
    for name in "abc":
        add(batch, name, [1] * 9, [[1, 2, 3], [4, 5, 6]])
    row = batch.remove("b")
    assert batch.remove("b") is None
    assert add(batch, "d", [5], [[9], [8]]) == row
    inputs, table = gather(batch, {"d": 1})
    assert table.block_tables[0][0, 0] == 9
    assert inputs.num_samples.tolist() == [1]


def test_a_full_row_keeps_what_it_has(batch):
    full = add(batch, "a", list(range(16)), [[1, 2, 3, 4], [5, 6, 7, 8]])
    row = add(batch, "b", list(range(14)), [[1, 2, 3, 4], [5, 6, 7, 8]])
    assert one_each(batch, [full], [99]) == [-1]
    counts = np.array([0, 3])
    assert batch.append(np.array([full, row]), np.array([91, 92, 93]), counts).tolist() == [
        *(14, 15),
        -1,
    ]
    assert batch.num_tokens[[full, row]].tolist() == [16, 16]
    assert batch.token_ids[full].tolist() == list(range(16))
    assert batch.token_ids[row].tolist() == [*range(14), 91, 92]


def test_rows_of_items_replace_embeddings_at_any_place():
    encoded = {"a": np.arange(4), "b": np.arange(10, 13)}
    batch = InputBatch(3, 16, KV, encoded=encoded)
    items = [picture("a", 2, 6, bytes([1, 1, 0, 1, 0, 1])), picture("b", 9, 3)]
    data = NewRequestData([7] * 14, 14, CoreSamplingParams(), 0, mm_features=items)
    row = batch.add("r", data)
    batch.append_blocks(row, [list(range(4)), list(range(4))])
    add(batch, "text", [1, 2, 3], [[9], [9]])
    found = []
    for start, count in ((0, 3), (3, 5), (8, 2), (10, 4)):
        batch.num_computed_tokens[row] = start
        inputs, _ = gather(batch, {"text": 3, "r": count})
        found.append([(begin - 3 + start, rows.tolist()) for begin, rows in inputs.embeds])
    assert found == [[(2, [0])], [(3, [1]), (5, [2]), (7, [3])], [(9, [10])], [(10, [11, 12])]]
    assert batch.features == {"r": items}
    batch.remove("r")
    assert batch.features == {}
    add(batch, "other", [1] * 12, [[1, 2, 3], [4, 5, 6]])
    assert gather(batch, {"other": 12})[0].embeds == []


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
        add(batch, str(i), tokens, blocks, computed)
        expected[str(i)] = tokens, blocks, computed, count
    for name in data.draw(st.permutations(list(expected))):
        scheduled[name] = expected[name][3]
    buffers = StepBuffers(batch.layout(StepSize(80, 5, 5)))
    for array in buffers.table:
        array[...] = -7
    requests = [ScheduledRequest(name, count) for name, count in scheduled.items()]
    step = batch.gather(requests, {}, buffers)
    inputs = step.table.first(step.size)
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
    assert step.num_samples.tolist() == samples
    assert inputs.logits_indices.tolist() == (starts[1:][samples] - 1).tolist()


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
        ("drafts", [7] * 6, "6 drafts among 5 tokens, and room for 2 rows"),
        ("drafts", [7, 7], "2 drafts among 5 tokens, and room for 2 rows"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_written(batch, field, value, message):
    row = add(batch, "a", [1, 2, 3, 4, 5, 6], [[10, 11], [20, 21]])
    count, room, requests, drafts = 5, 5, 1, []
    if field == "row":
        batch.row_of["a"] = value
    elif field == "computed":
        batch.num_computed_tokens[row] = value
    elif field == "count":
        count = value
    elif field == "room":
        room = value
    elif field == "drafts":
        drafts = value
        batch.num_tokens[row] = 5 - len(drafts)
    else:
        requests = value
    buffers = StepBuffers(batch.layout(StepSize(room, requests, 2)))
    buffers.table.input_ids[:] = -7
    request = ScheduledRequest("a", count, num_drafts=len(drafts))
    with pytest.raises(IndexError, match=message):
        batch.gather([request], {"a": drafts}, buffers)
    assert (buffers.table.input_ids == -7).all()


@pytest.mark.parametrize(("seqs", "length", "tokens"), [(3, 16, 20), (1, 7, 9), (8, 33, 5)])
def test_the_planned_bytes_are_what_rows_and_inputs_take(seqs, length, tokens):
    batch = InputBatch(seqs, length, KV)
    rows = batch.token_ids.nbytes + batch.block_tables.nbytes
    size = StepSize(tokens, seqs, 2 * seqs)
    layout = batch.layout(size)
    table = StepBuffers(layout).table
    planned = input_batch_nbytes(size, length, KV.block_size, len(KV.groups))
    assert planned == rows + layout.nbytes
    used = sum(array.nbytes for array in table)
    assert used <= layout.nbytes < used + 16 * len(list(table))
    assert table.input_ids.shape == table.positions.shape == (tokens,)
    assert table.query_start_loc.shape == (seqs + 1,)
    assert table.logits_indices.shape == table.sampling_rows.shape == (2 * seqs,)
    assert table.slot_mappings.shape == (2, tokens)
    assert table.block_tables.shape == (2, seqs, -(-length // 4))


def test_a_row_given_again_has_nothing_of_its_last_request(batch):
    add(batch, "a", [1, 2, 3, 4, 5, 6], [[10, 11], [20, 21]])
    row = batch.row_of["a"]
    one_each(batch, [row], [UNKNOWN])
    assert batch.remove("a") == row
    assert batch.remove("a") is None
    assert add(batch, "b", [7], [[12], [22]]) == row
    assert (batch.token_ids[row] >= 0).all(), "a token that nobody knows"
    assert batch.num_blocks[:, row].tolist() == [1, 1]
    assert gather(batch, {"b": 1})[1].slot_mappings[0].tolist() == [48]
    assert batch.owners[row] == 2
