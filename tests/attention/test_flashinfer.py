"""FlashInfer backend with a stand-in for the package: the calls are those that it expects."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import types

import pytest
import torch

from octavo.attention.base import AttentionMetadata, AttentionParams
from octavo.attention.reference import ReferenceAttention
from octavo.errors import ConfigError
from tests.attention.cases import Case

pytest.importorskip("triton", reason="the package triton is not installed")

CPU = torch.device("cpu")


class StandIn:
    """Stand-in for BatchPrefillWithPagedKVCacheWrapper, by its documentation."""

    plans = 0

    def __init__(self, workspace, kv_layout):
        assert kv_layout == "NHD"
        assert workspace.dtype == torch.uint8

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        sm_scale,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
    ):
        StandIn.plans += 1
        assert causal
        pages = paged_kv_indptr.diff()
        table = torch.full((len(pages), max(1, int(pages.max()))), -1, dtype=torch.int32)
        for r, (begin, end) in enumerate(itertools.pairwise(paged_kv_indptr)):
            table[r, : end - begin] = paged_kv_indices[begin:end]
        seq_lens = (pages - 1) * page_size + paged_kv_last_page_len
        self.metadata = AttentionMetadata(
            num_reqs=len(pages),
            num_tokens=int(qo_indptr[-1]),
            max_query_len=int(qo_indptr.diff().max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=qo_indptr,
            seq_lens=seq_lens.int(),
            block_table=table,
            slot_mapping=torch.empty(0, dtype=torch.int64),
        )
        window = None if window_left < 0 else window_left + 1
        self.params = AttentionParams(sm_scale, window, logits_soft_cap)

    def run(self, query, kv_cache, *, out):
        ReferenceAttention().forward(query, kv_cache, self.metadata, out, self.params)
        return out


@pytest.fixture
def backend(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.delitem(sys.modules, "octavo.attention.flashinfer", raising=False)
    StandIn.plans = 0
    yield importlib.import_module("octavo.attention.flashinfer").FlashInferAttention(CPU)
    sys.modules.pop("octavo.attention.flashinfer", None)


@pytest.mark.parametrize("features", [{}, {"window": 20}, {"soft_cap": 2.0}], ids=str)
def test_same_as_the_reference(backend, features):
    case = Case(((1, 1), (70, 1), (33, 33), (150, 7)), **features)
    torch.testing.assert_close(case.run(backend).double(), case.truth(), rtol=1e-5, atol=1e-5)
    assert StandIn.plans == 1


def test_steps_of_the_same_size_have_plans_of_their_own(backend):
    for seeds in ((1, 2), (3, 4)):
        case = Case(((5, 5), (20, 1)), seeds=seeds)
        torch.testing.assert_close(case.run(backend).double(), case.truth(), rtol=1e-5, atol=1e-5)
    assert StandIn.plans == 2


@pytest.mark.parametrize("features", [{"causal": False}, {"bias_distance": 3}], ids=str)
def test_what_it_cannot_do(backend, features):
    with pytest.raises(ConfigError, match="attention_backend=triton"):
        Case(((5, 5),), **features).run(backend)


def test_no_cache_of_bytes(backend):
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        backend.kv_cache_shape(4, 16, 2, 64, "int8")
