"""`FlatLogprobs`, a list of dicts in little memory."""

import dataclasses
import pickle

import numpy as np
import pytest

from octavo.outputs import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from tests.params import pack_logprobs

ROWS = [
    {7: Logprob(-1.0, 3, "7"), 1: Logprob(-0.25, 1, "1"), 2: Logprob(-0.5, 2, "2")},
    {1: Logprob(-0.25, 1, "1"), 5: Logprob(-4.0, 2, "5")},  # the token itself is the best one
]


def make(**kwargs):
    flat = FlatLogprobs(str, **kwargs)
    lists = pack_logprobs(
        [[7, 1, 2], [1, 1, 5]], [[-1.0, -0.25, -0.5], [-0.25, -0.25, -4.0]], [3, 1]
    )
    flat.append_rows(lists.token_ids, lists.logprobs, lists.ranks)
    return flat


def test_it_is_a_list():
    flat = make()
    assert flat == ROWS
    assert flat == ROWS
    assert flat == make()
    assert flat != ROWS[:1]
    assert flat != 5
    assert len(flat) == 2
    assert [*flat] == ROWS
    assert (flat[0], flat[-1]) == (ROWS[0], ROWS[1])
    assert flat[1:] == ROWS[1:]
    assert flat[::-1] == ROWS[::-1]
    assert repr(flat) == repr(ROWS)
    assert list(flat[0]) == [7, 1, 2]  # the token itself is first
    assert type(pickle.loads(pickle.dumps(flat))) is list
    for wrong in (2, -3):
        with pytest.raises(IndexError):
            flat[wrong]
    assert FlatLogprobs(None) == []
    assert not FlatLogprobs(None)


def test_tokens_that_were_asked_for_have_no_rank():
    rows = [
        {
            t: lp if t in (7, 1) and i == t % 2 else Logprob(lp.logprob, None, lp.decoded_token)
            for t, lp in row.items()
        }
        for i, row in enumerate(ROWS)
    ]
    flat = make(ranked=False)
    rows[0][7], rows[1][1] = ROWS[0][7], ROWS[1][1]  # the tokens themselves have one
    assert flat == rows
    assert flat.copy() == rows


def test_nothing_is_known_of_a_prompts_first_token():
    assert make(of_prompt=True) == [None, *ROWS]
    assert make(of_prompt=True)[-3:1] == [None]
    assert FlatLogprobs(None, of_prompt=True) == [None]


def test_a_copy_stays_as_it_is():
    flat = make()
    copy = flat.copy()
    flat.extend(make())
    assert copy == ROWS
    assert flat == ROWS + ROWS


def test_without_texts():
    flat = FlatLogprobs(None)
    lists = pack_logprobs([[7]], [[-1.0]], [3])
    flat.append_rows(lists.token_ids, lists.logprobs, lists.ranks)
    assert flat == [{7: Logprob(-1.0, 3, None)}]


def test_a_row_takes_as_many_bytes_as_its_numbers():
    rows, width = 1000, 21
    flat = FlatLogprobs(str)
    for _ in range(rows):
        flat.append_rows(bytes(4 * width), np.zeros(width, np.float32).tobytes(), bytes(4))
    held = sum(a.buffer_info()[1] * 4 for a in (flat._token_ids, flat._logprobs, flat._ranks))
    assert held == rows * (2 * width + 1) * 4


def test_outputs_have_vllms_fields_in_its_order():
    assert [f.name for f in dataclasses.fields(RequestOutput)] == [
        *("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "outputs", "finished"),
        *("metrics", "lora_request", "encoder_prompt", "encoder_prompt_token_ids"),
        *("num_cached_tokens", "num_cache_creation_tokens", "prompt_token_id_logprobs"),
        *("kv_transfer_params", "ec_transfer_params", "num_computed_tokens", "pooled"),
    ]
    assert [f.name for f in dataclasses.fields(CompletionOutput)] == [
        *("index", "text", "token_ids", "cumulative_logprob", "logprobs", "routed_experts"),
        *("finish_reason", "stop_reason", "lora_request", "sampling_mask"),
        *("spec_decode_metrics", "weight_versions", "repetition_period", "message"),
    ]


def test_times_by_vllms_names():
    times = RequestMetrics(10.0, 10.5, 12.0, 13.0)
    assert (times.scheduled_ts, times.first_token_ts, times.last_token_ts) == (10.5, 12.0, 13.0)
    assert times.first_token_latency == 2.0
    assert RequestMetrics(10.0).first_token_latency == 0
