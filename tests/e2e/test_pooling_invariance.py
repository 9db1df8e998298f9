"""Vectors and scores, bit for bit the same with any other requests, chunks and cached prefixes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.frontend.prompts import TokensPrompt
from octavo.pooling_params import PoolingParams
from tests.models.configs.sizes import SIZES, VOCAB, WIDE_HEADS
from tests.models.harness import make_hf, make_prompts
from tests.pooling import (
    NORMALIZE,
    change_config,
    dense_config,
    open_llm,
    pooling,
    results,
    write_dense,
    write_modules,
)

START = make_prompts(VOCAB, (64,), seed=5)[0]
PROMPTS = [*make_prompts(VOCAB, (100, 3, 31, 77), seed=6), [*START, 9, 8, 7], [*START, 9]]
OTHERS = make_prompts(VOCAB, tuple(range(1, 90, 7)), seed=7)


def _save(kind: str, folder: Path) -> None:
    if kind == "classes":
        model = make_hf("LlamaForSequenceClassification", **SIZES, num_labels=3)
        model.save_pretrained(folder)
        return
    if kind == "disentangled":
        sizes = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56}
        sizes |= {"num_hidden_layers": 3, "num_attention_heads": 5, "num_labels": 1}
        make_hf(
            "DebertaV2ForSequenceClassification",
            **sizes,
            relative_attention=True,
            pos_att_type="p2c|c2p",
            position_buckets=16,
            share_att_key=True,
            position_biased_input=False,
            norm_rel_ebd="layer_norm",
            conv_kernel_size=3,
            conv_act="gelu",
        ).save_pretrained(folder)
        return
    fields = WIDE_HEADS | {"sliding_window": 16, "use_bidirectional_attention": True}
    name = "Gemma3TextModel" if kind == "sees all" else "Qwen3ForCausalLM"
    make_hf(name, **fields if kind == "sees all" else WIDE_HEADS).save_pretrained(folder)
    mode = "lasttoken" if kind == "last" else "mean_tokens"
    write_modules(folder, pooling(mode), ("Dense", dense_config(48, 40, "Tanh")), NORMALIZE)
    write_dense(folder, 2, 48, 40, "Tanh")


def _same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [x.tobytes() for x in found] == [x.tobytes() for x in expected]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["last", "mean", "classes", "sees all", "disentangled"])
def test_one_text_one_result(kind: str, dtype: str, tmp_path: Path) -> None:
    _save(kind, tmp_path)
    with open_llm(tmp_path, dtype=dtype, enable_prefix_caching=False) as llm:
        expected = [results(llm, None, [ids])[0] for ids in PROMPTS]
        _same(results(llm, None, [*OTHERS, *PROMPTS])[len(OTHERS) :], expected)
        tokens = [pooler.task for pooler in llm.llm_engine.spec.poolers][-1]
        of_tokens = [results(llm, tokens, [ids])[0] for ids in PROMPTS]
    whole = kind in ("sees all", "disentangled")
    budget = {} if whole else {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    with open_llm(tmp_path, dtype=dtype, **budget) as llm:
        for _ in range(2):  # prefixes are cached the second time
            _same(results(llm, None, [*PROMPTS, *OTHERS])[: len(PROMPTS)], expected)
            _same(results(llm, tokens, PROMPTS), of_tokens)
        if kind in ("last", "classes"):
            again = llm.encode({"prompt_token_ids": PROMPTS[4]}, use_tqdm=False)[0]
            assert again.num_cached_tokens == 64
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        ranks = {name: 2, "num_threads": 1}
        with open_llm(tmp_path, dtype=dtype, **ranks) as llm:
            _same(results(llm, None, PROMPTS), expected)


@pytest.mark.parametrize("name", ["octavo/stories-encoder", "octavo/stories-reranker"])
def test_one_text_one_result_of_the_built_in_models(name: str) -> None:
    with open_llm(Path(name), dtype="auto") as llm:
        expected = [results(llm, None, [ids])[0] for ids in PROMPTS]
        _same(results(llm, None, [*OTHERS, *PROMPTS])[len(OTHERS) :], expected)
        _same(results(llm, None, [*PROMPTS[::-1], *OTHERS])[: len(PROMPTS)], expected[::-1])
    with open_llm(Path(name), dtype="auto", tensor_parallel_size=2, num_threads=1) as llm:
        _same(results(llm, None, PROMPTS), expected)


def test_answers_and_vectors_of_one_model(tmp_path: Path) -> None:
    """A decoder computes both in the same steps, and preempts some of them."""
    make_hf("LlamaForCausalLM", **SIZES).save_pretrained(tmp_path)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    vectors = PoolingParams(task="embed", use_activation=False)
    given = [TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS]

    def both(llm: LLM, indices: Sequence[int]) -> dict[str, list[int] | bytes]:
        engine = llm.llm_engine
        for i in indices:
            engine.add_request(f"text {i}", given[i], greedy)
            request, _ = engine.process_pooling(given[i], vectors)
            names[engine.start(request, vectors.as_sampling_params(), None)] = f"vector {i}"
        found: dict[str, list[int] | bytes] = {}
        while engine.has_unfinished_requests():
            for out in engine.step():
                if out.finished:
                    name = names.get(out.request_id, out.request_id)
                    found[name] = out.pooled or list(out.outputs[0].token_ids)
        return found

    names: dict[str, str] = {}
    with open_llm(tmp_path, enable_prefix_caching=False) as llm:
        expected = {}
        for i in range(len(PROMPTS)):
            expected |= both(llm, [i])
    budget = {"max_num_batched_tokens": 24, "max_num_seqs": 8}
    with open_llm(tmp_path, num_gpu_blocks_override=13, **budget) as llm:
        assert both(llm, range(len(PROMPTS))) == expected
        assert llm.stats().num_preemptions > 0
        assert both(llm, range(len(PROMPTS))) == expected


def test_hf_overrides_make_a_decoder_see_all(tmp_path: Path) -> None:
    """GTE-Qwen2 in vLLM: the same folder with is_causal=false has other vectors."""
    make_hf("Qwen2ForCausalLM", **SIZES).save_pretrained(tmp_path)
    write_modules(tmp_path, pooling("lasttoken"), NORMALIZE)
    with open_llm(tmp_path) as llm:
        causal = results(llm, None, PROMPTS)
    with open_llm(tmp_path, hf_overrides={"is_causal": False}) as llm:
        other = results(llm, None, PROMPTS)
    change_config(tmp_path, is_causal=False)
    with open_llm(tmp_path) as llm:
        _same(results(llm, None, PROMPTS), other)
    assert all(abs(a - b).max() > 1e-3 for a, b in zip(causal, other, strict=True))
